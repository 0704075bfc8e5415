"""The output of frozen layers is kept over rounds while they stay as they are, within bounds, to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perfed.core import prefix, registry
from perfed.core.prefix import Prefixes
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from tests.conftest import small_net


def run(name: str, federation: Federation, rounds: int = 6, **hyper: Any) -> Simulation:
    method = registry.make(name, lr=0.05, **hyper)
    settings = Settings(rounds=rounds, fraction=0.5, eval_every=99, new=False)
    simulation = Simulation(federation, method.build(small_net(federation)), method, settings)
    simulation.run()
    return simulation


def test_scheduling_computes_what_stays_frozen_once_per_client(
    digits: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    hyper = {"unfreeze": (0, 3), "finetune_epochs": 0}
    fast = run("anti", digits, **hyper)
    clients = {client for t in (1, 2, 3) for client in list_cohort(fast, t)}
    assert fast.worker.prefixes.hits == 9 - len(clients), "three rounds of three, each client computed once"
    monkeypatch.setattr(prefix, "key", lambda *_: None)
    plain = run("anti", digits, **hyper)
    assert plain.worker.prefixes.hits == 0
    assert all(torch.equal(fast.server.state[key], plain.server.state[key]) for key in plain.server.state)


def list_cohort(simulation: Simulation, t: int) -> list[int]:
    from perfed.core.rng import sample

    return sample(0, t, simulation.federation.participants, 0.5)


@pytest.mark.parametrize("name", ["fedrep", "fedavg", "fedbabu", "local"])
def test_nothing_is_kept_of_layers_that_learn(name: str, digits: Federation) -> None:
    held = run(name, digits, **({"finetune_epochs": 0} if name == "fedbabu" else {})).worker.prefixes
    assert (held.hits, held.used) == (0, 0)


def test_the_bound_holds_and_the_oldest_goes_first() -> None:
    held = Prefixes(limit=4 * 100)
    for number in range(5):
        held.put((1, str(number)), torch.zeros(30))
        assert held.used <= 400
    assert held.get((1, "0")) is None
    assert held.get((1, "4")) is not None
    held.put((1, "large"), torch.zeros(101))
    assert held.get((1, "large")) is None
    assert held.used == 360
