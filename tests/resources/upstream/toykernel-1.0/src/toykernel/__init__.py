"""A toy upstream: the package that the toy packs accuse."""
