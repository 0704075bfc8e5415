"""What every method promises, tried on every registered method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from perfed.core import registry
from perfed.core.state import State, digest, from_bytes, take, to_bytes
from perfed.data import Federation
from perfed.engine.executors import Serial
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.store import Store
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import NetError
from tests.conftest import small_net
from tests.contract.rows import ROWS
from tests.runs import personal

every_method = pytest.mark.parametrize("name", list(ROWS))


class Recorder(Serial):
    """Computes tasks last first and remembers what it saw: no rule may depend on the order of clients."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.seen: list[tuple[Task, Reply]] = []

    def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
        replies = super().run(tasks[::-1], done)[::-1]
        self.seen += zip(tasks, replies, strict=True)
        return replies


def start(
    name: str,
    federation: Federation,
    *,
    net: str | None = None,
    precision: torch.dtype | None = None,
    compiled: bool = False,
    **simulation: Any,
) -> Simulation:
    row = ROWS[name]
    method = registry.make(name, **{"lr": 0.05, **row.hyper})
    built = method.build(small_net(federation, net or row.net))
    built.precision, built.compiled = precision, compiled
    return Simulation(federation, built, method, Settings(rounds=4, fraction=0.5), **simulation)


def record(name: str, federation: Federation) -> tuple[Simulation, list[tuple[Task, Reply]], str]:
    held: list[Recorder] = []

    def executor(worker: Worker) -> Recorder:
        held.append(Recorder(worker))
        return held[0]

    simulation = start(name, federation, executor=executor)
    outcome = simulation.run()
    assert outcome is not None
    return simulation, held[0].seen, outcome.state_sha256


def test_every_registered_method_has_a_row() -> None:
    assert {name.removesuffix("+ft") for name in ROWS} == set(registry.methods())


@every_method
def test_same_bits_for_any_executor_and_after_a_stop(name: str, digits: Federation, tmp_path: Path) -> None:
    whole = start(name, digits).run()
    assert whole is not None
    for workers in (2, 3):
        pooled = start(name, digits, workers=workers).run()
        assert pooled is not None
        assert pooled.state_sha256 == whole.state_sha256
        assert pooled.metrics == whole.metrics
    for k in (1, 3):
        assert start(name, digits, directory=tmp_path / str(k)).run(stop_after=k) is None
        resumed = start(name, digits, directory=tmp_path / str(k), workers=2).run()
        assert resumed is not None
        assert resumed.state_sha256 == whole.state_sha256
        assert resumed.metrics == whole.metrics
        assert resumed.cost["bytes_up"] == whole.cost["bytes_up"]
        assert resumed.history == whole.history
    assert record(name, digits)[2] == whole.state_sha256, "the order of clients matters"


@every_method
def test_fewer_bits_give_nearly_the_same(name: str, digits: Federation) -> None:
    full = start(name, digits)
    half, pooled = (start(name, digits, precision=torch.bfloat16, workers=workers) for workers in (1, 2))
    for t in (1, 2):
        for simulation in (full, half, pooled):
            simulation.step(t)
    sums = [simulation.store.state_sha256() for simulation in (full, half, pooled)]
    assert sums[1] == sums[2]
    assert sums[0] != sums[1], "it was not computed in fewer bits"
    first = _flat(full.plan.initial)
    for client in full.federation.participants:
        ours, theirs = (_flat(personal(simulation, client)) for simulation in (full, half))
        off, moved = float((theirs - ours).norm()), float((ours - first).norm())
        assert off <= ROWS[name].rough * moved + 1e-6, (client, off / moved)


@every_method
def test_compiled_kernels_give_the_same_to_1e_5(name: str, digits: Federation) -> None:
    net = {"mlp": "few-channels"}.get(ROWS[name].net, ROWS[name].net)
    if not ROWS[name].fused:
        with pytest.raises(NetError, match="kernels"):
            start(name, digits, net=net, compiled=True)
        return
    torchs = start(name, digits, net=net)
    ours, pooled = (start(name, digits, net=net, compiled=True, workers=workers) for workers in (1, 2))
    for t in (1, 2):
        for simulation in (torchs, ours, pooled):
            simulation.step(t)
    sums = [simulation.store.state_sha256() for simulation in (torchs, ours, pooled)]
    assert sums[0] != sums[1]
    assert sums[1] == sums[2]
    for client in ours.federation.participants:
        torch.testing.assert_close(*(_flat(personal(each, client)) for each in (ours, torchs)), rtol=0, atol=1e-5)
    assert [each.ledger.flops for each in (ours, pooled)] == [torchs.ledger.flops] * 2


def _flat(state: State) -> torch.Tensor:
    assert not any(tensor.dtype == torch.bfloat16 for tensor in state.values())
    return torch.cat([state[name].flatten().float() for name in sorted(state)])


@every_method
def test_learning_changes_the_outcome(name: str, digits: Federation) -> None:
    other = dataclasses.replace(start(name, digits).method, lr=0.01)
    net = other.build(small_net(digits, ROWS[name].net))
    slower = Simulation(digits, net, other, Settings(rounds=4, fraction=0.5)).run()
    faster = start(name, digits).run()
    assert slower is not None
    assert faster is not None
    assert slower.state_sha256 != faster.state_sha256


