"""Which versions of an environment have a bug that a pack proves; imports the standard library and packaging alone."""
