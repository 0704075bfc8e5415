"""Costs beside FedAvg: the figures that come with the package are what the methods do."""

import pytest

from perfed import nets
from perfed.core import registry
from perfed.engine.relative import ROUNDS, Counting, _federation, known, relative, spent
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings


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


def test_local_rounds_of_the_five_systems_stay_within_their_bounds() -> None:
    """By operations counted: what a clock would show without noise."""
    epoch = spent("fedavg", "cnn", rounds=(2,)).flops
    teacher = spent("pfedsd", "cnn", rounds=(2,)).flops - epoch  # PFedSD is FedAvg's epoch and a forward pass
    assert spent("cd2pfed", "cnn", rounds=(2,), linear_increment=False).flops <= 2.0 * epoch  # p = 0.5
    assert spent("fedbsd", "cnn", rounds=(2,)).flops <= 1.5 * epoch + teacher  # ten epochs on the head, one on the body
    assert spent("anti", "cnn", rounds=(2,)).flops <= 0.5 * epoch  # the first stage, the frozen layers' output kept
    assert first_round("anti", "cnn") <= 0.5 * first_round("fedavg", "cnn")  # and with nothing kept yet
    assert first_round("anti", "cnn") > spent("anti", "cnn", rounds=(2,)).flops
    assert spent("vanilla", "cnn", rounds=(2,)).flops > 0.5 * epoch  # it still runs the whole backward pass


def first_round(name: str, net: str) -> int:
    """FLOPs of the very first round, in which every client is new and nothing is kept."""
    method, federation = registry.make(name, batch_size=10), _federation()
    built = method.build(nets.build(net, federation.input_shape, federation.num_classes))
    simulation = Simulation(federation, built, method, Settings(rounds=ROUNDS, eval_every=ROUNDS), executor=Counting)
    simulation.step(1)
    simulation.close()
    assert isinstance(simulation.executor, Counting)
    return simulation.executor.flops


def test_a_method_of_another_package_has_no_figures() -> None:
    assert known("someone-elses") is None
