"""Fed-MTL: no coupling is Local, a ridge problem ends in its closed form, the relationship is MOCHA's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from perfed.core import registry
from perfed.core.client import Batch, Client, Update
from perfed.core.method import Method
from perfed.core.plan import Round
from perfed.core.server import Peer, Server
from perfed.core.state import State, digest, under, within
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.worker import Worker
from perfed.errors import NetError
from perfed.methods.fedmtl import OMEGA, RHO, TASKS, FedMTL, covariance
from perfed.nets.net import Net
from tests.conftest import small_net


@dataclass(frozen=True, kw_only=True)
class Ridge(FedMTL):
    """The same coupling of tasks that each are a least-squares problem."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        residual = client.logits(batch) - F.one_hot(batch.y, client.net.num_classes)
        return residual.square().sum(dim=1).mean() / 2


def run(federation: Federation, method: Method, net: Net, rounds: int, **settings: Any) -> Simulation:
    made = Simulation(federation, net, method, Settings(rounds=rounds, new=False, **settings))
    for t in range(1, rounds + 1):
        made.step(t)
    return made


def server_for(method: FedMTL, federation: Federation, net: Net, clients: int = 6) -> Server:
    worker = Worker(federation, net, method, 5, seed=0)
    return Server(method.start(net, clients, worker.plan.initial), worker.plan, clients)


def column(server: Server, value: float) -> State:
    return under("w", {name: torch.full_like(server.plan.initial[name], value) for name in ("fc3.weight", "fc3.bias")})


def spread(weights: Sequence[Tensor]) -> float:
    return float(torch.stack(list(weights)).std(dim=0).mean())


# Limits


def test_without_coupling_it_is_local(digits: Federation) -> None:
    settings = {"rounds": 4, "fraction": 0.5}
    alone = run(digits, registry.make("local", lr=0.05), small_net(digits), **settings)
    for relationship in ("learned", "mean"):
        apart = run(digits, FedMTL(lr=0.05, lam=0.0, relationship=relationship), small_net(digits), **settings)
        for client in range(6):
            assert digest(apart.store.client(client)[1]) == digest(alone.store.client(client)[1])
        assert apart.history[-1]["local.mean"] == alone.history[-1]["local.mean"]


def tiny() -> Federation:
    """Four clients with 12 images of 2 x 2 noise each, labelled at random."""
    source = np.random.default_rng(0)
    owner = np.repeat(np.arange(4), 13)
    test = np.arange(len(owner)) % 13 == 0
    owners = {"train": np.where(test, -1, owner), "val": np.full(len(owner), -1), "test": np.where(test, owner, -1)}
    x = torch.from_numpy(source.integers(0, 256, size=(len(owner), 1, 2, 2), dtype=np.uint8))
    y = torch.from_numpy(source.integers(0, 3, size=len(owner)))
    return Federation(x, y, owners, 4, ["a", "b", "c"])


@pytest.mark.parametrize("relationship", ["learned", "mean"])
def test_a_ridge_problem_ends_in_its_closed_form(relationship: Literal["learned", "mean"]) -> None:
    """min sum_i 1/(2 n_i) |X_i w_i - Y_i|^2 + lambda/2 tr(W Omega W') for a given Omega."""
    federation, m, lam = tiny(), 4, 0.3
    method = Ridge(lam=lam, relationship=relationship, lr=0.2, epochs=4, batch_size=100, updates=1)
    settings = Settings(rounds=1000, eval_every=1000, new=False)
    simulation = Simulation(federation, small_net(federation, hidden=[]), method, settings)
    half = np.random.default_rng(1).normal(size=(m, m)) * 0.5
    omega = np.eye(m) - 1 / m if relationship == "mean" else half @ half.T + 0.5 * np.eye(m)
    if relationship == "learned":
        known = {OMEGA: torch.tensor(omega, dtype=torch.float32), TASKS: torch.arange(m)}
        simulation.server.state = simulation.server.state | known
    blocks, targets = [], []
    for client in range(m):
        data = federation.client(client).train
        X = np.hstack([data.x.flatten(1).double().numpy(), np.ones((len(data), 1))])
        blocks.append(X.T @ X / len(data))
        targets.append(X.T @ F.one_hot(data.y, 3).double().numpy() / len(data))
    system = scipy.linalg.block_diag(*blocks) + lam * np.kron(omega, np.eye(5))
    best = np.linalg.solve(system, np.vstack(targets))

    def height() -> float:
        gap = tasks(simulation.server, m) - best
        return float((gap * (system @ gap)).sum() / 2)

    heights = []
    for t in range(1, 101):
        simulation.step(t)
        heights.append(height())
    assert all(b <= a * 1.0001 + 1e-9 for a, b in pairwise(heights)), "every round is a descent"
    assert np.abs(tasks(simulation.server, m) - best).max() < 1e-4
    alone = np.vstack([np.linalg.solve(b, y) for b, y in zip(blocks, targets, strict=True)])
    assert np.abs(alone - best).max() > 0.05, "tasks on their own would end elsewhere"


