"""CD2-pFed: its equations by hand, its limits FedAvg and Local, and what its channels do from round to round."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed import nets
from perfed.core import registry
from perfed.core.client import Client, Update
from perfed.core.plan import Plan, Round
from perfed.core.server import Server
from perfed.data import Federation, federate, from_tensors
from perfed.engine.ledger import Flops
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.worker import Task, Worker
from perfed.errors import NetError
from perfed.methods.cd2pfed import CD2pFed, cyclic
from perfed.nets.net import Net
from perfed.nets.subnets import Subnets
from tests.conftest import small_net

Simulate = Callable[..., Outcome]
PLAIN = {"linear_increment": False, "temporal_average": False, "cyclic_distillation": False}


def worker_for(federation: Federation, net: Net, rounds: int = 10, **hyper: Any) -> Worker:
    method = CD2pFed(**{"lr": 0.1, **hyper})
    return Worker(federation, method.build(net), method, rounds, seed=0)


def client_of(worker: Worker, t: int) -> Client:
    """Client 0 in its first round."""
    return worker.newcomer(0, t)


class Normed(nn.Module):
    """A residual block with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.inner(x))
        return self.head(self.drop(x).view(x.size(0), -1))


def normed_net() -> Net:
    torch.manual_seed(0)
    return nets.wrap(Normed(), "head", (1, 8, 8))


# Equations by hand


def test_ratio_and_smoothing_by_hand() -> None:
    method = CD2pFed()
    assert (method.p, method.lam, method.beta, method.t0) == (0.5, 1.0, 0.5, 0.1), "the paper's values"
    assert [method.ratio(Round(t, 50)) for t in (0, 1, 25, 50)] == [0, 0.01, 0.25, 0.5]
    assert CD2pFed(linear_increment=False).ratio(Round(1, 50)) == 0.5
    found = [method.smoothing(Round(t, 50)) for t in (1, 2, 5, 6, 50)]
    assert found == pytest.approx([0.5 * math.exp(-3.2), 0.5 * math.exp(-1.8), 0.5, 0.5, 0.5])
    assert found[0] == pytest.approx(0.0203811)
    assert CD2pFed(t0=0.0).smoothing(Round(1, 50)) == 0.5


def test_cyclic_distillation_by_hand() -> None:
    private = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    shared = torch.tensor([[0.25, 0.75]]).log().requires_grad_()
    forth = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    back = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    value = cyclic(private, shared)
    assert float(value.detach()) == pytest.approx((forth + back) / 2)
    value.backward()  # type: ignore[no-untyped-call]
    assert private.grad is not None
    assert shared.grad is not None
    assert float(private.grad.abs().sum()) > 0.01, "gradients go both ways"
    assert float(shared.grad.abs().sum()) > 0.01
    rows = torch.randn(7, 4), torch.randn(7, 4)
    logs = [row.log_softmax(1) for row in rows]
    both = [F.kl_div(logs[i], logs[1 - i], log_target=True, reduction="batchmean") for i in (0, 1)]
    assert torch.allclose(cyclic(*rows), (both[0] + both[1]) / 2)
    assert float(cyclic(rows[0], rows[0])) == 0


def test_one_local_round_by_hand(digits: Federation) -> None:
    """One step on the whole data of a client: CE + lambda CD, then the temporal average of what is private."""
    worker = worker_for(digits, small_net(digits), rounds=20, batch_size=10_000, lam=0.7, beta=0.4)
    client = client_of(worker, t=20)
    reference = client.net.clone()
    x, y = client.data.train.x, client.data.train.y
    worker.method.train(client)

    # hidden layers of 16 and 12 units at p = 0.5
    first, second, head = (reference.module.get_submodule(name) for name in ("fc1", "fc2", "fc3"))

    def predict(a: slice, b: slice) -> Tensor:
        hidden = F.relu(F.linear(x.flatten(1), first.weight[a], first.bias[a]))
        hidden = F.relu(F.linear(hidden, second.weight[b, a], second.bias[b]))
        return F.linear(hidden, head.weight[:, b], head.bias)

    full, private, shared = (
        predict(slice(None), slice(None)),
        predict(slice(8, None), slice(6, None)),
        predict(slice(8), slice(6)),
    )
    log_L, log_G = private.log_softmax(1), shared.log_softmax(1)
    forth = (log_L.exp() * (log_L - log_G)).sum(1).mean()
    back = (log_G.exp() * (log_G - log_L)).sum(1).mean()
    loss = F.cross_entropy(full, y) + 0.7 * 0.5 * (forth + back)
    loss.backward()  # type: ignore[no-untyped-call]
    for name, old in reference.module.named_parameters():
        assert old.grad is not None
        want = old.detach() - 0.1 * old.grad
        kept = worker.plan.private(20)[name]
        averaged = 0.4 * want + 0.6 * old.detach()
        want = torch.where(torch.as_tensor(kept), averaged, want)
        assert torch.allclose(client.net.module.get_parameter(name), want, atol=1e-6), name


