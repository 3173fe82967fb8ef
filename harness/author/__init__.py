"""What helps the author of a pack: a new one from a script, renewed pins, and what is still missing."""
