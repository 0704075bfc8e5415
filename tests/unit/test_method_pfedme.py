"""pFedMe: its proximal problem solved, the envelope's step, and the personal model scored."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from perfed import nets
from perfed.core.client import Batch, Client
from perfed.core.proximal import parameters
from perfed.core.registry import make
from perfed.core.state import within
from perfed.core.twin import twin
from perfed.data import Federation, federate
from perfed.methods.pfedme import PFedMe
from perfed.nets.net import Net
from tests.conftest import small_net
from tests.runs import alike, at_work, personal, shaken, stepped, whole


@dataclass(frozen=True, kw_only=True)
class Regression(PFedMe):
    """Least squares onto the one-hot label: a quadratic in the weights of a linear network."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        error = client.logits(batch) - F.one_hot(batch.y, 10)
        return error.square().sum(dim=1).mean() / 2


def linear_net(federation: Federation) -> Net:
    torch.manual_seed(0)
    return nets.build("mlp", federation.input_shape, federation.num_classes, hidden=[])


def exact(client: Client, lam: float, w: dict[str, Tensor]) -> Tensor:
    """argmin of the regularised least squares, weights and bias side by side, in double precision."""
    batch = whole(client)
    x = torch.cat([batch.x.flatten(1), torch.ones(len(batch.y), 1)], dim=1).double()
    y = F.one_hot(batch.y, 10).double()
    centre = torch.cat([w["fc1.weight"], w["fc1.bias"][:, None]], dim=1).double()
    left = x.T @ x / len(x) + lam * torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(left, x.T @ y / len(x) + lam * centre.T).T


@pytest.mark.parametrize(("lam", "K", "lr"), [(15.0, 5, 0.03), (15.0, 60, 0.03), (1.0, 400, 0.04)])
def test_the_personal_step_solves_the_proximal_problem(lam: float, K: int, lr: float, digits: Federation) -> None:
    method = Regression(lam=lam, K=K, personal_lr=lr)
    client = at_work(method, digits, net=linear_net(digits))
    w = parameters(client.net)
    mine = twin(client, client.weights())
    method.solve(mine, w, whole(client))
    theta, solution = parameters(mine.net), exact(client, lam, w)
    found = torch.cat([theta["fc1.weight"], theta["fc1.bias"][:, None]], dim=1).double()
    start = torch.cat([w["fc1.weight"], w["fc1.bias"][:, None]], dim=1).double()
    error, far = float((found - solution).abs().max()), float((start - solution).abs().max())
    assert far > 0.01
    assert error < (1e-4 if K > 5 else 0.2 * far)


def test_w_takes_the_envelopes_step(digits: Federation) -> None:
    method = make("pfedme", lr=0.01, batch_size=10_000, momentum=0.9, weight_decay=0.1)
    w = shaken({n: t.clone() for n, t in small_net(digits).module.state_dict().items()}, 1)
    client = at_work(method, digits, received=w)
    update = method.train(client)
    for name, theta in within("theta", client.memory).items():
        torch.testing.assert_close(update.state[name], w[name] - 0.01 * 15 * (w[name] - theta), rtol=0, atol=1e-6)
        assert not torch.equal(theta, w[name])


def test_k_steps_by_hand(digits: Federation) -> None:
    method = make("pfedme", lr=0.01, batch_size=10_000, weight_decay=0.1)
    client = at_work(method, digits)
    w, net, batch = dict(client.plan.initial), small_net(digits), whole(client)
    for _ in range(5):
        net.module.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()
        with torch.no_grad():
            for n, p in net.module.named_parameters():
                assert p.grad is not None
                p -= 0.09 * (p.grad + 15 * (p - w[n]) + 0.1 * p)
    method.train(client)
    for n, p in net.module.named_parameters():
        torch.testing.assert_close(client.memory[f"theta/{n}"], p.detach(), rtol=0, atol=1e-6)


def test_the_personal_model_is_scored_and_not_the_global_or_the_first_one(digits: Federation) -> None:
    simulation = stepped(make("pfedme", lr=0.05), digits)
    took_part = [i for i in range(digits.num_clients) if simulation.store.client(i)[0]]
    for i in took_part:
        found = personal(simulation, i)
        assert alike(found, within("theta", simulation.store.client(i)[1]))
        for other in (simulation.server.state, simulation.plan.initial):
            assert not any(torch.equal(found[n], other[n]) for n in found)
    for i in set(range(digits.num_clients)) - set(took_part):
        assert alike(personal(simulation, i), simulation.server.state)


def test_beta_is_the_servers_step(digits: Federation) -> None:
    start = dict(small_net(digits).module.state_dict())
    one, half = (stepped(make("pfedme", lr=0.05, beta=b), digits, rounds=1).server.state for b in (1.0, 0.5))
    for name, w in start.items():
        torch.testing.assert_close(half[name] - w, 0.5 * (one[name] - w), rtol=0, atol=1e-6)


def test_batchnorm_statistics_are_the_personal_models(digits: Federation) -> None:
    method = make("pfedme", lr=0.05)
    client = at_work(method, digits, net="batchnorm")
    update = method.train(client)
    for name in ("scale.running_mean", "shift.running_var"):
        assert torch.equal(update.state[name], client.memory[f"theta/{name}"])
        assert not torch.equal(update.state[name], client.plan.initial[name])


def test_its_work_is_counted(digits: Federation) -> None:
    method = make("pfedme", lr=0.05, K=3)
    client = at_work(method, digits)
    method.train(client)
    assert client.meter.samples == 3 * client.size
    assert client.meter.batches == 3 * -(-client.size // 10)


def test_a_new_client_solves_around_the_global_model() -> None:
    federation = federate("digits", clients=7, split="classes:2", seed=0, unseen=1)
    for epochs in (0, 2):
        simulation = stepped(make("pfedme", lr=0.05, join_epochs=epochs), federation)
        assert alike(personal(simulation, 6), simulation.server.state) == (not epochs)
