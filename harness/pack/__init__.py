"""A pack on disk: pack.toml, the requirements and the text of the script."""

from harness.pack.model import CPU, TESTS, Definition, Dependency, Pack, Target, Thread, Upstream, UpstreamTests

__all__ = ["CPU", "TESTS", "Definition", "Dependency", "Pack", "Target", "Thread", "Upstream", "UpstreamTests"]
