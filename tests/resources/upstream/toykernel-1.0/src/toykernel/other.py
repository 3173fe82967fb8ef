"""A module that no probe loads."""

ANSWER = 42
