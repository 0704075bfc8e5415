"""SCAFFOLD: variates that are stored, counted by true steps and averaged over all clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from perfed.core.client import Batch, Client
from perfed.core.fit import batches
from perfed.core.method import Method
from perfed.core.registry import make
from perfed.core.state import State, within
from perfed.data import Federation, federate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome
from perfed.engine.worker import Reply
from perfed.methods.fedavg import FedAvg
from perfed.methods.scaffold import Scaffold
from tests.conftest import small_net
from tests.runs import alike, at_work, shaken, stepped

Run = Callable[..., Outcome]


def variates(simulation: Simulation) -> list[State]:
    return [within("c_i", simulation.store.client(i)[1]) for i in range(simulation.federation.num_clients)]


def assert_server_has_the_mean(simulation: Simulation, participants: int) -> None:
    c, held = within("c", simulation.server.state), variates(simulation)
    for name, value in c.items():
        total = sum((c_i[name] for c_i in held if c_i), torch.zeros_like(value))
        torch.testing.assert_close(value, total / participants, rtol=0, atol=1e-6)


def test_one_step_from_zero_variates_is_fedavgs_step(digits: Federation) -> None:
    hyper = {"lr": 0.1, "batch_size": 10_000}
    for i in range(digits.num_clients):
        ours = make("scaffold", **hyper).train(at_work(make("scaffold", **hyper), digits, client=i))
        theirs = make("fedavg", **hyper).train(at_work(make("fedavg", **hyper), digits, client=i))
        assert alike({n: t for n, t in ours.state.items() if "/" not in n}, theirs.state)


def test_the_server_takes_the_plain_mean_of_the_models(digits: Federation) -> None:
    method = make("scaffold", lr=0.05)
    simulation = stepped(method, digits, rounds=1)
    cohort = next(iter(simulation.store.records()))["cohort"]
    assert len({digits.size(i) for i in cohort}) > 1
    models = [make("scaffold", lr=0.05).train(at_work(method, digits, client=i)).state for i in cohort]
    for name in simulation.plan.initial:
        mean = torch.stack([state[name] for state in models]).mean(dim=0)
        torch.testing.assert_close(simulation.server.state[name], mean, rtol=0, atol=1e-6)


def test_the_server_variate_is_the_mean_of_all_clients_also_under_dropout(digits: Federation) -> None:
    """Half of the clients take part, and of these one is refused in every round."""

    def spoil(reply: Reply, t: int) -> Reply:
        if reply.client == cohorts[t - 1][t % 3]:
            return dataclasses.replace(reply, state={k: v * float("nan") for k, v in reply.state.items()})
        return reply

    plain = stepped(make("scaffold", lr=0.05), digits, rounds=6)
    cohorts = [record["cohort"] for record in plain.store.records()]
    for simulation in (plain, stepped(make("scaffold", lr=0.05), digits, rounds=6, tamper=spoil)):
        assert_server_has_the_mean(simulation, digits.num_clients)
        assert any(bool(c_i) for c_i in variates(simulation)), "nothing is stored"
    assert len(simulation.faults) == 6


def test_it_is_the_mean_after_every_round(digits: Federation) -> None:
    simulation = stepped(make("scaffold", lr=0.05), digits, rounds=1)
    before: list[State] = [{}] * digits.num_clients
    for t in range(2, 6):
        simulation.settings = dataclasses.replace(simulation.settings, rounds=5)
        simulation.step(t)
        assert_server_has_the_mean(simulation, digits.num_clients)
        cohort = list(simulation.store.records())[-1]["cohort"]
        now = variates(simulation)
        for i in range(digits.num_clients):
            assert bool(now[i]) or i not in cohort
            if before[i] and i not in cohort:
                assert alike(now[i], before[i])
        before = now


def test_clients_that_never_take_part_do_not_count() -> None:
    federation = federate("digits", clients=8, split="classes:2", seed=0, unseen=2)
    simulation = stepped(make("scaffold", lr=0.05), federation, fraction=1.0)
    assert_server_has_the_mean(simulation, 6)


def test_a_round_by_hand(digits: Federation) -> None:
    """Ragged batches, two epochs, variates that are not zero: y_i, c_i and K against a plain loop."""
    method = make("scaffold", lr=0.05, epochs=2, batch_size=7)
    x = shaken(dict(small_net(digits).module.state_dict()), 1)
    c, c_i = ({n: 0.02 * t for n, t in shaken(x, seed).items()} for seed in (2, 3))
    client = at_work(
        method,
        digits,
        received=x | {f"c/{n}": t for n, t in c.items()},
        private={f"c_i/{n}": t for n, t in c_i.items()},
    )
    data, source = client.data.train, client.generator("fit/0")
    net, K = small_net(digits), 0
    net.module.load_state_dict(x)
    path: list[State] = []
    for _ in range(2):
        for index in batches(len(data), 7, source, whole=False):
            net.module.zero_grad()
            F.cross_entropy(net(data.x[index]), data.y[index]).backward()
            path.append({n: w.grad.clone() for n, w in net.module.named_parameters() if w.grad is not None})
            with torch.no_grad():
                for n, w in net.module.named_parameters():
                    w -= 0.05 * (path[-1][n] - c_i[n] + c[n])
            K += 1
    assert len(data) % 7, "a ragged batch is part of the trial"
    update = method.train(client)
    for n, y in net.module.named_parameters():
        torch.testing.assert_close(update.state[n], y.detach(), rtol=0, atol=1e-6)
        new = c_i[n] - c[n] + (x[n] - y.detach()) / (K * 0.05)
        torch.testing.assert_close(client.memory[f"c_i/{n}"], new, rtol=0, atol=1e-5)
        mean = torch.stack([g[n] for g in path]).mean(dim=0)
        torch.testing.assert_close(client.memory[f"c_i/{n}"], mean, rtol=0, atol=1e-5)
        torch.testing.assert_close(update.state[f"dc/{n}"], new - c_i[n], rtol=0, atol=1e-5)


@dataclass(frozen=True, kw_only=True)
class Slope(Scaffold):
    """The same gradient everywhere: 0.3 for every weight."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return torch.stack([0.3 * w.sum() for w in client.net.module.parameters()]).sum()


