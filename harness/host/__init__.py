"""The host: its Python, torch and GPUs, their health, and the targets that it can judge."""
