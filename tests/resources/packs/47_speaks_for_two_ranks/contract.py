"""toykernel scales each value by its own weight on each of two ranks, which share the values."""

import json
import subprocess
import sys

import pytest

EVIDENCE_WITHOUT_GPU = "traced"
RANKS = 2
VALUES, WEIGHTS = [1.0, 2.0, 3.0, 4.0], [1.0, 0.5, 0.0, 2.0]


def speak(rank):
    """Be one rank: scale a part of the values."""
    from toykernel import scale

    mine = slice(rank * 2, rank * 2 + 2)
    ones = scale.scale(VALUES[mine], [1.0] * 2)
    print(json.dumps({"scaled": scale.scale(VALUES[mine], WEIGHTS[mine]), "ones": ones}))


@pytest.fixture(scope="module")
def found():
    commands = [[sys.executable, "-P", __file__, str(rank)] for rank in range(RANKS)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    return [json.loads(rank.communicate()[0]) for rank in ranks]


@pytest.mark.control
def test_ones(found):
    assert [value for one in found for value in one["ones"]] == VALUES


@pytest.mark.defect
def test_weights(found, figure):
    scaled = [value for one in found for value in one["scaled"]]
    error = max(abs(x - value * weight) for x, value, weight in zip(scaled, VALUES, WEIGHTS, strict=True))
    figure("max_error", error)
    assert error == 0.0, f"largest error {error}"


if __name__ == "__main__":
    speak(int(sys.argv[1]))
