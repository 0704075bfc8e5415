"""FedProx: FedAvg in the limit, and a pull towards what was received."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from perfed.core.registry import make
from perfed.data import Federation
from perfed.engine.settings import Outcome
from tests.conftest import small_net
from tests.runs import at_work, shaken, whole

Run = Callable[..., Outcome]


def test_without_the_proximal_term_it_is_fedavg_to_the_bit(simulate: Run) -> None:
    for hyper in ({}, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}):
        fedavg, fedprox = simulate("fedavg", **hyper), simulate("fedprox", mu=0.0, **hyper)
        assert fedprox.state_sha256 == fedavg.state_sha256
        assert fedprox.metrics == fedavg.metrics
    assert simulate("fedprox+ft", mu=0.0).metrics == simulate("fedavg+ft").metrics


def test_the_default_is_not_the_limit(simulate: Run) -> None:
    assert simulate("fedprox").state_sha256 != simulate("fedavg").state_sha256


def test_two_steps_by_hand_from_what_was_received(digits: Federation) -> None:
    method = make("fedprox", mu=0.5, lr=0.1, epochs=2, batch_size=10_000)
    start = shaken(dict(small_net(digits).module.state_dict()))
    client = at_work(method, digits, received=start)
    net, batch = small_net(digits), whole(client)
    net.module.load_state_dict(start)
    for _ in range(2):
        net.module.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()
        with torch.no_grad():
            for name, w in net.module.named_parameters():
                assert w.grad is not None
                w -= 0.1 * (w.grad + 0.5 * (w - start[name]))
    update = method.train(client)
    for name, w in net.module.named_parameters():
        torch.testing.assert_close(update.state[name], w.detach(), rtol=0, atol=1e-6)


def test_a_stronger_pull_keeps_clients_nearer(digits: Federation) -> None:
    def distance(mu: float) -> float:
        client = at_work(make("fedprox", mu=mu, lr=0.05, epochs=3), digits)
        after = make("fedprox", mu=mu, lr=0.05, epochs=3).train(client).state
        return sum(float((after[n] - w).square().sum()) for n, w in client.plan.initial.items())

    assert distance(10.0) < 0.5 * distance(1.0) < 0.5 * distance(0.0)