def test_averaging_per_batch_and_per_epoch(digits: Federation) -> None:
    def after(**hyper: Any) -> dict[str, Tensor]:
        worker = worker_for(digits, small_net(digits), **{"p": 1.0, "linear_increment": False, **hyper})
        client = client_of(worker, t=10)
        worker.method.train(client)
        return client.weights()

    def by_hand(*, each_batch: bool) -> dict[str, Tensor]:
        """SGD at p = 1, where everything is private and nothing is distilled."""
        worker = worker_for(digits, small_net(digits), **PLAIN, p=1.0)
        client = client_of(worker, t=10)
        optimiser = torch.optim.SGD(client.net.module.parameters(), lr=0.1)
        old = client.weights()
        source = client.generator("fit/0")
        for _ in range(2):
            order = torch.randperm(client.size, generator=source)
            for index in order.split(10):
                optimiser.zero_grad()
                F.cross_entropy(client.net(client.data.train.x[index]), client.data.train.y[index]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                if each_batch:
                    old = {name: 0.5 * new + 0.5 * old[name] for name, new in client.weights().items()}
                    client.load(old)
            if not each_batch:
                old = {name: 0.5 * new + 0.5 * old[name] for name, new in client.weights().items()}
                client.load(old)
        return old

    for every in ("epoch", "batch"):
        found = after(average_every=every, epochs=2)
        want = by_hand(each_batch=every == "batch")
        assert all(torch.allclose(found[name], want[name], atol=1e-5) for name in want), every
    assert _differ(by_hand(each_batch=True), by_hand(each_batch=False))
    assert not _differ(after(batch_size=10_000), after(batch_size=10_000, average_every="batch")), "one batch an epoch"


def test_the_average_is_of_private_weights_alone(digits: Federation) -> None:
    found = {}
    for average in (True, False):
        worker = worker_for(digits, normed_net(), temporal_average=average, batch_size=10_000)
        client = client_of(worker, t=10)
        worker.method.train(client)
        found[average] = client.weights()
    masks = worker.plan.private(10)
    for name, tensor in found[True].items():
        kept = torch.as_tensor(masks[name]).expand(tensor.shape)
        same = found[False][name] == tensor
        assert bool(same[~kept].all()), f"{name}: shared channels are not averaged"
        if "running" in name:
            assert bool(same.all()), "statistics are not weights"
    assert not bool((found[True]["stem.weight"] == found[False]["stem.weight"]).all())


# Limits


@pytest.mark.parametrize("increment", [True, False])
@pytest.mark.parametrize("net", ["mlp", "normed"])
def test_p_0_is_fedavg(simulate: Simulate, net: str, increment: bool) -> None:
    made = normed_net if net == "normed" else lambda: "mlp"
    ours = simulate("cd2pfed", net=made(), p=0.0, linear_increment=increment)
    fedavg = simulate("fedavg", net=made())
    assert ours.state_sha256 == fedavg.state_sha256
    assert ours.metrics == fedavg.metrics
    assert ours.cost["bytes_up"] == fedavg.cost["bytes_up"]
    assert ours.cost["flops"] == fedavg.cost["flops"]


@pytest.mark.parametrize("net", ["mlp", "normed"])
@pytest.mark.parametrize("off", [{"temporal_average": False}, {"beta": 1.0}])
def test_p_1_fixed_is_local(simulate: Simulate, net: str, off: dict[str, Any]) -> None:
    made = normed_net if net == "normed" else lambda: "mlp"
    ours = simulate("cd2pfed", net=made(), p=1.0, linear_increment=False, **off)
    local = simulate("local", net=made())
    assert ours.state_sha256 == local.state_sha256
    assert ours.metrics == local.metrics
    assert ours.cost["bytes_up"] == ours.cost["bytes_down"] == 0


def test_beta_1_is_no_temporal_average(simulate: Simulate) -> None:
    settings = {"rounds": 12, "eval_every": 12}
    runs = [simulate("cd2pfed", settings=settings, **hyper) for hyper in ({"beta": 1.0}, {"temporal_average": False})]
    assert runs[0].state_sha256 == runs[1].state_sha256
    assert simulate("cd2pfed", settings=settings).state_sha256 != runs[0].state_sha256


def test_lambda_0_is_no_distillation(digits: Federation) -> None:
    found = []
    for hyper in ({"lam": 0.0}, {"cyclic_distillation": False}, {}):
        worker = worker_for(digits, small_net(digits), **hyper)
        client = client_of(worker, t=10)
        worker.method.train(client)
        found.append(client.weights())
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])
    assert _differ(found[1], found[2])


