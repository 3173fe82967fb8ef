"""The nightly sweep: every pack, target and lane that this host can judge, over all its GPUs at once."""
