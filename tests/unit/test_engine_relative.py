"""Costs beside FedAvg: the figures that come with the package are what the methods do."""

import pytest

from perfed.core import registry
from perfed.engine.relative import known, relative


@pytest.mark.parametrize("name", registry.methods())
def test_what_comes_with_the_package_is_what_is_measured(name: str) -> None:
    told, found = known(name), relative(name)
    assert told is not None, f"python -m perfed.engine.relative has not been run since {name} came"
    assert (told.net, told.flops, told.up, told.down) == (
        found.net,
        pytest.approx(found.flops, abs=1e-4),
        pytest.approx(found.up, abs=2e-2),  # ciphertexts differ in size by a few bytes
        pytest.approx(found.down, abs=2e-2),
    )


def test_by_hand() -> None:
    """Two networks trained, three sent, none sent, one teacher's forward pass beside the student's three."""
    assert relative("ditto").flops == pytest.approx(2)
    assert relative("fedem").up == pytest.approx(3, abs=0.01)
    assert relative("local").up == relative("local").down == 0
    forward_of_step = 1 / relative("pfedsd").flops
    assert 2 / 3 < forward_of_step < 0.8  # the first layer needs no gradient of its input: a step is under 3 forwards


def test_a_method_of_another_package_has_no_figures() -> None:
    assert known("someone-elses") is None
