"""Wrong fixes: made from a pack's patch, or written by hand, and each put through the probe."""
