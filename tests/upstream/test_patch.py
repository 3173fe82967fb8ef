"""Patches: applied exactly, or stale with the reason."""

from __future__ import annotations

import pytest

from testing.workbench import Workbench

STALE = {
    "06_patch_needs_an_offset": "only with an offset",
    "07_patch_empty": "the patch is empty",
    "08_patch_reversed": "holds its changes already, or the patch is reversed",
    "09_patch_already_applied": "holds its changes already, or the patch is reversed",
    "10_patch_fuzzy": "patch failed: src/toykernel/scale.py",
    "11_patch_names_no_file_of_the_tree": "src/toykernel/scaling.py: No such file or directory",
    "12_patch_states_another_blob": "is not what the patch's index line says",
}


@pytest.mark.parametrize(("behaviour", "reason"), STALE.items())
def test_a_patch_that_does_not_fit_exactly_is_stale(workbench: Workbench, behaviour: str, reason: str) -> None:
    workbench.lay(behaviour)
    assert workbench.gives(1, "PATCH_STALE", reason=reason)["pristine"] == "BUG_REPRODUCED"
