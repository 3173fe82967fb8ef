"""What tests and benchmarks share: toy upstreams, toy packs, and the real runner over them."""
