"""The regression guard: work is counted, not timed. Samples forwarded, modules called, bytes copied, bytes held."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from perfed.core import registry
from perfed.data import Federation, federate
from perfed.engine import calibrate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.nets.net import Net
from tests.conftest import small_net


class Counted:
    """How often each module of a network is called, and for how many samples."""

    def __init__(self, net: Net) -> None:
        self.calls: Counter[str] = Counter()
        self.samples: Counter[str] = Counter()
        for name, module in net.module.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self._hook(name, module))

    def _hook(self, name: str, own: nn.Module) -> Any:
        def count(module: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
            if module is own:  # and not a copy, on which FLOPs are counted
                self.calls[name] += 1
                self.samples[name] += len(given[0])

        return count


def counted(name: str, federation: Federation, rounds: int = 1, **hyper: Any) -> tuple[Simulation, Counted]:
    method = registry.make(name, lr=0.05, **hyper)
    net = method.build(small_net(federation))
    settings = Settings(rounds=9, fraction=1.0, eval_every=99)
    simulation = Simulation(federation, net, method, settings)
    counts = Counted(simulation.worker.net)
    for t in range(1, rounds + 1):
        simulation.step(t)
    return simulation, counts


def test_fedavg_forwards_every_sample_once(digits: Federation) -> None:
    _, counts = counted("fedavg", digits, batch_size=10)
    sizes = digits.sizes("train")
    assert set(counts.samples.values()) == {int(sizes.sum())}
    assert set(counts.calls.values()) == {int(sum(-(-n // 10) for n in sizes))}


def test_fedrep_forwards_the_body_twice_whatever_the_head_epochs(digits: Federation) -> None:
    _, counts = counted("fedrep", digits, head_epochs=10)
    total = int(digits.sizes("train").sum())
    assert counts.samples["fc1"] == 2 * total, "once for the head's features, once for its own epoch"
    assert counts.samples["fc3"] <= 11 * total


def test_fedbsd_computes_the_teacher_once(digits: Federation) -> None:
    _, counts = counted("fedbsd", digits, head_epochs=10)
    assert counts.samples["fc1"] == 2 * int(digits.sizes("train").sum())


def test_scoring_one_model_calls_it_by_large_batches() -> None:
    federation = federate("digits", clients=40, split="iid", seed=0)
    simulation, counts = counted("fedavg", federation)
    before = counts.calls["fc1"]
    simulation.scoring.evaluate(1)
    assert counts.calls["fc1"] - before <= 8, "forty clients are scored in a few batches"


def test_what_a_run_holds_does_not_grow_with_its_clients() -> None:
    """Private heads of all clients, a cache that has room for a few: what is held stays within it."""
    federation = federate("digits", clients=100, split="iid", seed=0)
    method = registry.make("fedper", lr=0.05)
    limit = 5500 + 8 * 10 * 13 * 4  # the server's state and eight heads
    simulation = Simulation(
        federation, small_net(federation), method, Settings(rounds=9, eval_every=99), cache_bytes=limit
    )
    for t in (1, 2):
        simulation.step(t)
        assert simulation.store._cache.used <= limit
    assert simulation.store.client(3)[0] == 2
    simulation.close()


def test_the_advice_follows_what_fits(digits: Federation) -> None:
    many = federate("digits", clients=60, split="iid", seed=0)
    gain = calibrate.speedup(many, small_net(many), registry.make("fedavg", lr=0.1), 3, 1.0)
    assert gain is not None
    assert gain > 0
    assert calibrate.speedup(many, small_net(many), registry.make("ditto"), 3, 1.0) is None
    assert calibrate.speedup(many, small_net(many), registry.make("fedavg"), 3, 0.02) is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_makes_one_call_for_all_parameters(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from perfed.core.sgd import Sgd

    calls: list[int] = []
    fused = torch._fused_sgd_

    def counting(parameters: list[torch.Tensor], *given: Any, **more: Any) -> None:
        calls.append(len(parameters))
        fused(parameters, *given, **more)

    monkeypatch.setattr(torch, "_fused_sgd_", counting)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    sgd = Sgd(list(net.parameters()), lr=0.1, momentum=momentum)
    net(torch.zeros(2, 3)).sum().backward()
    sgd.step()
    assert calls == [4]
