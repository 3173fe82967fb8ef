"""Trees, patches and dependency sets: fetched, unpacked, checked, never executed."""
