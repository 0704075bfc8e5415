"""FedPAC: the head weights solve their programme and go to the right clients; alignment and statistics by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F

from perfed.core.client import Update
from perfed.core.plan import Round
from perfed.core.server import Peer, Server
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.worker import Worker
from perfed.errors import NetError
from perfed.methods.fedpac import CENTROIDS, COUNTS, MEANS, VARIANCE, FedPAC, collaboration, simplex_minimum
from tests.conftest import small_net

HEAD = ("fc3.weight", "fc3.bias")


def worker_for(federation: Federation, **hyper: float) -> Worker:
    method = FedPAC(**{"lr": 0.1, **hyper})
    return Worker(federation, small_net(federation), method, 5, seed=0)


def server_for(worker: Worker, clients: int = 12) -> Server:
    return Server(worker.method.start(worker.net, clients, worker.plan.initial), worker.plan, clients)


def update(worker: Worker, client: int, statistic: float, *, variance: float = 1e-6) -> Update:
    """A client whose whole network is its number and whose features have this mean."""
    server = server_for(worker)
    state = {name: torch.full_like(tensor, client) for name, tensor in worker.plan.initial.items()}
    features = torch.full_like(server.state[CENTROIDS], statistic)
    counts = torch.ones_like(server.state[COUNTS])
    own = {CENTROIDS: features, COUNTS: counts, MEANS: features, VARIANCE: torch.tensor(variance)}
    return Update(client, state | own, 10.0)


# The quadratic programme


def objective(alpha: Sequence[float], i: int, means: Tensor, variances: Tensor) -> float:
    """The paper's: variance and, class by class, bias."""
    total = sum(float(a) ** 2 * float(v) for a, v in zip(alpha, variances, strict=True))
    for k in range(means.shape[1]):
        bias = sum(float(a) * (means[i, k] - means[j, k]) for j, a in enumerate(alpha))
        total += float(torch.as_tensor(bias).square().sum())
    return total


