"""L2GD: Local in its limit, steps as the coins fall, and each client's own model scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from perfed.core.client import Batch, Client
from perfed.core.registry import make
from perfed.core.state import within
from perfed.data import Federation, federate
from perfed.engine.settings import Outcome
from perfed.methods.l2gd import L2GD
from tests.conftest import small_net
from tests.runs import alike, at_work, personal, shaken, stepped

Run = Callable[..., Outcome]
HYPER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "epochs": 2}


@pytest.mark.parametrize("net", ["mlp", "batchnorm"])
def test_without_heads_it_is_local_to_the_bit(net: str, digits: Federation) -> None:
    ours = stepped(make("l2gd", p=0.0, **HYPER), digits, net=net)
    theirs = stepped(make("local", **HYPER), digits, net=net)
    for i in range(digits.num_clients):
        assert alike(personal(ours, i), personal(theirs, i)), f"client {i}"
    assert ours.history[-1]["clients"] == theirs.history[-1]["clients"]
    assert ours.ledger.bytes_up == ours.ledger.bytes_down == 0


def test_the_default_is_not_the_limit(digits: Federation) -> None:
    ours, theirs = stepped(make("l2gd", lr=0.05), digits), stepped(make("local", lr=0.05), digits)
    assert not alike(personal(ours, 0), personal(theirs, 0))
    assert ours.ledger.bytes_up > 0


@dataclass(frozen=True, kw_only=True)
class Slope(L2GD):
    """The same gradient everywhere: 0.3 for every weight."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return torch.stack([0.3 * w.sum() for w in client.net.module.parameters()]).sum()


def test_a_round_by_hand_as_the_coins_fall(digits: Federation) -> None:
    """Heads pull by eta lambda / p towards the received mean, tails step by eta / (1 - p), one for every batch."""
    method = Slope(lr=0.05, lam=1.0, p=0.4)
    initial = {n: t.clone() for n, t in small_net(digits).module.state_dict().items()}
    mean, x = shaken(initial, 1), shaken(initial, 2)
    client = at_work(method, digits, received=mean, private={f"x/{n}": t for n, t in x.items()}, since=1, t=2)
    coins = client.generator("coin")
    tails = heads = 0
    while tails < -(-client.size // 10):
        if float(torch.rand((), generator=coins)) < 0.4:
            heads += 1
            x = {n: t - 0.05 * 1.0 / 0.4 * (t - mean[n]) for n, t in x.items()}
        else:
            tails += 1
            x = {n: t - 0.05 / 0.6 * 0.3 for n, t in x.items()}
    update = method.train(client)
    assert heads > 3
    for name, value in x.items():
        torch.testing.assert_close(client.memory[f"x/{name}"], value, rtol=0, atol=1e-5)
        torch.testing.assert_close(update.state[name], value, rtol=0, atol=1e-5)


def test_the_server_has_the_plain_mean_of_its_participants(digits: Federation) -> None:
    simulation = stepped(make("l2gd", lr=0.05), digits)
    cohort = list(simulation.store.records())[-1]["cohort"]
    models = [within("x", simulation.store.client(i)[1]) for i in cohort]
    for name, value in simulation.server.state.items():
        torch.testing.assert_close(value, torch.stack([m[name] for m in models]).mean(dim=0), rtol=0, atol=1e-6)


def test_each_clients_own_model_is_scored(digits: Federation) -> None:
    simulation = stepped(make("l2gd", lr=0.05), digits)
    for i in range(digits.num_clients):
        own = within("x", simulation.store.client(i)[1]) or simulation.plan.initial
        assert alike(personal(simulation, i), own)


def test_an_overlong_step_towards_the_mean_ends_there(digits: Federation) -> None:
    method = Slope(lr=1e-9, lam=1e12, p=0.4)
    mean = shaken({n: t.clone() for n, t in small_net(digits).module.state_dict().items()}, 1)
    client = at_work(method, digits, received=mean)
    method.train(client)
    for name, value in mean.items():
        torch.testing.assert_close(client.memory[f"x/{name}"], value, rtol=0, atol=1e-6)


def test_a_new_client_starts_from_the_mean() -> None:
    federation = federate("digits", clients=7, split="classes:2", seed=0, unseen=1)
    simulation = stepped(make("l2gd", lr=0.05, join_epochs=0), federation)
    assert alike(personal(simulation, 6), simulation.server.state)
