"""The record of a run: one shape, written whole, with nothing private in it."""
