"""Upstream's own tests, without and with a pack's patch."""
