"""toykernel scales each value by its own weight, and adds values up.

The sums and products are exact, so the tolerance is 0.
"""

import ctypes

import pytest

EVIDENCE_WITHOUT_GPU = "traced"
VALUES, WEIGHTS = [1.0, 2.0, 3.0], [1.0, 0.5, 0.0]


class Shown:
    """Stands for a tensor: the bytes are the text of a value."""

    dtype, shape = "float", ()

    def __init__(self, value):
        self.text = ctypes.create_string_buffer(repr(value).encode())
        self.nbytes = len(self.text)

    def detach(self):
        return self

    cpu = contiguous = detach

    def data_ptr(self):
        return ctypes.addressof(self.text)


@pytest.fixture(scope="module")
def scale():
    from toykernel import scale

    return scale


@pytest.mark.control
def test_ones(scale):
    assert scale.scale(VALUES, [1.0] * 3) == VALUES


@pytest.mark.control
def test_total(scale, output):
    total = scale.total(VALUES)
    output("total", Shown(total))
    assert total == 6.0


@pytest.mark.defect
def test_weights(scale, figure):
    scaled = scale.scale(VALUES, WEIGHTS)
    error = max(abs(found - value * weight) for found, value, weight in zip(scaled, VALUES, WEIGHTS, strict=True))
    figure("max_error", error)
    assert error == 0.0, f"largest error {error}"
