"""What contracts share. A contract is a pytest file; `kit.plugin` records what its tests found."""

from kit.pairwise import pairwise
from kit.target import Target, alone, current_target, processes

__all__ = ["Target", "alone", "current_target", "pairwise", "processes"]
