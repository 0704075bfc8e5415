"""Privacy-pFedC: the result of pFedC, from a server that reads neither branches nor label presence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from perfed import nets
from perfed.core.client import Update
from perfed.core.plan import Round
from perfed.core.registry import make
from perfed.core.state import State, to_bytes
from perfed.data import Federation
from perfed.engine.executors import Serial
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import StoreError, UpdateError
from perfed.methods.pfedc import PRESENCE
from perfed.methods.privacypfedc import BODY, BRANCH, PrivacyPFedC
from perfed.nets.branches import head_names
from perfed.privacy import ckks
from tests.conftest import small_net


class Watched(Simulation):
    """A run that remembers what clients sent."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.sent: list[Reply] = []
        super().__init__(*given, **named, tamper=self._keep)

    def _keep(self, reply: Reply, t: int) -> Reply:
        self.sent.append(reply)
        return reply


def run(method: Any, federation: Federation, rounds: int = 5, fraction: float = 0.34, **named: Any) -> Watched:
    net = method.build(small_net(federation, named.pop("net", "mlp")))
    return Watched(federation, net, method, Settings(rounds=rounds, fraction=fraction, new=False), **named)


def finished(simulation: Simulation) -> Outcome:
    outcome = simulation.run()
    assert outcome is not None
    assert not outcome.faults
    return outcome


@pytest.mark.parametrize(
    "hyper", [{}, {"branches": 4, "group_logits": True}, {"encrypt_body": True}], ids=["plain", "groups", "body"]
)
def test_the_result_of_pfedc(hyper: dict[str, Any], digits: Federation) -> None:
    """A third of the clients at a time, so that classes without a participant are carried over."""
    open_hyper = {key: value for key, value in hyper.items() if key != "encrypt_body"}
    plain, sealed = run(make("pfedc", lr=0.05, **open_hyper), digits), run(PrivacyPFedC(lr=0.05, **hyper), digits)
    theirs, ours = finished(plain), finished(sealed)
    presence = torch.stack([reply.state[PRESENCE] for reply in plain.sent]).view(5, 2, -1).amax(dim=1)
    assert bool((presence[1:] == 0).any()), "no round without a holder: the carrying over is not tried"
    for client in range(digits.num_clients):
        a, b = plain.scored(client).weights(), sealed.scored(client).weights()
        for name, tensor in a.items():
            torch.testing.assert_close(b[name], tensor, atol=1e-3, rtol=0)
    assert ours.clients["confusion"] == theirs.clients["confusion"], "equal predictions"
    assert ours.metrics["local.task.mean"] == theirs.metrics["local.task.mean"]


def test_same_bits_although_ciphertexts_are_random(digits: Federation) -> None:
    first, second = (run(PrivacyPFedC(lr=0.05, encrypt_body=True), digits) for _ in range(2))
    a, b = finished(first), finished(second)
    assert a.state_sha256 == b.state_sha256
    assert a.metrics == b.metrics
    assert a.cost["bytes_up"] == b.cost["bytes_up"]
    assert not torch.equal(first.server.state[BRANCH], second.server.state[BRANCH])


@pytest.mark.parametrize("encrypt_body", [False, True])
def test_the_server_sees_no_plaintext(encrypt_body: bool, digits: Federation, tmp_path: Path) -> None:
    """Its state, its memory of clients and all updates: no branch, no presence, no key; nothing but the body."""
    path = tmp_path / "keys"
    method = PrivacyPFedC(lr=0.05, keys=str(path), encrypt_body=encrypt_body)
    simulation = run(method, digits, rounds=3, fraction=1.0)
    for t in (1, 2, 3):
        simulation.step(t)
    assert simulation.server.slots.known() == []
    simulation.close()
    head = set(head_names(simulation.worker.net))
    body = set() if encrypt_body else set(simulation.plan.parts) - head
    sealed = {BRANCH, BODY} if encrypt_body else {BRANCH}
    for reply in simulation.sent:
        assert set(reply.state) == body | sealed
    assert set(simulation.server.state) == set(simulation.plan.parts) | sealed
    for name in head:
        assert torch.equal(simulation.server.state[name], simulation.plan.initial[name]), "the common first value"
    seen = to_bytes(simulation.server.state) + b"".join(to_bytes(reply.state) for reply in simulation.sent)
    secret = path.read_bytes()
    assert secret[5000:5032] not in seen
    for reply in simulation.sent:
        for name in head:
            for row in reply.private[name].view(10, -1):
                for values in (row, row.double(), ckks.on_grid(row)):
                    if values.numel() > 1:
                        assert values.numpy().tobytes() not in seen
        held = digits.client(reply.client).class_counts > 0
        for values in (held, held.float(), held.double(), held.long()):
            assert values.numpy().tobytes() not in seen
    assert len({tuple((n, v.shape) for n, v in reply.state.items()) for reply in simulation.sent}) == 1
    if encrypt_body:
        assert {reply.scalars["weight"] for reply in simulation.sent} == {1.0}, "data sizes are sealed too"


