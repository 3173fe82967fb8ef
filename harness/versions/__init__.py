"""What the probe says of many releases, commits or companion sets, and where the bug came and went."""
