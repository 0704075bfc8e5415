"""APFL: Local and FedAvg in its limits, v trained, w stepped once, alpha learnt once a round, the mixture scored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from perfed.core.registry import make
from perfed.core.state import State, within
from perfed.data import Federation, federate
from perfed.engine.rounds import Simulation
from perfed.methods.apfl import ALPHA
from tests.conftest import small_net
from tests.runs import alike, at_work, personal, shaken, stepped, whole

HYPER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "epochs": 2}
nets = pytest.mark.parametrize("net", ["mlp", "batchnorm"])


def same_scores(a: Simulation, b: Simulation) -> bool:
    return all(a.history[-1]["clients"][key] == b.history[-1]["clients"][key] for key in ("accuracy", "confusion"))


@nets
def test_alpha_1_is_local_to_the_bit(net: str, digits: Federation) -> None:
    ours = stepped(make("apfl", alpha=1.0, adaptive=False, **HYPER), digits, net=net)
    theirs = stepped(make("local", **HYPER), digits, net=net)
    for i in range(digits.num_clients):
        mine, local = personal(ours, i), personal(theirs, i)
        assert all(torch.equal(mine[n], t) for n, t in local.items() if t.is_floating_point()), f"client {i}"
    assert same_scores(ours, theirs)


@nets
def test_alpha_0_is_fedavg_to_the_bit(net: str, digits: Federation) -> None:
    ours = stepped(make("apfl", alpha=0.0, adaptive=False, **HYPER), digits, net=net)
    theirs = stepped(make("fedavg", **HYPER), digits, net=net)
    assert alike(ours.server.state, theirs.server.state)
    assert all(alike(personal(ours, i), personal(theirs, i)) for i in range(digits.num_clients))
    assert same_scores(ours, theirs)


@nets
def test_w_is_stepped_once_whatever_v_and_alpha_do(net: str, digits: Federation) -> None:
    ours, theirs = (stepped(make(name, **HYPER), digits, net=net) for name in ("apfl", "fedavg"))
    assert alike(ours.server.state, theirs.server.state)


def first_round(digits: Federation, **hyper: object) -> tuple[State, State, State, torch.Tensor, State]:
    """w, v, the gradient at their mixture (a half each), alpha and v after one step on all data."""
    initial = {n: t.clone() for n, t in small_net(digits).module.state_dict().items()}
    w, v = shaken(initial, 1), shaken(initial, 2)
    method = make("apfl", lr=0.1, batch_size=10_000, **hyper)
    client = at_work(method, digits, received=w, private={f"v/{n}": t for n, t in v.items()}, since=1, t=2)
    net, batch = small_net(digits), whole(client)
    net.module.load_state_dict({n: 0.5 * v[n] + 0.5 * w[n] for n in w})
    F.cross_entropy(net(batch.x), batch.y).backward()
    g = {n: p.grad for n, p in net.module.named_parameters() if p.grad is not None}
    method.train(client)
    return w, v, g, client.memory[ALPHA], within("v", client.memory)


def test_one_step_of_v_and_alpha_by_hand(digits: Federation) -> None:
    w, v, g, alpha, new = first_round(digits)
    want = 0.5 - 0.1 * sum(float(((v[n] - w[n]) * g[n]).sum()) for n in g)
    assert want != pytest.approx(0.5, abs=1e-3)
    assert float(alpha) == pytest.approx(want, abs=1e-5)
    for n in g:
        torch.testing.assert_close(new[n], v[n] - 0.1 * 0.5 * g[n], rtol=0, atol=1e-6)


def test_alpha_is_learnt_once_a_round_with_the_first_batch(digits: Federation) -> None:
    *_, once, _ = first_round(digits)
    *_, thrice, _ = first_round(digits, epochs=3)
    assert torch.equal(once, thrice)


def test_alpha_stays_within_its_bounds_and_lasts(digits: Federation) -> None:
    simulation = stepped(make("apfl", lr=0.5), digits, rounds=5, fraction=1.0)
    alphas = [float(simulation.store.client(i)[1][ALPHA]) for i in range(digits.num_clients)]
    assert all(0 <= alpha <= 1 for alpha in alphas)
    assert len(set(alphas)) > 1, "every client has its own"
    client = at_work(make("apfl", lr=1e4), digits, private=shaken({ALPHA: torch.tensor(0.5)}, size=0.0), since=1, t=2)
    make("apfl", lr=1e4, epochs=1, batch_size=10_000).train(client)
    assert float(client.memory[ALPHA]) in (0.0, 0.5, 1.0)


def test_the_mixture_with_the_newest_global_model_is_scored(digits: Federation) -> None:
    simulation = stepped(make("apfl", lr=0.05), digits)
    for i in range(digits.num_clients):
        memory = simulation.store.client(i)[1]
        v, alpha = within("v", memory) or simulation.plan.initial, memory.get(ALPHA, torch.tensor(0.5))
        found = personal(simulation, i)
        for n, w in simulation.server.state.items():
            torch.testing.assert_close(found[n], alpha * v[n] + (1 - alpha) * w, rtol=0, atol=1e-7)


def test_v_learns(digits: Federation) -> None:
    simulation = stepped(make("apfl", lr=0.05), digits, fraction=1.0)
    for i in range(digits.num_clients):
        v = within("v", simulation.store.client(i)[1])
        assert not any(torch.equal(t, simulation.plan.initial[n]) for n, t in v.items())
        assert not any(torch.equal(t, simulation.server.state[n]) for n, t in v.items())


def test_a_new_client_starts_from_the_global_model() -> None:
    federation = federate("digits", clients=7, split="classes:2", seed=0, unseen=1)
    simulation = stepped(make("apfl", lr=0.05, join_epochs=0), federation)
    assert alike(personal(simulation, 6), simulation.server.state)