def tasks(server: Server, m: int) -> NDArray[np.float64]:
    """All tasks' weights and biases, one below the other."""
    held = [within("w", server.slots[client]) for client in range(m)]
    return np.vstack([torch.hstack([w["fc1.weight"], w["fc1.bias"].unsqueeze(1)]).T.double().numpy() for w in held])


# The relationship


def test_the_relationship_is_the_root_of_the_gram_matrix() -> None:
    W = torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    root = scipy.linalg.sqrtm((W.T @ W).numpy()).real
    assert covariance(W.T @ W).numpy() == pytest.approx(root / np.trace(root), abs=1e-10)
    # It is the minimiser of tr(W Sigma^-1 W') among matrices of trace 1.
    best = float(torch.trace(W @ torch.linalg.inv(covariance(W.T @ W)) @ W.T))
    for seed in range(20):
        A = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rival = A @ A.T + 0.1 * torch.eye(5)
        assert best <= float(torch.trace(W @ torch.linalg.inv(rival / torch.trace(rival)) @ W.T)) + 1e-9


def test_tasks_that_are_one_task_do_not_blow_up() -> None:
    sigma = covariance(torch.ones(4, 4, dtype=torch.float64))
    assert float(torch.trace(sigma)) == pytest.approx(1)
    assert float(torch.linalg.eigvalsh(sigma)[0]) == pytest.approx(float(torch.linalg.eigvalsh(sigma)[-1]) / 100)


def test_the_server_learns_the_relationship_of_all_it_heard_of(digits: Federation) -> None:
    method, net = FedMTL(updates=2), small_net(digits)
    server = server_for(method, digits, net, clients=8)
    source = torch.Generator().manual_seed(0)
    sent = {i: {n: torch.randn(t.shape, generator=source) for n, t in column(server, 0.0).items()} for i in (1, 4, 6)}
    for t, clients in ((1, (4, 6)), (2, (1,)), (3, (4,)), (4, (4,))):
        before = server.state
        server.state = method.combine(server, [Update(i, sent[i], 1.0) for i in clients], Round(t, 8))
        assert (server.state is before) == (t < 4), "every fourth of eight rounds"
    W = torch.stack([torch.cat([sent[i][n].flatten() for n in sent[i]]) for i in (1, 4, 6)], dim=1).double()
    root = torch.from_numpy(scipy.linalg.sqrtm((W.T @ W).numpy()).real)
    sigma = root / torch.trace(root) * 3 / 8
    assert server.state[TASKS].tolist() == [1, 4, 6]
    assert torch.allclose(server.state[OMEGA].double() @ sigma, torch.eye(3, dtype=torch.float64), atol=1e-4)


# What a client is drawn to


