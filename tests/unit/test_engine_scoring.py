"""Scoring in large batches and only where something changed: the same numbers as one client at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from perfed.core import registry
from perfed.data import Federation, federate
from perfed.engine import evaluate, stacking
from perfed.engine.executors import Serial
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.worker import Reply, Task
from tests.conftest import small_net


class Counting(Serial):
    """Remembers what it was asked to score."""

    tasks: list[Task]

    def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
        self.tasks = [*getattr(self, "tasks", []), *(task for task in tasks if task.op == "evaluate")]
        return super().run(tasks, done)


def scored(name: str, federation: Federation, rounds: int = 3, **hyper: Any) -> Simulation:
    method = registry.make(name, **{"lr": 0.05, **hyper})
    net = method.build(small_net(federation))
    settings = Settings(rounds=rounds, fraction=0.5, eval_every=1, new=False)
    simulation = Simulation(federation, net, method, settings, executor=Counting)
    for t in range(1, rounds + 1):
        simulation.step(t)
    return simulation


def asked(simulation: Simulation) -> list[Task]:
    executor = simulation.executor
    assert isinstance(executor, Counting)
    return executor.tasks


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedbabu", "vanilla"])
def test_clients_with_one_model_are_scored_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federate("digits", clients=40, split="dirichlet:0.5", seed=0)
    hyper = {"finetune_epochs": 0} if name in ("fedbabu", "vanilla") else {}
    more = {"unfreeze": (0, 1)} if name == "vanilla" else {}
    fast = scored(name, federation, **hyper, **more)
    monkeypatch.setattr("perfed.engine.scoring.stackable", lambda _: False)
    plain = scored(name, federation, **hyper, **more)
    assert len(asked(plain)) == 3 * 40
    assert len(asked(fast)) == 3 * 2, "about 590 samples to score make two tasks of at most 512"
    for a, b in zip(fast.history, plain.history, strict=True):
        assert a["clients"] == b["clients"]
        for key, value in a.items():
            if isinstance(value, float):
                assert value == pytest.approx(b[key], abs=1e-6)


@pytest.mark.parametrize("name", ["fedper", "ditto", "apfl"])
def test_clients_with_models_of_their_own_are_not(name: str, digits: Federation) -> None:
    assert not any("stack" in task.options for task in asked(scored(name, digits)) if task.since)


def test_reset_statistics_are_each_clients_own(digits: Federation) -> None:
    assert not stacking.stackable(registry.make("fedavg", buffers="reset"))
    assert stacking.stackable(registry.make("fedavg"))


def test_a_client_that_did_not_change_is_not_scored_again(digits: Federation) -> None:
    simulation = scored("local", digits, rounds=4)
    counts = [sum(task.t == t for task in asked(simulation)) for t in range(1, 5)]
    assert counts == [6, 3, 3, 3], "all at first, then the three that took part"
    assert simulation.scoring.memory.reused == 9
    task = simulation.scoring.task("evaluate", 0, 4, seen=True, adapt=False)
    again = simulation.worker.run(task).state["before/test/confusion"]
    right = float(again.diagonal().sum() / again.sum())
    assert simulation.history[-1]["clients"]["accuracy"][0] == pytest.approx(right)


def test_a_client_that_receives_something_new_is_scored_again(digits: Federation) -> None:
    simulation = scored("fedper", digits, rounds=3)
    assert simulation.scoring.memory.reused == 0
    assert len(asked(simulation)) == 18


def test_stacked_samples_are_the_clients_own(digits: Federation) -> None:
    split, owner = digits.stacked([4, 1], "test")
    for place, client in enumerate((4, 1)):
        assert torch.equal(split.x[owner == place], digits.client(client).test.x)
        assert torch.equal(split.y[owner == place], digits.client(client).test.y)


def test_a_client_without_test_samples_has_no_measure_and_ends_nothing() -> None:
    whole = {"before/test/loss": torch.tensor(1.0), "before/val/confusion": torch.zeros(2, 2, dtype=torch.int64)}
    some = whole | {"before/test/confusion": torch.eye(2).long(), "before/test/measure/task": torch.tensor(1.0)}
    none = whole | {"before/test/confusion": torch.zeros(2, 2).long(), "before/test/measure/task": torch.tensor(0.0)}
    assert evaluate.scores([some, none], "before")["task.mean"] == 0.5
    assert evaluate.scores([none, some], "before")["task.mean"] == 0.5
