"""The regression guard: work is counted, not timed. Samples forwarded, modules called, bytes copied, bytes held."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from perfed.core import registry
from perfed.data import Federation, federate
from perfed.engine import calibrate, executors
from perfed.engine.flopcount import CountFlops
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.store import _bytes
from perfed.engine.worker import Reply, Task
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


@pytest.mark.parametrize("name", ["fedper", "local", "fedbabu"])
def test_what_a_run_holds_does_not_grow_with_its_clients(name: str, tmp_path: Path) -> None:
    """All clients take part and are scored, and there is room for the states of a few: never are more of them held."""
    federation = federate("digits", clients=60, split="iid", seed=0)
    model = sum(tensor.numel() * 4 for tensor in small_net(federation).module.state_dict().values())
    asked: list[list[int]] = []

    class Watched(executors.Serial):
        def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
            asked.append([sum(tensor.numel() * 4 for tensor in task.private.values()) for task in tasks])
            pending = made.store._pending.items()
            waiting.append(sum(_bytes(state) for (kind, _), (_, state) in pending if kind == "client"))
            replies = super().run(tasks, done)
            answered.append(sum(_bytes(reply.private) for reply in replies))
            return replies

    found: list[Outcome] = []
    for room in (8 * model, 256 << 20):
        waiting: list[int] = []
        answered: list[int] = []
        made = Simulation(
            federation, small_net(federation), registry.make(name, lr=0.05), Settings(rounds=3, new=True),
            directory=tmp_path / str(room), cache_bytes=room, executor=Watched,
        )  # fmt: skip
        asked.clear()
        outcome = made.run()
        assert outcome is not None
        found.append(outcome)
        assert max(map(sum, asked)) <= room
        assert max(waiting) <= room + model
        assert max(answered) <= room, "newcomers have nothing before their first round, and as much as others after it"
    assert found[0].state_sha256 == found[1].state_sha256
    assert found[0].metrics == found[1].metrics


def test_a_round_that_fails_leaves_nothing_of_what_was_written_already(tmp_path: Path) -> None:
    federation = federate("digits", clients=20, split="iid", seed=0)
    room = 20_000

    def start(executor: Any = None) -> Simulation:
        method = registry.make("local", lr=0.05)
        settings = Settings(rounds=3, new=False)
        return Simulation(
            federation, small_net(federation), method, settings, directory=tmp_path, cache_bytes=room, executor=executor
        )

    class Failing(executors.Serial):
        calls = 0

        def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
            Failing.calls += tasks[0].op == "train" and tasks[0].t == 2
            if Failing.calls == 4:
                raise RuntimeError("the lights went out")
            return super().run(tasks, done)

    made = start(Failing)
    with pytest.raises(RuntimeError, match="lights"):
        made.run()
    resumed = start()
    assert {resumed.store.client(i)[0] for i in range(20)} == {1}
    outcome = resumed.run()
    assert outcome is not None
    whole = Simulation(
        federation, small_net(federation), registry.make("local", lr=0.05), Settings(rounds=3, new=False)
    ).run()
    assert whole is not None
    assert outcome.state_sha256 == whole.state_sha256


@pytest.mark.parametrize("name", ["ditto", "apfl", "pfedme", "pfedsd"])
def test_a_second_network_is_made_once_and_not_for_every_client(
    name: str, digits: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    clone = Net.clone
    monkeypatch.setattr(Net, "clone", lambda self: (copies.append(1), clone(self))[1])
    settings = Settings(rounds=9, eval_every=99, new=False)
    made = Simulation(digits, small_net(digits), registry.make(name, lr=0.05), settings)
    for t in (1, 2):  # with the copies that FLOPs are counted on, once for newcomers and once for the others
        made.step(t)
    before = len(copies)
    for t in (3, 4):
        made.step(t)
    assert len(copies) == before
    made.close()


def test_small_work_is_done_here_and_the_largest_client_is_sent_first(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federate("digits", clients=8, split="dirichlet:0.3", seed=0)
    posted: list[int] = []
    post = executors.Pool._post

    def noted(self: executors.Pool, place: int, tasks: Sequence[Task], common: Any) -> None:
        posted.extend(federation.size(task.client) for task in tasks)
        post(self, place, tasks, common)

    monkeypatch.setattr(executors.Pool, "_post", noted)
    parameters = sum(tensor.numel() for tensor in small_net(federation).module.state_dict().values())
    total, found = int(federation.sizes("train").sum()), []
    for work, sent in ((total * parameters - 1, 8), (total * parameters, 0)):
        monkeypatch.setattr(executors, "TINY_WORK", work)
        made = Simulation(
            federation, small_net(federation), registry.make("fedavg", lr=0.05), Settings(rounds=9, eval_every=99),
            workers=2,
        )  # fmt: skip
        made.step(1)
        assert len(posted) == sent
        assert posted == sorted(posted, reverse=True)
        posted.clear()
        found.append(made.server.state)
        made.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


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


@pytest.mark.parametrize("numerics", ["plain", "cohort"])
def test_a_run_does_not_load_torchs_compiler(numerics: str) -> None:
    """Which would take longer than the first round of a small run, in every process."""
    code = f"""
        import sys
        from perfed import nets
        from perfed.core import registry
        from perfed.data import federate
        from perfed.engine.rounds import Simulation
        from perfed.engine.settings import Settings
        data = federate("digits", clients=4, split="iid", seed=0)
        net = nets.build("mlp", data.input_shape, data.num_classes, hidden=[8])
        Simulation(data, net, registry.make("fedrep"), Settings(rounds=2), numerics={numerics!r}).run()
        print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_flops_are_those_of_torchs_own_counter() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 7))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def work() -> None:
        net(torch.rand(5, 3, 8, 8)).sum().backward()
        x = torch.rand(2, 4, 8)
        attention(x, x, x)[0].sum().backward()
        torch.bmm(torch.rand(2, 3, 4), torch.rand(2, 4, 5))

    with FlopCounterMode(display=False) as theirs:
        work()
    with CountFlops() as ours:
        work()
    assert ours.total == theirs.get_total_flops() > 0
