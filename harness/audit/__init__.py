"""The OSV records of the packs' bugs, for pip-audit. This folder imports only `core`."""
