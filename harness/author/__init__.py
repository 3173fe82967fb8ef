"""What helps the author of a pack: a new one from a script, and what is still missing."""