@pytest.mark.parametrize("seed", range(4))
def test_head_weights_minimise_the_programme(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    m = 5
    means = torch.randn(m, 3, 4, generator=source, dtype=torch.float64) * 0.3
    variances = torch.rand(m, generator=source, dtype=torch.float64)
    for i, alpha in enumerate(collaboration(means.flatten(1), variances)):
        assert sum(alpha) == pytest.approx(1)
        assert min(alpha) >= 0
        rival = minimize(
            lambda a, i=i: objective(a, i, means, variances),
            np.full(m, 1 / m),
            method="SLSQP",
            bounds=[(0, 1)] * m,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        found = objective(alpha, i, means, variances)
        assert found <= rival.fun + 1e-7
        assert found == pytest.approx(rival.fun, rel=1e-4)


def test_simplex_minimum_against_every_point_of_a_grid() -> None:
    source = np.random.default_rng(0)
    grid = [np.array(p) / 20 for p in product(range(21), repeat=3) if sum(p) == 20]
    for rank in (1, 2, 3):
        A = source.normal(size=(rank, 3))
        P = A.T @ A
        best = min(float(p @ P @ p) for p in grid)
        a = simplex_minimum(P)
        assert float(a @ P @ a) <= best + 1e-12
    assert simplex_minimum(np.diag([1.0, 2.0, 4.0])) == pytest.approx([4 / 7, 2 / 7, 1 / 7]), "inverse variances"
    assert simplex_minimum(np.zeros((2, 2))).sum() == pytest.approx(1)


def test_alike_clients_share_heads_and_strangers_do_not() -> None:
    means = torch.tensor([[0.0], [0.0], [50.0]])
    weights = collaboration(means, torch.tensor([1.0, 3.0, 1.0]))
    assert weights[0] == pytest.approx([0.75, 0.25, 0.0], abs=1e-3)
    assert weights[2] == pytest.approx([0.0, 0.0, 1.0], abs=1e-3)


# Who gets which head


def test_heads_go_to_the_right_clients(digits: Federation) -> None:
    """Two pairs of alike clients: each gets its pair's mean head, in whatever order the updates come."""
    worker = worker_for(digits)
    updates = [update(worker, i, mean) for i, mean in ((7, 0.0), (2, 9.0), (5, 0.0), (11, 9.0))]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        server = server_for(worker)
        server.slots[3] = {name: worker.plan.initial[name] + 1 for name in HEAD}
        server.state = worker.method.combine(server, [updates[k] for k in order], Round(1, 5))
        for client, head in ((7, 6.0), (5, 6.0), (2, 6.5), (11, 6.5)):
            received = worker.method.send(server, Peer(client, 1), Round(2, 5))
            assert received["fc3.bias"].tolist() == pytest.approx([head] * 10, abs=1e-3), client
            assert received["fc1.bias"].tolist() == pytest.approx([6.25] * 16), "the body is the mean of all"
        untouched = worker.method.send(server, Peer(3, 1), Round(2, 5))
        assert torch.equal(untouched["fc3.bias"], worker.plan.initial["fc3.bias"] + 1)
        newcomer = worker.method.send(server, Peer(0, 0), Round(2, 5))
        assert newcomer["fc3.bias"].tolist() == pytest.approx([6.25] * 10), "the mean head"


def test_partial_participation_scores_everyone_with_the_own_head(digits: Federation) -> None:
    method = FedPAC(lr=0.1)
    run = Simulation(digits, small_net(digits), method, Settings(rounds=3, fraction=0.5))
    heads: dict[int, Tensor] = {}
    for t in (1, 2, 3):
        run.step(t)
        cohort = list(run.store.records())[-1]["cohort"]
        for client in range(6):
            head = run._task("evaluate", client, t, seen=True).received["fc3.weight"]
            if client in cohort:
                heads[client] = head
            elif client in heads:
                assert torch.equal(head, heads[client]), "an unsampled client's head changed"
            else:
                assert torch.equal(head, run.server.state["fc3.weight"])
    assert len({head.sum().item() for head in heads.values()}) > 1


# The client's round


def test_alignment_by_hand(digits: Federation) -> None:
    """A whole-data step on the body: known classes are drawn to their centroid, the others are not."""
    worker = worker_for(digits, batch_size=10_000, head_epochs=0, lam=0.7)
    client = worker.newcomer(0, 1)
    held = client.data.classes_held
    counts = torch.zeros(10)
    counts[held[0]] = 3
    centroids = torch.randn(10, 12, generator=torch.Generator().manual_seed(0))
    client.received |= {CENTROIDS: centroids, COUNTS: counts}
    old = client.net.clone()
    worker.method.train(client)
    x, y = client.data.train.x, client.data.train.y
    features = old.features(x)
    known = y == held[0]
    apart = (features[known] - centroids[held[0]]).square().sum() / features.numel()
    (F.cross_entropy(old(x), y) + 0.7 * apart).backward()
    for (name, was), now in zip(old.module.named_parameters(), client.net.module.parameters(), strict=True):
        want = was if name in HEAD else was - 0.1 * was.grad
        assert torch.allclose(now, want, atol=1e-6), name


def test_the_head_steps_first_and_at_its_own_rate(digits: Federation) -> None:
    worker = worker_for(digits, batch_size=10_000, head_lr=0.3, epochs=0)
    client = worker.newcomer(0, 1)
    old = client.net.clone()
    worker.method.train(client)
    F.cross_entropy(old(client.data.train.x), client.data.train.y).backward()
    for (name, was), now in zip(old.module.named_parameters(), client.net.module.named_parameters(), strict=True):
        want = was - 0.3 * was.grad if name in HEAD else was
        assert torch.allclose(now[1], want, atol=1e-6), name


def test_statistics_by_hand(digits: Federation) -> None:
    """Means and variance are those of the received body, centroids those of the trained one."""
    worker = worker_for(digits)
    client = worker.newcomer(0, 1)
    x, y, n = client.data.train.x, client.data.train.y, len(client.data.train)
    with torch.no_grad():
        received = client.net.features(x)
    sent = worker.method.train(client).state
    with torch.no_grad():
        trained = client.net.features(x)
    variance = float(received.square().sum(dim=1).mean())
    for k in range(10):
        share = float((y == k).float().mean())
        mean = share * received[y == k].mean(dim=0) if share else torch.zeros(12)
        assert torch.allclose(sent[MEANS][k], mean, atol=1e-6)
        assert torch.allclose(sent[CENTROIDS][k], trained[y == k].mean(dim=0) if share else torch.zeros(12), atol=1e-5)
        assert int(sent[COUNTS][k]) == int((y == k).sum())
        variance -= float(mean.square().sum())
    assert float(sent[VARIANCE]) == pytest.approx(variance / n, rel=1e-4)


def test_centroids_are_weighted_by_class_counts_and_kept(digits: Federation) -> None:
    worker = worker_for(digits)
    server = server_for(worker)
    a, b = update(worker, 0, 1.0), update(worker, 1, 4.0)
    a.state[COUNTS] = torch.tensor([2.0, 0.0] + [1.0] * 8)
    b.state[COUNTS] = torch.tensor([1.0, 0.0] + [1.0] * 8)
    server.state = worker.method.combine(server, [a, b], Round(1, 5))
    assert server.state[CENTROIDS][:, 0].tolist() == pytest.approx([2.0, 0.0] + [2.5] * 8)
    assert server.state[COUNTS].tolist() == [3.0, 0.0] + [2.0] * 8
    a.state[COUNTS] = torch.tensor([0.0, 5.0] + [0.0] * 8)
    server.state = worker.method.combine(server, [a], Round(2, 5))
    assert server.state[CENTROIDS][:, 0].tolist() == pytest.approx([2.0, 1.0] + [2.5] * 8)
    assert bool((server.state[COUNTS] > 0).all()), "every class has a centroid now"


def test_a_network_without_a_body_is_refused(digits: Federation) -> None:
    net = small_net(digits, hidden=[])
    with pytest.raises(NetError, match="features below the head"):
        Simulation(digits, net, FedPAC(), Settings(rounds=1))


def test_it_learns_and_the_alignment_matters(digits: Federation) -> None:
    scores = []
    for method in (FedPAC(lr=0.1), FedPAC(lr=0.1, lam=0.0)):
        run = Simulation(digits, small_net(digits), method, Settings(rounds=4, new=False))
        scores.append(run.run())
    assert scores[0] is not None
    assert scores[1] is not None
    assert scores[0].metrics["local.mean"] > 0.7
    assert scores[0].state_sha256 != scores[1].state_sha256, "the alignment does something"
