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
from perfed.engine import evaluate
from perfed.engine.evaluate import without_labels
from perfed.engine.executors import Serial
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.store import fingerprint
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


def told(simulation: Simulation) -> list[Reply]:
    """What sites say when they are scored: before and after adaptation, on test and validation data."""
    found = []
    for client in range(simulation.federation.num_clients):
        reply = simulation.worker.run(simulation._task("evaluate", client, 3, seen=True, adapt=True))
        assert reply.error is None
        state = without_labels(reply.state) if simulation.method.labels_stay else reply.state
        found.append(Reply(client, state, {}, {}))
    return found


def seen_by_server(simulation: Watched) -> tuple[bool, bool]:
    """Whether any client's branch, and whether any client's label presence, is in what the server has or is sent."""
    scores = told(simulation)
    seen = to_bytes(simulation.server.state) + b"".join(to_bytes(reply.state) for reply in [*simulation.sent, *scores])
    branch = presence = False
    for reply in simulation.sent:
        held = simulation.federation.client(reply.client).class_counts > 0
        for name in head_names(simulation.worker.net):
            rows = reply.private[name]
            whole = [rows, rows * held.view(-1, *[1] * (rows.dim() - 1))]  # of a bias, all its values together
            for values in (*rows[held].view(int(held.sum()), -1), *whole):
                if values.numel() > 1:
                    forms = (values, values.double(), ckks.on_grid(values))
                    branch |= any(form.numpy().tobytes() in seen for form in forms)
        forms = (held, held.float(), held.double(), held.long())
        presence |= any(form.numpy().tobytes() in seen for form in forms)
    for reply in scores:
        data = simulation.federation.client(reply.client)
        for name, matrix in reply.state.items():
            if name.endswith("confusion"):
                y = (data.test if "/test/" in name else data.val).y
                presence |= len(y) > 0 and torch.equal(matrix.sum(dim=1), torch.bincount(y, minlength=len(matrix)))
    return branch, presence


@pytest.mark.parametrize("encrypt_body", [False, True])
def test_the_server_sees_no_plaintext(encrypt_body: bool, digits: Federation, tmp_path: Path) -> None:
    """Its state, its memory of clients, updates and scores: no branch, no presence, no key; nothing but the body."""
    path = tmp_path / "keys"
    method = PrivacyPFedC(lr=0.05, keys=str(path), encrypt_body=encrypt_body)
    simulation = run(method, digits, rounds=3, fraction=1.0)
    for t in (1, 2, 3):
        simulation.step(t)
    assert simulation.server.slots.known() == []
    head = set(head_names(simulation.worker.net))
    assert any(name.endswith("bias") for name in head)
    body = set() if encrypt_body else set(simulation.plan.parts) - head
    sealed = {BRANCH, BODY} if encrypt_body else {BRANCH}
    for reply in simulation.sent:
        assert set(reply.state) == body | sealed
    assert set(simulation.server.state) == set(simulation.plan.parts) | sealed
    for name in head:
        assert torch.equal(simulation.server.state[name], simulation.plan.initial[name]), "the common first value"
    seen = to_bytes(simulation.server.state) + b"".join(to_bytes(reply.state) for reply in simulation.sent)
    assert path.read_bytes()[5000:5032] not in seen
    assert seen_by_server(simulation) == (False, False)
    assert len({tuple((n, v.shape) for n, v in reply.state.items()) for reply in simulation.sent}) == 1
    if encrypt_body:
        assert {reply.scalars["weight"] for reply in simulation.sent} == {1.0}, "the weights tell no data sizes"
    simulation.close()


def test_the_same_search_finds_branches_and_presence_where_they_are_open(digits: Federation) -> None:
    simulation = run(make("pfedc", lr=0.05), digits, rounds=3, fraction=1.0)
    for t in (1, 2, 3):
        simulation.step(t)
    assert seen_by_server(simulation) == (True, True)
    simulation.close()


def test_scores_without_labels_have_the_same_accuracy(digits: Federation) -> None:
    simulation = run(make("pfedc", lr=0.05), digits, rounds=1)
    simulation.step(1)
    states = [reply.state for reply in told(simulation)]
    folded = [without_labels(state) for state in states]
    for stage in ("before", "after"):
        whole = evaluate.scores(states, stage)
        assert whole.pop("macro_f1") >= 0
        assert evaluate.scores(folded, stage, labels=False) == whole
        assert evaluate.per_client(folded, stage) == evaluate.per_client(states, stage)
    simulation.close()


def test_the_coordinator_reports_nothing_by_class(digits: Federation) -> None:
    """Sites that keep their states, and whose scores tell no labels."""

    class Sites(Serial):
        apart = True

        def run(self, tasks: Sequence[Task], done: Any = None) -> list[Reply]:
            found = []
            for task, reply in zip(tasks, super().run(tasks, done), strict=True):
                kept = fingerprint(reply.private) if task.op == "train" else None
                found.append(Reply(reply.client, without_labels(reply.state), {}, reply.scalars, kept))
            return found

    method = PrivacyPFedC(lr=0.05)
    settings = Settings(rounds=1, new=False)
    simulation = Simulation(digits, method.build(small_net(digits)), method, settings, executor=Sites, sites=True)
    outcome = finished(simulation)
    plain = finished(run(method, digits, rounds=1, fraction=1.0))
    assert not any("macro_f1" in name for name in outcome.metrics)
    assert "confusion" not in outcome.clients
    assert "confusion" in plain.clients
    assert outcome.clients["ids"] == plain.clients["ids"]


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
