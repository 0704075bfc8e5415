"""FedEM: one component is FedAvg, the EM steps by hand, weights follow their samples, probabilities are mixed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perfed.core import registry
from perfed.core.client import Client
from perfed.core.fit import batches
from perfed.data import Federation, federate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.worker import Worker
from perfed.methods.fedem import FedEM, Mixture
from tests.conftest import batchnorm_net, small_net


def simulation(
    name: str, federation: Federation, *, rounds: int = 3, fraction: float = 0.5, **hyper: Any
) -> Simulation:
    method = registry.make(name, **{"lr": 0.1, **hyper})
    net = method.build(small_net(federation, hidden=[16]))
    made = Simulation(federation, net, method, Settings(rounds=rounds, fraction=fraction))
    for t in range(1, rounds + 1):
        made.step(t)
    return made


def newcomer(federation: Federation, **hyper: Any) -> tuple[FedEM, Client, Mixture]:
    method = FedEM(**{"lr": 0.1, **hyper})
    worker = Worker(federation, method.build(small_net(federation, hidden=[16])), method, 5, seed=0)
    client = worker.newcomer(0, 1)
    assert isinstance(client.net.module, Mixture)
    return method, client, client.net.module


def test_one_component_is_fedavg(digits: Federation) -> None:
    alone, plain = (simulation(name, digits, **hyper) for name, hyper in (("fedem", {"M": 1}), ("fedavg", {})))
    for name, tensor in plain.server.state.items():
        assert torch.allclose(alone.server.state[f"components.0.{name}"], tensor, atol=1e-6), name
    assert alone.history[-1]["local.mean"] == plain.history[-1]["local.mean"]


def test_an_em_round_by_hand(digits: Federation) -> None:
    method, client, mixture = newcomer(digits, M=3, batch_size=10_000)
    mixture.pi.copy_(torch.tensor([0.5, 0.3, 0.2]))
    x, y = client.data.train.x, client.data.train.y
    old = client.net.clone().module
    logits = old.each(x)
    probability = torch.stack([z.softmax(dim=1)[torch.arange(len(y)), y] for z in logits])
    joint = old.pi.unsqueeze(1) * probability
    q = (joint / joint.sum(dim=0)).detach()
    method.train(client)
    assert torch.allclose(mixture.pi, q.mean(dim=1), atol=1e-6)
    for m, z in enumerate(logits):
        (q[m] * F.cross_entropy(z, y, reduction="none")).mean().backward()
        for was, now in zip(old.components[m].parameters(), mixture.components[m].parameters(), strict=True):
            assert torch.allclose(now, was - 0.1 * was.grad, atol=1e-6), m


def test_sample_weights_follow_their_samples(digits: Federation) -> None:
    method, client, mixture = newcomer(digits, M=2, batch_size=7)
    reference = client.net.clone()
    data, n = client.data.train, len(client.data.train)
    q = method.weigh(client)
    mixture.pi.fill_(0.5)
    order = list(batches(n, 7, client.generator("fit/0"), whole=False))
    assert torch.cat(order).tolist() != list(range(n)), "the samples are shuffled"
    method.train(client)

    def trained(weights: list[Tensor]) -> Tensor:
        net = reference.clone()
        step = torch.optim.SGD(net.module.parameters(), lr=0.1)
        for index, share in zip(order, weights, strict=True):
            step.zero_grad()
            parts = [F.cross_entropy(c(data.x[index]), data.y[index], reduction="none") for c in net.module.components]
            torch.stack([(s * part).mean() for s, part in zip(share, parts, strict=True)]).sum().backward()
            step.step()
        return torch.cat([p.detach().flatten() for p in net.module.parameters()])

    found = torch.cat([p.detach().flatten() for p in mixture.parameters()])
    aligned = trained([q[:, index] for index in order])
    by_position = trained(list(q.split(7, dim=1)))
    assert torch.allclose(found, aligned, atol=1e-6)
    assert not torch.allclose(found, by_position, atol=1e-4), "a wrong order would show"


def test_probabilities_are_mixed_not_logits(digits: Federation) -> None:
    method, client, mixture = newcomer(digits, M=2)
    mixture.pi.copy_(torch.tensor([0.7, 0.3]))
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.mul_(5)
        x = client.data.test.x
        a, b = mixture.each(x)
        found = method.predict(client, x).softmax(dim=1)
    assert torch.allclose(found, 0.7 * a.softmax(dim=1) + 0.3 * b.softmax(dim=1), atol=1e-6)
    assert not torch.allclose(found, (0.7 * a + 0.3 * b).softmax(dim=1), atol=1e-2)
    mixture.pi.copy_(torch.tensor([1.0, 0.0]))
    with torch.no_grad():
        assert torch.allclose(method.predict(client, x).softmax(dim=1), a.softmax(dim=1), atol=1e-6)


def test_components_start_from_draws_of_their_own(digits: Federation) -> None:
    first, again = (newcomer(digits, M=3)[2] for _ in range(2))
    for m in range(3):
        for (name, a), b in zip(first.components[m].named_parameters(), again.components[m].parameters(), strict=True):
            origin = dict(first.components[0].named_parameters())[name]
            assert torch.equal(a, b), "the same seed gives the same components"
            assert m == 0 or not torch.equal(a, origin)
            assert torch.equal(a.flatten().sort().values, origin.flatten().sort().values), "the same distribution"
    assert torch.equal(first.pi, torch.full((3,), 1 / 3))


def test_layers_and_batchnorm_keep_their_meaning(digits: Federation) -> None:
    plain = batchnorm_net(digits)
    net = FedEM(M=2).build(batchnorm_net(digits))
    assert net.layers == plain.layers
    assert net.batchnorm_names == {f"components.{m}.{name}" for m in range(2) for name in plain.batchnorm_names}
    assert {net.layer_of(f"components.1.{name}") for name in plain.names("fc")} == {"fc"}


def test_a_new_client_learns_its_mixture_weights_alone(digits: Federation) -> None:
    method, client, mixture = newcomer(digits, M=3, join_epochs=5)
    before = {name: tensor.clone() for name, tensor in mixture.state_dict().items() if name != "pi"}
    x, y = client.data.train.x, client.data.train.y
    with torch.no_grad():
        losses = [float(F.cross_entropy(client.net(x), y))]
        for _ in range(3):
            method.join(client)
            losses.append(float(F.cross_entropy(client.net(x), y)))
    assert losses == sorted(losses, reverse=True), "EM never lowers the likelihood"
    assert losses[-1] < losses[0]
    assert all(torch.equal(mixture.state_dict()[name], tensor) for name, tensor in before.items())
    assert float(mixture.pi.sum()) == 1 or abs(float(mixture.pi.sum()) - 1) < 1e-6


def test_clients_of_two_kinds_get_models_of_two_kinds() -> None:
    """Every second client calls digit d d + 5: no single model can serve both."""
    federation = federate("digits", clients=4, split="iid", seed=0)
    for client in range(0, 4, 2):
        for part in ("train", "val", "test"):
            rows = federation.rows(client, part)
            federation._y[rows] = (federation._y[rows] + 5) % 10
    hyper = {"lr": 0.3, "batch_size": 16, "rounds": 9, "fraction": 1.0}
    mixed, single = (simulation(n, federation, **h) for n, h in (("fedem", {"M": 2, **hyper}), ("fedavg", hyper)))
    assert single.history[-1]["local.mean"] < 0.6
    assert mixed.history[-1]["local.mean"] > 0.8
