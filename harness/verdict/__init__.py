"""From what lanes showed to a verdict on a pack."""
