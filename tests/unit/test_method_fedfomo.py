"""FedFomo: alone it is Local; weights by hand; validation samples judge, test samples never; the server's choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from perfed.core import registry
from perfed.core.client import Client, Update
from perfed.core.plan import Round
from perfed.core.server import Peer, Server, Slots
from perfed.core.state import State, digest, under, within
from perfed.data import Federation, federate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.worker import Worker
from perfed.methods.fedfomo import AFFINITY, GAIN, IDS, FedFomo
from tests.conftest import small_net

Simulate = Callable[..., Outcome]


@pytest.fixture(scope="module")
def validated() -> Federation:
    """Six clients that have validation samples."""
    return federate("digits", clients=6, split="classes:2", val_fraction=0.2, seed=0)


@pytest.fixture(scope="module")
def unvalidated() -> Federation:
    """Six clients that have none."""
    return federate("digits", clients=6, split="classes:2", val_fraction=0.0, seed=0)


def worker_for(federation: Federation, **hyper: Any) -> Worker:
    return Worker(federation, small_net(federation), FedFomo(**{"lr": 0.1, **hyper}), 5, seed=0)


def noisy(state: State, seed: int, scale: float = 0.1) -> State:
    source = torch.Generator().manual_seed(seed)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=source) for name, tensor in state.items()}


def vector(state: State) -> Tensor:
    return torch.cat([state[name].flatten() for name in sorted(state)])


# Limits


@pytest.mark.parametrize("val", [0.0, 0.2])
def test_a_client_left_to_itself_is_local(val: float) -> None:
    federation = federate("digits", clients=6, split="classes:2", val_fraction=val, seed=0)
    runs = []
    for method in (FedFomo(M=1, lr=0.05), registry.make("local", lr=0.05)):
        run = Simulation(federation, small_net(federation), method, Settings(rounds=4, fraction=0.5))
        for t in range(1, 5):
            run.step(t)
        runs.append(run)
    for client in range(6):
        fomo, local = (run.store.client(client) for run in runs)
        assert fomo[0] == local[0]
        assert digest(fomo[1]) == digest(local[1])
    assert runs[0].history[-1]["local.mean"] == runs[1].history[-1]["local.mean"]


def test_alone_in_its_mix_the_own_model_stays_to_the_bit(validated: Federation) -> None:
    """Nothing was offered: whether the last training helped or not, the client goes on from it."""
    worker = worker_for(validated, M=4)
    for seed, scale in ((0, 0.0), (1, 0.01), (2, 1.0)):
        client = worker.newcomer(0, 3)
        own = client.weights()
        client.memory |= under("first", noisy(own, seed, scale))
        gain = worker.method.mix(client)
        assert digest(client.weights()) == digest(own)
        assert gain.tolist() == [0, 0, 0]


# The weights


def test_weights_by_hand(validated: Federation) -> None:
    worker = worker_for(validated, M=4)
    method = worker.method
    assert isinstance(method, FedFomo)
    client = worker.newcomer(0, 3)
    own = client.weights()
    x, y = client.data.val.x, client.data.val.y
    net = client.net.clone()
    step = torch.optim.SGD(net.module.parameters(), lr=0.5)
    for _ in range(5):
        step.zero_grad()
        F.cross_entropy(net(x), y).backward()
        step.step()
    good = {name: tensor.clone() for name, tensor in net.module.state_dict().items()}
    first, bad = noisy(own, 1, 0.05), noisy(own, 2, 2.0)
    models = [own, bad, good]
    client.memory |= under("first", first)
    client.received |= under("model0", bad) | under("model1", good)

    def loss(model: State) -> float:
        net.module.load_state_dict(model)
        with torch.no_grad():
            return float(F.cross_entropy(net(x), y))

    signed = [(loss(first) - loss(m)) / float((vector(m) - vector(first)).norm()) for m in models]
    assert signed[1] < 0 < signed[2]
    weights = [max(0.0, w) for w in signed]
    want = vector(first) + sum(
        w / sum(weights) * (vector(m) - vector(first)) for w, m in zip(weights, models, strict=True)
    )
    gain = method.mix(client)
    assert torch.allclose(vector(client.weights()), want, atol=1e-5)
    scale = sum(map(abs, signed))
    assert gain.tolist() == pytest.approx([signed[1] / scale, signed[2] / scale, 0.0], abs=1e-5)


def test_no_better_model_or_a_broken_one_changes_nothing(validated: Federation) -> None:
    worker = worker_for(validated, M=3)
    client = worker.newcomer(0, 3)
    own = client.weights()
    huge = {name: torch.full_like(tensor, 1e38) for name, tensor in own.items()}
    client.received |= under("model0", huge) | under("model1", noisy(own, 3, 5.0))
    gain = worker.method.mix(client)
    assert digest(client.weights()) == digest(own)
    assert torch.isfinite(gain).all()


# Which samples judge


def test_validation_samples_judge_and_all_training_samples_train(validated: Federation) -> None:
    method, client = FedFomo(), worker_for(validated).newcomer(1, 1)
    size = client.size
    judges = method.judges(client)
    assert judges is client.data.val
    assert client.size == size


def test_without_validation_samples_a_fixed_part_of_the_training_samples_judges(unvalidated: Federation) -> None:
    method, worker = FedFomo(holdout=0.25), worker_for(unvalidated)
    whole = worker.newcomer(0, 1).data.train
    rows = {tuple(row.tolist()): k for k, row in enumerate(whole.x.flatten(1))}
    assert len(rows) == len(whole), "every sample is its own"
    seen = []
    for t in (1, 4):
        client = worker.newcomer(0, t)
        judges = method.judges(client)
        held = [rows[tuple(row.tolist())] for row in judges.x.flatten(1)]
        rest = [rows[tuple(row.tolist())] for row in client.data.train.x.flatten(1)]
        assert sorted(held + rest) == list(range(len(whole))), "apart, and none is lost"
        assert len(held) == round(0.25 * len(whole))
        assert torch.equal(whole.y[held], judges.y)
        seen.append(held)
    assert seen[0] == seen[1], "the same in every round"
    few = worker.newcomer(0, 1)
    few.data.train = type(whole)(whole.x[:1], whole.y[:1])
    assert len(method.judges(few)) == len(few.data.train) == 1, "a single sample does both"


def test_held_out_samples_are_never_trained_on(unvalidated: Federation) -> None:
    """Changing the held-out images changes nothing as long as no model is offered."""
    found = []
    for spoil in (False, True):
        worker = worker_for(unvalidated, M=3)
        client = worker.newcomer(0, 1)
        if spoil:
            probe = worker.newcomer(0, 1)
            held = {tuple(row.tolist()) for row in FedFomo().judges(probe).x.flatten(1)}
            x = client.data.train.x.clone()
            for k, row in enumerate(client.data.train.x.flatten(1)):
                if tuple(row.tolist()) in held:
                    x[k] = 9.0
            client.data.train = type(client.data.train)(x, client.data.train.y)
        found.append(digest(within("model", worker.method.train(client).state)))
    assert found[0] == found[1]


@pytest.mark.parametrize("val", [0.0, 0.2])
def test_test_samples_choose_nothing(val: float) -> None:
    """Two federations that differ in their test samples alone end in the same states."""
    found = []
    for spoil in (False, True):
        federation = federate("digits", clients=6, split="classes:2", val_fraction=val, seed=0)
        if spoil:
            rows = federation._rows["test"]
            federation._x[rows] = 0
            federation._y[rows] = (federation._y[rows] + 3) % 10
        run = Simulation(federation, small_net(federation), FedFomo(lr=0.1, M=4), Settings(rounds=3, fraction=0.5))
        outcome = run.run()
        assert outcome is not None
        found.append(outcome.state_sha256)
    assert found[0] == found[1]


# The server


def server_with(
    worker: Worker, models: dict[int, State], affinity: dict[int, dict[int, float]] | None = None
) -> Server:
    slots = Slots()
    for client, model in models.items():
        known = (affinity or {}).get(client, {})
        ids = {IDS: torch.tensor(list(known), dtype=torch.int64), AFFINITY: torch.tensor(list(known.values()))}
        slots[client] = under("model", model) | ids
    return Server(dict(worker.plan.initial), worker.plan, 20, slots=slots)


def test_the_most_helpful_models_are_offered_and_never_the_own(digits: Federation) -> None:
    worker = worker_for(digits)
    models = {i: noisy(dict(worker.plan.initial), i) for i in (0, 2, 3, 5, 8)}
    server = server_with(worker, models, {3: {8: 0.9, 0: 0.5, 2: -0.1}})
    greedy = FedFomo(M=3, epsilon=0.0)
    assert greedy.pick(server, 3, Round(1, 5)) == [8, 0]
    sent = greedy.send(server, Peer(3, 1), Round(1, 5))
    assert digest(within("model0", sent)) == digest(models[8])
    assert digest(within("model1", sent)) == digest(models[0])
    assert len(sent) == 2 * len(worker.plan.parts)
    assert greedy.send(server, Peer(3, 1, learns=False), Round(1, 5)) == {}, "who is only scored downloads nothing"
    explorer, seen = FedFomo(M=3, epsilon=1.0, epsilon_decay=0.0), set()
    for t in range(1, 40):
        picked = explorer.pick(server, 3, Round(t, 50))
        assert len(set(picked)) == 2
        assert picked == explorer.pick(server, 3, Round(t, 50)), "the same when asked again"
        seen |= set(picked)
    assert seen == {0, 2, 5, 8}
    fading = FedFomo(M=3, epsilon=1.0, epsilon_decay=0.5)
    assert fading.pick(server, 3, Round(3, 5)) == [8, 0]
    assert set(FedFomo(M=9).pick(server, 3, Round(1, 5))) == {0, 2, 5, 8}
    assert FedFomo().pick(server_with(worker, {}), 3, Round(1, 5)) == []


def test_gains_are_credited_to_the_models_that_were_offered(digits: Federation) -> None:
    worker = worker_for(digits)
    method = FedFomo(M=3, epsilon=0.0)
    models = {i: dict(worker.plan.initial) for i in range(6)}
    affinity = {1: {4: 1.0, 2: 0.5}, 5: {0: 1.0, 3: 0.5}}
    updates = [
        Update(i, under("model", noisy(models[i], i)) | {GAIN: torch.tensor(gain)}, 1.0)
        for i, gain in ((1, [0.25, -0.75]), (5, [-0.5, 0.5]))
    ]
    for order in ((0, 1), (1, 0)):
        server = server_with(worker, models, affinity)
        method.combine(server, [updates[k] for k in order], Round(1, 5))
        rows = {
            i: dict(zip(server.slots[i][IDS].tolist(), server.slots[i][AFFINITY].tolist(), strict=True)) for i in (1, 5)
        }
        assert rows == {1: {4: 1.25, 2: -0.25}, 5: {0: 0.5, 3: 1.0}}
        assert digest(within("model", server.slots[5])) == digest(within("model", updates[1].state))


def test_cost_follows_what_is_sent(digits: Federation) -> None:
    """Of fifty remembered clients the server reads the asking one and the M - 1 it offers."""
    worker = worker_for(digits)
    slot = under("model", worker.plan.initial) | {IDS: torch.zeros(0, dtype=torch.int64), AFFINITY: torch.zeros(0)}
    read: list[int] = []

    def reader(client: int) -> State:
        read.append(client)
        return slot

    server = Server(dict(worker.plan.initial), worker.plan, 50, slots=Slots(reader, lambda: list(range(50))))
    FedFomo(M=4).send(server, Peer(7, 1), Round(1, 5))
    assert read[0] == 7
    assert len(read) == 4


def test_helpers_are_found() -> None:
    """Clients 0, 2, 4 call digit d d + 5: after a few rounds each trusts its own kind most."""
    federation = federate("digits", clients=6, split="iid", seed=0)
    for client in (0, 2, 4):
        for part in ("train", "val", "test"):
            rows = federation.rows(client, part)
            federation._y[rows] = (federation._y[rows] + 5) % 10
    method = FedFomo(lr=0.2, M=6, batch_size=16)
    run = Simulation(federation, small_net(federation), method, Settings(rounds=4, new=False))
    for t in range(1, 5):
        run.step(t)
    for client in range(6):
        slot = run.server.slots[client]
        trust = dict(zip(slot[IDS].tolist(), slot[AFFINITY].tolist(), strict=True))
        kin = [value for other, value in trust.items() if other % 2 == client % 2]
        strangers = [value for other, value in trust.items() if other % 2 != client % 2]
        assert min(kin) > max(strangers)


def test_a_new_client_chooses_among_what_it_is_offered(validated: Federation) -> None:
    worker = worker_for(validated, M=3, join_epochs=0)
    trained = worker.newcomer(0, 1)
    worker.method.fit(trained, worker.method.phases(trained))
    good = trained.weights()
    client = worker.newcomer(0, 2)
    client.received |= under("model0", good)
    worker.method.join(client)
    assert digest(client.weights()) == digest(good)


def test_the_scored_model_is_the_clients_own(digits: Federation) -> None:
    run = Simulation(digits, small_net(digits), FedFomo(lr=0.1), Settings(rounds=2, fraction=0.5))
    for t in (1, 2):
        run.step(t)
    for client in range(6):
        task = run._task("evaluate", client, 2, seen=True)
        found: Client = run.worker.client(task)
        own = within("model", run.server.slots[client]) or run.plan.initial
        assert digest(found.weights()) == digest(own)
