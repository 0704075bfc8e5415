"""Ditto: Local in one limit, FedAvg beside it always, and a pull towards what was received."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from perfed.core.registry import make
from perfed.core.state import within
from perfed.data import Federation, federate
from perfed.engine.settings import Outcome
from tests.conftest import batchnorm_net, small_net
from tests.runs import alike, at_work, personal, shaken, stepped, whole

Run = Callable[..., Outcome]
HYPER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "epochs": 2}


@pytest.mark.parametrize("net", ["mlp", "batchnorm"])
def test_without_the_pull_the_personal_model_is_locals_to_the_bit(net: str, digits: Federation) -> None:
    ours = stepped(make("ditto", lam=0.0, **HYPER), digits, net=net)
    theirs = stepped(make("local", **HYPER), digits, net=net)
    for i in range(digits.num_clients):
        assert alike(personal(ours, i), personal(theirs, i)), f"client {i}"
    assert ours.history[-1]["local.mean"] == theirs.history[-1]["local.mean"]
    assert ours.history[-1]["clients"]["confusion"] == theirs.history[-1]["clients"]["confusion"]


def test_the_global_model_is_fedavgs_to_the_bit(digits: Federation) -> None:
    for lam in (0.0, 1.0):
        ours, theirs = (stepped(m, digits) for m in (make("ditto", lam=lam, **HYPER), make("fedavg", **HYPER)))
        assert alike(ours.server.state, theirs.server.state)


def test_two_personal_steps_by_hand_towards_the_received_model(digits: Federation) -> None:
    """Not towards the locally trained one, which also moves in this round."""
    method = make("ditto", lam=0.5, lr=0.1, epochs=2, batch_size=10_000)
    initial = dict(small_net(digits).module.state_dict())
    w, v = shaken(initial, 1), shaken(initial, 2)
    client = at_work(method, digits, received=w, private={f"v/{n}": t for n, t in v.items()}, since=1, t=2)
    net, batch = small_net(digits), whole(client)
    net.module.load_state_dict(v)
    for _ in range(2):
        net.module.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()
        with torch.no_grad():
            for name, own in net.module.named_parameters():
                assert own.grad is not None
                own -= 0.1 * (own.grad + 0.5 * (own - w[name]))
    update = method.train(client)
    for name, own in net.module.named_parameters():
        torch.testing.assert_close(client.memory[f"v/{name}"], own.detach(), rtol=0, atol=1e-6)
        assert not torch.equal(update.state[name], client.memory[f"v/{name}"])


def test_the_personal_model_is_scored(digits: Federation) -> None:
    simulation = stepped(make("ditto", lr=0.05), digits)
    for i in range(digits.num_clients):
        own = within("v", simulation.store.client(i)[1]) or simulation.plan.initial
        assert alike(personal(simulation, i), own)
        assert not alike(own, simulation.server.state)


def test_a_strong_pull_brings_it_to_the_global_model(digits: Federation) -> None:
    client = at_work(make("ditto", lam=20.0, lr=0.05, epochs=5), digits, received=shaken(_initial(digits), 1))
    start = client.weights()
    make("ditto", lam=20.0, lr=0.05, epochs=5).train(client)
    v = within("v", client.memory)
    assert all(float((v[n] - start[n]).abs().max()) < 0.1 for n in v)


def test_batchnorm_statistics_of_the_two_models_are_apart(digits: Federation) -> None:
    method = make("ditto", lr=0.05)
    client = at_work(method, digits, net=batchnorm_net(digits), received=shaken(_initial(digits, "batchnorm"), 1))
    update = method.train(client)
    plain = at_work(make("fedavg", lr=0.05), digits, net="batchnorm", received=shaken(_initial(digits, "batchnorm"), 1))
    assert alike(update.state, make("fedavg", lr=0.05).train(plain).state)
    assert not torch.equal(client.memory["v/scale.running_mean"], update.state["scale.running_mean"])


def test_a_new_client_starts_from_the_global_model() -> None:
    federation = federate("digits", clients=7, split="classes:2", seed=0, unseen=1)
    simulation = stepped(make("ditto", lr=0.05, join_epochs=0), federation)
    assert alike(personal(simulation, 6), simulation.server.state)


def _initial(digits: Federation, net: str = "mlp") -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in small_net(digits, net).module.state_dict().items()}