def test_the_centre_by_hand(digits: Federation) -> None:
    net = small_net(digits)
    learned = FedMTL()
    server = server_for(learned, digits, net)
    omega = torch.tensor([[3.0, -1.0, 0.5], [-1.0, 2.0, 0.0], [0.5, 0.0, 1.0]])
    for client, value in ((0, 1.0), (2, 2.0), (5, 4.0)):
        server.slots[client] = column(server, value)
    server.state |= {OMEGA: omega, TASKS: torch.tensor([0, 2, 5])}
    sent = learned.send(server, Peer(0, 1), Round(2, 5))
    assert float(sent[RHO]) == 4.5
    assert sent["centre/fc3.bias"].tolist() == pytest.approx([1 - (3 - 2 + 2) / 4.5] * 10)
    assert set(within("centre", sent)) == {"fc3.weight", "fc3.bias"}
    newcomer = learned.send(server, Peer(3, 0), Round(2, 5))
    assert float(newcomer[RHO]) == 6
    assert newcomer["centre/fc3.bias"].abs().max() < 1e-6, "unrelated as yet: Omega = m I draws to zero"
    assert learned.send(server, Peer(0, 1, learns=False), Round(2, 5)) == {}
    drawn = FedMTL(relationship="mean").send(server, Peer(0, 1), Round(2, 5))
    rho, mean = 2 / 3 + 1 / 3 + 1 / 3, 7 / 3
    assert float(drawn[RHO]) == pytest.approx(rho)
    assert drawn["centre/fc3.bias"].tolist() == pytest.approx([1 - (1 - mean) / rho] * 10)


def test_a_step_by_hand(digits: Federation) -> None:
    """Gradient on the own task, then the implicit step to the centre, on the coupled layer alone."""
    method = FedMTL(lr=0.1, lam=0.5, batch_size=10_000)
    client = Worker(digits, small_net(digits), method, 5, seed=0).newcomer(0, 1)
    centre = {"fc3.weight": torch.ones(10, 12), "fc3.bias": torch.full((10,), -1.0)}
    client.received |= under("centre", centre) | {RHO: torch.tensor(4.0)}
    old = client.net.clone()
    sent = method.train(client)
    F.cross_entropy(old(client.data.train.x), client.data.train.y).backward()
    for (name, was), now in zip(old.module.named_parameters(), client.net.module.parameters(), strict=True):
        want = was - 0.1 * was.grad
        if name in centre:
            want = (want + 0.1 * 0.5 * 4 * centre[name]) / (1 + 0.1 * 0.5 * 4)
            assert torch.equal(sent.state[f"w/{name}"], now)
        assert torch.allclose(now, want, atol=1e-6), name


def test_no_strength_is_too_much(digits: Federation) -> None:
    stiff = run(digits, FedMTL(lr=0.1, lam=1e4), small_net(digits), 4)
    assert not stiff.faults
    held = [within("w", stiff.server.slots[client])["fc3.weight"] for client in range(6)]
    assert max(float(w.abs().max()) for w in held) < 0.1, "drawn to zero, not blown up"
    tied = run(digits, FedMTL(lr=0.1, lam=1e4, relationship="mean"), small_net(digits), 4)
    held = [within("w", tied.server.slots[client])["fc3.weight"] for client in range(6)]
    free = run(digits, FedMTL(lr=0.1, lam=0.0), small_net(digits), 4)
    apart = [within("w", free.server.slots[client])["fc3.weight"] for client in range(6)]
    assert spread(held) < 0.1 * spread(apart), "drawn to one another"


def test_coupled_layers_count_from_the_output(digits: Federation) -> None:
    net = small_net(digits)
    for count, layers in ((1, {"fc3"}), (2, {"fc2", "fc3"}), (3, {"fc1", "fc2", "fc3"})):
        method = FedMTL(coupled_layers=count)
        assert {name.split(".")[0] for name in method.coupled(server_for(method, digits, net).plan)} == layers
    with pytest.raises(NetError, match="coupled_layers = 4"):
        FedMTL(coupled_layers=4).build(net)


def test_a_new_client_is_drawn_too(digits: Federation) -> None:
    method = FedMTL(lr=0.1, lam=1e6, join_epochs=1)
    client = Worker(digits, small_net(digits), method, 5, seed=0).newcomer(0, 1)
    client.received |= {"centre/fc3.bias": torch.full((10,), 2.0), RHO: torch.tensor(1.0)}
    method.join(client)
    assert torch.allclose(client.weights()["fc3.bias"], torch.full((10,), 2.0), atol=1e-3)
