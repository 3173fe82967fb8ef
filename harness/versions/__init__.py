"""What the probe says of many releases or commits, and where the bug came and went."""
