"""What the probe says of many releases, commits or dependency sets, and where the bug came and went."""