@every_method
def test_private_tensors_never_appear_in_an_update(name: str, digits: Federation) -> None:
    row = ROWS[name]
    simulation, seen, _ = record(name, digits)
    trained = [(task, reply) for task, reply in seen if task.op == "train"]
    assert any(reply.private for _, reply in trained) == row.private
    assert any(reply.state for _, reply in trained) == row.travels
    for task, reply in trained:
        private, travels = simulation.plan.private(task.t), simulation.plan.travels(task.t)
        for part, tensor in simulation.plan.initial.items():
            sent = take(tensor, travels[part])
            assert (None if sent is None else sent.shape) == (reply.state[part].shape if part in reply.state else None)
            both = _as_mask(private[part], tensor) & _as_mask(travels[part], tensor)
            assert not bool(both.any()), f"{part} is private and travels"
        kept = [value for value in reply.private.values() if value.numel() > 8]
        for value in kept if row.secret else ():
            assert not any(_same(value, sent) for sent in reply.state.values())


@every_method
def test_private_tensors_never_appear_on_the_server(name: str, digits: Federation) -> None:
    simulation, seen, _ = record(name, digits)
    kept = [v for task, reply in seen if task.op == "train" for v in reply.private.values() if v.numel() > 8]
    start_values = list(simulation.plan.initial.values())
    for value in kept:
        if not any(_same(value, first) for first in start_values):
            assert not any(_same(value, held) for held in simulation.server.state.values())


@every_method
def test_an_unsampled_client_is_left_untouched(name: str, digits: Federation, tmp_path: Path) -> None:
    simulation = start(name, digits, directory=tmp_path)
    before: dict[int, tuple[int, str]] = {}
    for t in range(1, 5):
        simulation.step(t)
        rows = list(simulation.store.records())[-1]
        now = {i: (held[0], digest(held[1])) for i in range(6) if (held := simulation.store.client(i))}
        for client in set(range(6)) - set(rows["cohort"]):
            assert now[client] == before.get(client, (0, digest({})))
        for client in rows["cohort"]:
            assert now[client][0] == t
        before = now
    simulation.close()


@every_method
def test_what_predicts_is_the_personal_state(name: str, digits: Federation) -> None:
    row = ROWS[name]
    _, seen, _ = record(name, digits)
    simulation = start(name, digits)
    final = [(task, reply) for task, reply in seen if task.op == "evaluate" and task.t == 4 and task.since]
    assert final
    for task, reply in final:
        again = simulation.worker.run(task)
        assert _equal(again.state, reply.state), "scoring the same client twice differs"
        if row.private and row.predicts:
            noise = torch.Generator().manual_seed(1)
            changed = {k: _shake(v, noise) for k, v in task.private.items()}
            other = simulation.worker.run(dataclasses.replace(task, private=changed))
            assert not _equal(other.state, reply.state), "the private state does not reach the prediction"
        elif row.travels:
            noise = torch.Generator().manual_seed(1)
            changed = {k: _shake(v, noise) for k, v in task.received.items()}
            other = simulation.worker.run(dataclasses.replace(task, received=changed))
            assert not _equal(other.state, reply.state), "the received state does not reach the prediction"
    simulation.close()


@every_method
def test_saved_states_come_back_to_the_bit(name: str, digits: Federation, tmp_path: Path) -> None:
    simulation = start(name, digits, directory=tmp_path)
    simulation.step(1)
    cohort = next(iter(simulation.store.records()))["cohort"]
    held = {client: simulation.store.client(client) for client in cohort}
    server = simulation.server.state
    simulation.close()
    with Store(tmp_path, simulation._fingerprint()) as store:
        assert _equal(store.server(), server)
        for client, (since, state) in held.items():
            again = store.client(client)
            assert again[0] == since == 1
            assert _equal(again[1], state)
            assert _equal(from_bytes(to_bytes(state))[0], state)


@every_method
def test_a_bad_update_costs_only_its_sender(name: str, digits: Federation) -> None:
    row = ROWS[name]

    def spoil(reply: Reply, t: int) -> Reply:
        if t == 2 and row.travels and reply.client == cohort[0]:
            return dataclasses.replace(reply, state={k: v * float("nan") for k, v in reply.state.items()})
        if t == 2 and not row.travels and reply.client == cohort[0]:
            return dataclasses.replace(reply, private={k: v * float("nan") for k, v in reply.private.items()})
        return reply

    plain = start(name, digits)
    plain.step(1)
    plain.step(2)
    cohort = list(plain.store.records())[1]["cohort"]
    plain.close()
    simulation = start(name, digits, tamper=spoil)
    outcome = simulation.run()
    assert outcome is not None
    assert [(f["t"], f["client"]) for f in outcome.faults] == [(2, cohort[0])]
    assert f"Client {cohort[0]}" in outcome.faults[0]["reason"]
    assert all(torch.isfinite(v).all() for v in simulation.server.state.values() if v.is_floating_point())


def _as_mask(which: bool | torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return torch.full(tensor.shape, which, dtype=torch.bool) if isinstance(which, bool) else which


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def _equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)


def _shake(value: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    return value + torch.randn(value.shape, generator=noise) if value.is_floating_point() else value
