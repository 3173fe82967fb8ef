"""From lanes to a verdict on a pack."""
