"""The dry ledger counts what a real run's ledger counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from perfed.core.client import Client, Update
from perfed.core.method import Method
from perfed.core.registry import make
from perfed.data import Federation
from perfed.engine.cost import Cost, estimate
from perfed.engine.settings import Outcome
from perfed.errors import ConfigError
from tests.conftest import small_net


@pytest.mark.parametrize(
    ("name", "net", "hyper"),
    [
        ("fedavg", "mlp", {"epochs": 2, "batch_size": 7}),
        ("local", "mlp", {}),
        ("fedper", "mlp", {}),
        ("pfedsd", "mlp", {}),
        ("fedrep", "mlp", {"head_epochs": 3}),
        ("vanilla", "mlp", {"unfreeze": (0, 2)}),
        ("anti", "mlp", {"unfreeze": (0, 1)}),
        ("anti", "digitsnet", {"unfreeze": (0, 1, 2), "batch_size": 11}),
        ("pfedc", "mlp", {"branches": 4}),
        ("privacypfedc", "mlp", {"encrypt_body": True}),
    ],
)
def test_equals_the_ledger_of_a_real_run(
    name: str, net: str, hyper: dict[str, Any], digits: Federation, simulate: Callable[..., Outcome]
) -> None:
    found = simulate(name, net=net, settings={"rounds": 3, "fraction": 1.0, "new": False}, **hyper)
    method = make(name, lr=0.05, **hyper)
    counted = estimate(method.build(small_net(digits, net)), method, 3, digits.sizes().tolist())
    for key in ("samples", "param_batches", "bytes_up", "bytes_down", "flops", "layers"):
        assert found.cost[key] == getattr(counted, key), key
    assert counted.batches > 0


def test_a_teacher_is_counted_from_the_second_round_on(simulate: Callable[..., Outcome]) -> None:
    def flops(name: str, rounds: int) -> float:
        return simulate(name, settings={"rounds": rounds, "fraction": 1.0, "new": False}).cost["flops"]

    first = flops("fedavg", 1)
    assert flops("pfedsd", 1) == first
    assert 1.3 * first < flops("pfedsd", 2) - first < 1.5 * first  # one more forward pass


def test_batches_of_a_hand_computed_case(digits: Federation) -> None:
    net = small_net(digits)
    trained = sum(p.numel() for p in net.module.parameters())
    cost = estimate(net, make("fedavg", batch_size=10, epochs=2), 3, [10, 11, 25])
    assert (cost.samples, cost.batches) == (3 * 2 * 46, 3 * 2 * (1 + 2 + 3))
    assert cost.param_batches == cost.batches * trained
    assert isinstance(cost, Cost)


@dataclass(frozen=True, kw_only=True)
class OwnLoop(Method):
    """A method that trains twice what its phases say."""

    title = "Own loop"

    def train(self, client: Client) -> Update:
        self.fit(client, [*self.phases(client), *self.phases(client)])
        return client.update()


def test_a_method_whose_phases_do_not_tell_is_refused(digits: Federation) -> None:
    with pytest.raises(ConfigError, match="Own loop"):
        estimate(small_net(digits), OwnLoop(), 1, [20])
