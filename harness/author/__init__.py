"""For the author of a pack: a new pack from a script, and the list of what it still lacks."""