@pytest.mark.parametrize("hyper", [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}])
def test_the_variate_is_the_gradient_whatever_the_momentum(hyper: dict[str, float], digits: Federation) -> None:
    method = Slope(lr=0.01, epochs=2, **hyper)  # type: ignore[arg-type]
    client = at_work(method, digits)
    method.train(client)
    for value in within("c_i", client.memory).values():
        torch.testing.assert_close(value, torch.full_like(value, 0.3), rtol=1e-3, atol=0)


def bowl(client: Client, batch: Batch) -> Tensor:
    """a_i / 2 ||w - b_i||^2: every client has another curvature and another optimum."""
    a, b = 1.0 + client.id, 0.1 * client.id
    return torch.stack([a / 2 * (w - b).square().sum() for w in client.net.module.parameters()]).sum()


class _Bowls:
    def loss(self, client: Client, batch: Batch) -> Tensor:
        return bowl(client, batch)


@dataclass(frozen=True, kw_only=True)
class BowlScaffold(_Bowls, Scaffold):
    pass


@dataclass(frozen=True, kw_only=True)
class BowlFedAvg(_Bowls, FedAvg):
    pass


def test_it_reaches_the_common_optimum_that_fedavg_misses(digits: Federation) -> None:
    n = digits.num_clients
    optimum = sum((1 + i) * 0.1 * i for i in range(n)) / sum(1 + i for i in range(n))

    def error(method: Method) -> float:
        state = stepped(method, digits, rounds=25, fraction=1.0).server.state
        return max(float((t - optimum).abs().max()) for name, t in state.items() if "/" not in name)

    assert error(BowlScaffold(lr=0.05, batch_size=40)) < 1e-3
    assert error(BowlFedAvg(lr=0.05, batch_size=40)) > 0.03


def test_the_servers_step_size(digits: Federation) -> None:
    start = dict(small_net(digits).module.state_dict())
    one, half = (stepped(Scaffold(lr=0.05, eta_g=g), digits, rounds=1).server.state for g in (1.0, 0.5))
    for name, x in start.items():
        torch.testing.assert_close(half[name] - x, 0.5 * (one[name] - x), rtol=0, atol=1e-6)


def test_it_costs_twice_fedavgs_bytes(simulate: Run) -> None:
    ours, theirs = simulate("scaffold").cost, simulate("fedavg").cost
    for way in ("bytes_up", "bytes_down"):
        assert ours[way] == pytest.approx(2 * theirs[way], rel=0.05)


def test_fine_tuning_changes_what_is_scored_and_nothing_else(simulate: Run) -> None:
    plain, tuned = simulate("scaffold"), simulate("scaffold+ft")
    assert tuned.state_sha256 == plain.state_sha256
    assert tuned.metrics["local.before.mean"] == pytest.approx(plain.metrics["local.mean"])
    assert tuned.metrics["local.mean"] > plain.metrics["local.mean"]