def test_the_server_never_asks_for_a_key(digits: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that clients do happens with the key at hand, all that the server does without."""
    real = ckks.keyring

    class AtClients(Serial):
        def run(self, tasks: Sequence[Task], done: Any = None) -> list[Reply]:
            with pytest.MonkeyPatch.context() as here:
                here.setattr(ckks, "keyring", real)
                return super().run(tasks, done)

    def refuse(path: str) -> ckks.Keyring:
        raise AssertionError("the server asked for the clients' key")

    method = PrivacyPFedC(lr=0.05)
    net = method.build(small_net(digits))
    simulation = Simulation(
        digits, net, method, Settings(rounds=2, fraction=0.5, new=False), executor=lambda worker: AtClients(worker)
    )
    monkeypatch.setattr(simulation.flops, "of", lambda task: 0)  # counts on a rehearsal of a client's work
    monkeypatch.setattr(ckks, "keyring", refuse)
    finished(simulation)


def test_a_lost_key_is_told_and_not_guessed(digits: Federation, tmp_path: Path) -> None:
    first = run(PrivacyPFedC(lr=0.05, keys=str(tmp_path / "one")), digits)
    first.step(1)
    task = first._task("train", 0, 2)
    first.close()
    other = PrivacyPFedC(lr=0.05, keys=str(tmp_path / "two"))
    worker = Worker(digits, other.build(small_net(digits)), other, rounds=5, seed=0)
    reply = worker.run(task)
    assert "cannot be opened" in str(reply.error)
    assert "two" in str(reply.error)
    with pytest.raises(StoreError):
        other.personal(worker.client(task))


def test_bytes_that_are_no_ciphertext_cost_only_their_sender(digits: Federation) -> None:
    method = PrivacyPFedC(lr=0.05)
    simulation = run(method, digits, rounds=1)
    simulation.step(1)
    good = simulation.sent[0].state
    bad: State = good | {BRANCH: torch.full_like(good[BRANCH], 7)}
    with pytest.raises(UpdateError, match="Client 4"):
        method.verify(simulation.server, bad, "Client 4", Round(1, 1))
    method.verify(simulation.server, good, "Client 4", Round(1, 1))
    simulation.close()


def test_the_ledger_counts_ciphertexts_and_their_seconds(digits: Federation) -> None:
    outcome = finished(run(PrivacyPFedC(lr=0.05), digits, rounds=2, fraction=1.0))
    plain = finished(run(make("pfedc", lr=0.05), digits, rounds=2, fraction=1.0))
    extra = outcome.cost["extra"]
    assert extra["ciphertext_bytes"] == 2 * digits.num_clients * ckks.FRAME
    assert extra["encrypt_seconds"] > 0
    assert extra["decrypt_seconds"] > 0
    assert outcome.cost["bytes_up"] > extra["ciphertext_bytes"]
    assert outcome.cost["bytes_up"] > plain.cost["bytes_up"]


def test_sealing_the_branches_of_lenet_takes_less_than_a_second(digits: Federation) -> None:
    method = PrivacyPFedC()
    net = method.build(nets.build("lenet5", (1, 28, 28), 10))
    worker = Worker(digits, method.build(small_net(digits)), method, rounds=1, seed=0)
    client = worker.newcomer(0, 1)
    client.net = net
    means = {name: net.module.state_dict()[name] for name in head_names(net)}
    ckks.keyring(method.keys)
    started = time.process_time()
    sealed = method.seal(client, means)
    assert time.process_time() - started < 1
    assert sealed[BRANCH].shape == (1, ckks.FRAME), "one ciphertext holds them all"


def test_a_sum_of_updates_is_all_the_server_makes(digits: Federation) -> None:
    method = PrivacyPFedC(lr=0.05)
    simulation = run(method, digits, rounds=1, fraction=1.0)
    simulation.step(1)
    keys = ckks.keyring("")
    updates = [Update(r.client, r.state, r.scalars["weight"]) for r in simulation.sent]
    count = 2 * (12 * 10 + 10) + 10 + 1
    parts = [keys.open(u.state[BRANCH], count) for u in updates]
    total = keys.open(simulation.server.state[BRANCH], count)
    assert torch.equal(total, torch.stack(parts).sum(dim=0))
    held = torch.stack([digits.client(u.client).class_counts > 0 for u in updates]).double()
    assert torch.equal(total[130:140], held.sum(dim=0)), "the count of every class"
    assert total[-1] == len(updates)
    simulation.close()
