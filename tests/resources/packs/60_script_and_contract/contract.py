"""What toykernel promises of `scale` and `total`."""

import pytest

EVIDENCE_WITHOUT_GPU = "traced"


@pytest.fixture(scope="module")
def kernel():
    from toykernel import scale

    return scale


@pytest.mark.control
def test_weights_of_one_change_nothing(kernel):
    assert kernel.scale([1.0, 2.0], [1.0, 1.0]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("weights", "scaled"),
    [
        pytest.param([2.0, 2.0], [2.0, 4.0], marks=pytest.mark.control, id="alike"),
        pytest.param([1.0, 0.5], [1.0, 1.0], marks=pytest.mark.defect, id="unlike"),
    ],
)
def test_each_value_has_its_weight(kernel, figure, weights, scaled):
    found = kernel.scale([1.0, 2.0], weights)
    figure(f"second_{weights[1]}", found[1])
    assert found == scaled, f"{found}, right is {scaled}"


@pytest.mark.control
def test_total_is_the_sum(kernel):
    assert kernel.total([1.0, 2.0, 3.0]) == 6.0
