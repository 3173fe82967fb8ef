"""A pack on disk: pack.toml, the requirements and the text of the script."""