def test_every_switch_changes_the_outcome(simulate: Simulate) -> None:
    switches = [{}, *({name: False} for name in PLAIN), PLAIN]
    assert len({simulate("cd2pfed", **off).state_sha256 for off in switches}) == len(switches)


def test_no_distillation_while_a_sub_network_is_empty() -> None:
    larger = federate("digits", clients=6, split="classes:2", seed=0, min_size=28)
    worker = worker_for(larger, nets.build("lenet5", (1, 28, 28), 10), rounds=50)
    method = worker.method
    for t, distils in ((1, False), (16, False), (17, True), (50, True)):  # six channels: p_t = 1/6 is round 16.7
        client = client_of(worker, t)
        loss = method.phases(client)[0].loss
        assert (loss != method.loss) == distils


# From round to round


@pytest.mark.parametrize("name", ["normed", "conv3"])
def test_a_newly_private_channel_starts_from_what_the_server_sent_last(
    digits: Federation, tmp_path: Path, name: str
) -> None:
    method = CD2pFed(lr=0.1)
    net = normed_net() if name == "normed" else small_net(digits, "conv3", hidden=8)
    simulation = Simulation(digits, method.build(net), method, Settings(rounds=6, fraction=0.5), directory=tmp_path)
    gaps = 0
    for t in range(1, 7):
        for number in range(6):
            since, kept = simulation.store.client(number)
            task = simulation._task("train", number, t)
            held = simulation.worker.client(task).weights()
            own = simulation.plan.private(since)
            fresh = 0
            for name, value in held.items():
                was = torch.as_tensor(own[name]).expand(value.shape) if since else torch.zeros_like(value, dtype=bool)
                now = torch.as_tensor(simulation.plan.private(t)[name]).expand(value.shape)
                assert torch.equal(value[~was], simulation.server.state[name][~was]), "what was shared comes fresh"
                if name in kept:
                    assert torch.equal(value[was], kept[name].flatten()), "what was private stays"
                fresh += int((now & ~was).sum())
            gaps += bool(since) and t - since > 1 and fresh > 0
        simulation.step(t)
    simulation.close()
    assert gaps, "no client that missed rounds was tried"


def test_the_upload_shrinks_as_p_grows(digits: Federation, tmp_path: Path) -> None:
    method = CD2pFed(lr=0.1, p=1.0)
    simulation = Simulation(digits, method.build(small_net(digits)), method, Settings(rounds=8), directory=tmp_path)
    for t in range(1, 9):
        simulation.step(t)
    sizes = [{entry["up"] for entry in record["clients"].values()} for record in simulation.store.records()]
    simulation.close()
    assert all(len(size) == 1 for size in sizes)
    ups = [size.pop() for size in sizes]
    assert ups == sorted(set(ups), reverse=True), "less in every round"
    assert ups[-1] == 0, "p = 1 in the last round"


