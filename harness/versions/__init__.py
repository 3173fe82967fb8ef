"""The verdicts of a pack on many releases or commits, and where the bug came and went."""
