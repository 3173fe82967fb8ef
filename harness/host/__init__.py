"""The host: its Python, torch and GPUs, their health, and what of a pack it can show."""