def test_the_server_averages_shared_channels_by_size(digits: Federation) -> None:
    method = CD2pFed(p=0.5, linear_increment=False)
    plan = Plan(method, small_net(digits), rounds=4)
    server = Server(dict(plan.initial), plan, num_clients=3)
    updates = []
    for number, size in ((0, 1.0), (1, 2.0), (2, 5.0)):
        state = {
            name: torch.full_like(v, float(number)) for name, v in plan.pick(plan.initial, plan.travels(1)).items()
        }
        updates.append(Update(number, state, size))
    after = method.combine(server, updates, Round(1, 4))
    mean = (0 * 1 + 1 * 2 + 2 * 5) / 8
    for name, value in after.items():
        kept = torch.as_tensor(plan.private(1)[name]).expand(value.shape)
        assert bool((value[~kept] == mean).all())
        assert torch.equal(value[kept], plan.initial[name][kept]), "the server knows no private channel"


def test_stages_follow_the_private_channels(digits: Federation) -> None:
    method = CD2pFed()
    assert len({method.stage(Round(t, 50)) for t in range(1, 51)}) == 50
    assert CD2pFed(cyclic_distillation=False).stage(Round(1, 50)) == CD2pFed(cyclic_distillation=False).stage(
        Round(9, 50)
    )


# Networks


def test_the_sub_networks_are_cheap(digits: Federation) -> None:
    """By true FLOPs: half of every layer but the first, whose output the sub-networks share with the whole network."""
    shape = federate("digits", clients=2, split="iid", seed=0, min_size=32)

    def flops(name: str, **hyper: Any) -> int:
        method = registry.make(name, **hyper)
        net = method.build(nets.build("lenet5", shape.input_shape, 10))
        return Flops(Worker(shape, net, method, 50, 0)).of(Task("train", 0, 50, 0, {}, {}))

    assert 1.3 < flops("cd2pfed") / flops("fedavg") < 1.45


def test_a_round_of_a_residual_network() -> None:
    shape = federate("digits", clients=2, split="iid", seed=0, min_size=8)
    method = CD2pFed(batch_size=64, linear_increment=False)
    net = method.build(nets.build("resnet18", shape.input_shape, 10, width=0.07))
    simulation = Simulation(shape, net, method, Settings(rounds=1, new=False))
    before = dict(simulation.server.state)
    outcome = simulation.run()
    assert outcome is not None
    changed = {name for name, value in simulation.server.state.items() if not torch.equal(value, before[name])}
    assert changed == set(before)
    assert Subnets(net, 0.5)(torch.zeros(2, *shape.input_shape))[1].shape == (2, 10)


def test_a_network_that_cannot_be_split_is_refused_before_the_first_round() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3))
    with pytest.raises(NetError, match="'1' \\(GroupNorm\\)"):
        CD2pFed().build(nets.wrap(model, "3", (1, 8, 8)))


def test_fine_tuning_and_joining(simulate: Simulate) -> None:
    unseen = federate("digits", clients=6, split="classes:2", seed=0, unseen=1)
    outcome = simulate("cd2pfed+ft", federation=unseen, finetune="head", finetune_epochs=1, join_epochs=5)
    assert outcome.metrics["unseen.mean"] > 0.6
    assert "local.before.mean" in outcome.metrics


def _differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return any(not torch.allclose(a[name], b[name], atol=1e-4) for name in a)


@pytest.mark.parametrize(("name", "width"), [("cd2pfed", 0.13), ("cd2pfed", 0.5), ("fedavg", 0.13)])
def test_narrow_residual_networks_train_on_large_images(name: str, width: float) -> None:
    """A strided 1x1 convolution of few channels ended the process in the channels-last layout."""
    x = torch.randint(0, 256, (12, 3, 64, 64), dtype=torch.uint8)
    federation = federate(from_tensors(x, torch.arange(12) % 3), clients=2, split="iid", val_fraction=0.0)
    method = registry.make(name, batch_size=4, lr=0.01)
    net = method.build(nets.build("resnet18", federation.input_shape, 3, width=width))
    code = multiprocessing.get_context("fork").Process(
        target=lambda: method.train(Worker(federation, net, method, 2, 0).newcomer(0, 2))
    )
    code.start()
    code.join()
    assert code.exitcode == 0
