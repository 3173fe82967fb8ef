"""A pack on disk: pack.toml and the probe's header."""
