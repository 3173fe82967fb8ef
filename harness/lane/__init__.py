"""One lane in a process group of its own: its environment, its supervisor and its results."""
