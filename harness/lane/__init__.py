"""One probe in one process group: its environment, its supervisor, what it printed."""
