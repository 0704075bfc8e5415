"""Many clients in one batched step: the plain computation to 1e-5, the same bits for any number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfed import nets
from perfed.core import registry, rng
from perfed.core.client import Client
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.data import Federation, federate
from perfed.engine import batched, cohort
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.worker import Reply, Task
from perfed.errors import ConfigError, StoreError, UpdateError
from perfed.methods.fedavg import FedAvg
from perfed.nets.net import Net
from tests.conftest import small_net

FITTING: dict[str, dict[str, Any]] = {
    "anti": {"unfreeze": (0, 2), "finetune_epochs": 1},
    "fedavg": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "fedbabu": {"finetune_epochs": 1},
    "fedper": {"epochs": 2, "weight_decay": 0.01},
    "fedrep": {"head_epochs": 3, "momentum": 0.5},
    "lgfedavg": {},
    "local": {},
    "vanilla": {"unfreeze": (0, 2), "finetune_epochs": 1},
}


@pytest.fixture(scope="module")
def uneven() -> Federation:
    """Twelve clients of very different sizes, so that some have finished when others have not."""
    return federate("digits", clients=12, split="dirichlet:0.3", seed=1)


def run(name: str, federation: Federation, numerics: Any, net: Net | None = None, **simulation: Any) -> Simulation:
    method = registry.make(name, **{"lr": 0.05, **FITTING.get(name, {})})
    settings = Settings(rounds=3, fraction=0.5, new=False)
    made = Simulation(
        federation, method.build(net or small_net(federation)), method, settings, numerics=numerics, **simulation
    )
    made.run()
    return made


@pytest.mark.parametrize("name", list(FITTING))
def test_a_cohort_computes_what_its_clients_compute(
    name: str, uneven: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cohort, "GROUP_BYTES", 4 * 6000)  # groups of four, and one of two
    a = run(name, uneven, "cohort", directory=tmp_path / "a")
    b = run(name, uneven, "plain", directory=tmp_path / "b")
    for key, tensor in a.server.state.items():
        torch.testing.assert_close(tensor, b.server.state[key], rtol=0, atol=1e-5)
    assert a.ledger.totals() | {"seconds": 0} == b.ledger.totals() | {"seconds": 0}
    assert a.history[-1]["local.mean"] == pytest.approx(b.history[-1]["local.mean"], abs=0.02)
    states = []
    for made in (a, b):
        from perfed.engine.store import Store

        with Store(made.store.directory, made._fingerprint()) as store:
            states.append([store.client(client) for client in range(12)])
    for (since, own), (plain_since, plain) in zip(*states, strict=True):
        assert since == plain_since
        assert own.keys() == plain.keys()
        for key, tensor in own.items():
            torch.testing.assert_close(tensor, plain[key], rtol=0, atol=1e-5)


def test_the_same_bits_for_any_number_of_workers_and_after_a_stop(
    uneven: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cohort, "GROUP_BYTES", 4 * 6000)
    method = registry.make("fedrep", lr=0.05, head_epochs=2)

    def start(**simulation: Any) -> Simulation:
        settings = Settings(rounds=3, fraction=0.5, new=False)
        return Simulation(uneven, small_net(uneven), method, settings, numerics="cohort", **simulation)

    whole = start().run()
    assert whole is not None
    for workers in (2, 3):
        pooled = start(workers=workers).run()
        assert pooled is not None
        assert pooled.state_sha256 == whole.state_sha256
        assert pooled.metrics == whole.metrics
    start(directory=tmp_path).run(stop_after=1)
    resumed = start(directory=tmp_path, workers=2).run()
    assert resumed is not None
    assert resumed.state_sha256 == whole.state_sha256
    with pytest.raises(StoreError, match="another configuration"):
        Simulation(
            uneven,
            small_net(uneven),
            method,
            Settings(rounds=3, fraction=0.5, new=False),
            directory=tmp_path,
            numerics="plain",
        )


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(("name", "where"), [("fedavg", "fc1.weight"), ("fedper", "fc3.weight")])
def test_a_client_with_values_that_are_not_finite_is_left_out_alone(
    name: str, where: str, row: int, uneven: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are in what it sends or in what it keeps, and whoever of the group it is."""
    monkeypatch.setattr(cohort, "GROUP_BYTES", 4 * 6000)
    train, spoilt = cohort.CohortWorker._train_phase, []

    def spoil(self: cohort.CohortWorker, group: cohort.Group, *given: Any) -> None:
        train(self, group, *given)
        if not spoilt:
            spoilt.append(group.tasks[row].client)
            group.weights[where][row].view(-1)[3] = float("inf")

    def refuse(reply: Reply, t: int) -> Reply:
        if t == 1 and reply.client == spoilt[0]:
            (reply.state | reply.private)[where].view(-1)[3] = float("nan")
        return reply

    monkeypatch.setattr(cohort.CohortWorker, "_train_phase", spoil)
    a = run(name, uneven, "cohort")
    b = run(name, uneven, "plain", tamper=refuse)
    assert [(fault["t"], fault["client"]) for fault in a.faults] == [(1, spoilt[0])]
    assert "not finite" in a.faults[0]["reason"]
    assert [(fault["t"], fault["client"]) for fault in b.faults] == [(1, spoilt[0])]
    for key, tensor in a.server.state.items():
        torch.testing.assert_close(tensor, b.server.state[key], rtol=0, atol=1e-5)
    assert a.ledger.totals() | {"seconds": 0} == b.ledger.totals() | {"seconds": 0}


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_a_group_s_mean_is_that_of_its_clients(name: str, uneven: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort, "GROUP_BYTES", 4 * 6000)
    seen: list[int] = []
    one = run(name, uneven, "cohort")
    each = run(name, uneven, "cohort", tamper=lambda reply, t: (seen.append(len(reply.state)), reply)[1])
    assert min(seen) > 0  # who looks at updates sees every client's own
    for key, tensor in one.server.state.items():
        torch.testing.assert_close(tensor, each.server.state[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["fedrep", "fedbabu", "fedavg"])
def test_a_network_that_is_all_head(name: str, uneven: Federation) -> None:
    def net() -> Net:
        torch.manual_seed(0)
        return nets.build("mlp", uneven.input_shape, uneven.num_classes, hidden=[])

    a, b = run(name, uneven, "cohort", net()), run(name, uneven, "plain", net())
    assert a.ledger.totals() | {"seconds": 0} == b.ledger.totals() | {"seconds": 0}
    for key, tensor in a.server.state.items():
        torch.testing.assert_close(tensor, b.server.state[key], rtol=0, atol=1e-5)


@dataclass(frozen=True, kw_only=True)
class Uneven(Method):
    """Clients with an odd number train twice as long."""

    def phases(self, client: Client) -> Sequence[Phase]:
        return [Phase(self.epochs * (1 + client.id % 2), trains=client.net.layers)]


def test_clients_that_train_differently_do_not_train_together(uneven: Federation) -> None:
    found = []
    for numerics in ("cohort", "plain"):
        settings = Settings(rounds=2, new=False)
        made = Simulation(uneven, small_net(uneven), Uneven(lr=0.05), settings, numerics=numerics)  # type: ignore[arg-type]
        made.run()
        found.append(made)
    assert found[0].ledger.samples == found[1].ledger.samples
    for key, tensor in found[0].server.state.items():
        torch.testing.assert_close(tensor, found[1].server.state[key], rtol=0, atol=1e-5)


def test_weights_that_are_used_twice_are_refused(digits: Federation) -> None:
    same = nn.Linear(12, 12)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Sequential(same, nn.ReLU(), same), nn.Linear(12, 10))
    with pytest.raises(ConfigError, match="uses some twice"):
        cohort.refuse(registry.make("fedavg"), nets.wrap(module, "3", digits.input_shape))


def groups(federation: Federation, net: Net, **method: Any) -> list[list[int]]:
    worker = cohort.CohortWorker(federation, net, registry.make("fedavg", **method), 1, 0)
    return worker.jobs([Task("train", client, 1, 0, {}, {}) for client in federation.participants])


def test_groups_depend_on_the_networks_size(uneven: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as large as each other, and an even number of them, in the clients' order."""
    assert groups(uneven, small_net(uneven)) == [list(range(12))]
    monkeypatch.setattr(cohort, "GROUP_BYTES", 1)
    assert groups(uneven, small_net(uneven)) == [[client] for client in range(12)]
    model = 4 * sum(tensor.numel() for tensor in small_net(uneven).module.state_dict().values())
    monkeypatch.setattr(cohort, "GROUP_BYTES", 5 * model)  # three groups would do
    assert groups(uneven, small_net(uneven)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


# The first layer in its dual form

FEW = {"fedavg": {}, "fedper": {"epochs": 3}, "fedrep": {"head_epochs": 2}, "lgfedavg": {}, "local": {"epochs": 2}}


@pytest.fixture(scope="module")
def few() -> Federation:
    """Clients with fewer samples than half of their images' pixels, and not equally many."""
    made = federate("digits", clients=80, split="dirichlet:5", seed=1)
    assert 32 >= max(made.sizes()) > 1.5 * min(made.sizes())
    return made


def wide(federation: Federation) -> Net:
    torch.manual_seed(0)
    return nets.build("mlp", federation.input_shape, federation.num_classes, hidden=[96, 24])


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[batched.Dual]:
    """Those that were computed in their dual form."""
    made: list[batched.Dual] = []

    class Seen(batched.Dual):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("perfed.engine.group.Dual", Seen)
    return made


@pytest.mark.parametrize("name", FEW)
def test_few_samples_stand_for_the_first_layers_weights(
    name: str, few: Federation, layers: list[batched.Dual], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all clients begin with the same weights or each with its own, and whatever trained before."""
    monkeypatch.setitem(FITTING, name, FEW[name])
    a, b = run(name, few, "cohort", wide(few)), run(name, few, "plain", wide(few))
    assert layers
    assert {layer.alike for layer in layers} == {name not in ("local", "lgfedavg", "fedrep")}
    for key, tensor in a.server.state.items():
        torch.testing.assert_close(tensor, b.server.state[key], rtol=0, atol=1e-5)
    assert a.history[-1]["local.loss"] == pytest.approx(b.history[-1]["local.loss"], abs=1e-4)
    assert a.ledger.totals() | {"seconds": 0} == b.ledger.totals() | {"seconds": 0}


@pytest.mark.parametrize("option", [{"momentum": 0.5}, {"weight_decay": 0.1}])
def test_steps_that_look_back_need_the_weights(
    option: dict[str, float], few: Federation, layers: list[batched.Dual], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FITTING, "fedavg", option)
    run("fedavg", few, "cohort", wide(few))
    assert not layers


def test_clients_with_many_samples_have_weights(uneven: Federation, layers: list[batched.Dual]) -> None:
    run("lgfedavg", uneven, "cohort", wide(uneven))
    assert not layers


def test_groups_are_larger_where_weights_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort, "GROUP_BYTES", 1 << 20)
    fewer = federate("digits", clients=160, split="iid", seed=1)
    net = nets.build("mlp", fewer.input_shape, fewer.num_classes, hidden=[500])
    assert len(groups(fewer, net)) < len(groups(fewer, net, momentum=0.5)) < 160


@dataclass(frozen=True, kw_only=True)
class Twice(FedAvg):
    """All layers in two phases, but not of one client."""

    refused: int = -1

    def phases(self, client: Client) -> Sequence[Phase]:
        if client.id == self.refused:
            raise UpdateError("It cannot train.")
        return [Phase(1, client.net.layers), Phase(1, client.net.layers, lr=0.01)]


@pytest.mark.parametrize("before", [False, True])
def test_modules_that_write_into_their_input(before: bool, few: Federation, layers: list[batched.Dual]) -> None:
    """Whether they come before the first layer or after it, and however often it trains."""

    def net() -> Net:
        torch.manual_seed(0)
        parts = [nn.Flatten(), *[nn.SiLU(inplace=True)] * before, nn.Linear(64, 80), nn.ReLU(inplace=True)]
        return nets.wrap(nn.Sequential(*parts, nn.Linear(80, 10)), str(len(parts)), few.input_shape)

    settings = Settings(rounds=2, fraction=0.5, new=False)
    found = [Simulation(few, net(), Twice(lr=0.05), settings, numerics=kind) for kind in ("cohort", "plain")]
    for made in found:
        made.run()
    assert layers
    for key, tensor in found[0].server.state.items():
        torch.testing.assert_close(tensor, found[1].server.state[key], rtol=0, atol=1e-5)


def test_a_client_that_cannot_train_costs_its_own_update(few: Federation) -> None:
    """Whoever it is: the first one decides about the groups too."""
    first = rng.sample(0, 1, few.participants, 0.5)[0]
    method = Twice(lr=0.05, refused=first)
    settings = Settings(rounds=1, fraction=0.5, new=False)
    made = Simulation(few, wide(few), method, settings, numerics="cohort")
    made.run()
    assert [fault["client"] for fault in made.faults] == [first]


def test_images_must_be_flat(few: Federation) -> None:
    net = nets.wrap(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10)), "3", few.input_shape)
    with pytest.raises(ConfigError, match="flat"):
        run("fedavg", few, "cohort", net)


def test_a_layer_that_clients_keep_is_as_large_as_ever(few: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort, "GROUP_BYTES", 1 << 20)
    net = nets.build("mlp", few.input_shape, few.num_classes, hidden=[500])
    tasks = [Task("train", client, 1, 0, {}, {}) for client in few.participants]
    shared, own = (
        len(cohort.CohortWorker(few, net, registry.make(name), 1, 0).jobs(tasks)) for name in ("fedavg", "lgfedavg")
    )
    assert shared < own


def test_a_client_that_leaves_the_numbers_leaves_alone_in_the_dual_form(
    few: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no client's weights are written out for it."""
    monkeypatch.setattr(batched.Dual, "weights", lambda _: pytest.fail("written out"))
    train, spoilt = cohort.CohortWorker._train_phase, []

    def spoil(self: cohort.CohortWorker, group: cohort.Group, *given: Any) -> None:
        train(self, group, *given)
        if not spoilt:
            spoilt.append(group.tasks[2].client)
            group.duals["fc1.weight"].moved[2, 0, 5] = float("inf")

    def refuse(reply: Reply, t: int) -> Reply:
        if t == 1 and reply.client == spoilt[0]:
            reply.state["fc1.weight"].view(-1)[3] = float("nan")
        return reply

    monkeypatch.setitem(FITTING, "fedavg", {})
    monkeypatch.setattr(cohort.CohortWorker, "_train_phase", spoil)
    a = run("fedavg", few, "cohort", wide(few))
    b = run("fedavg", few, "plain", wide(few), tamper=refuse)
    assert [(fault["t"], fault["client"]) for fault in a.faults] == [(1, spoilt[0])]
    for key, tensor in a.server.state.items():
        torch.testing.assert_close(tensor, b.server.state[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["ditto", "fedprox", "scaffold", "apfl", "pfedme", "cd2pfed", "fedbsd", "perfedavg"])
def test_a_method_with_another_rule_is_refused(name: str, digits: Federation) -> None:
    with pytest.raises(ConfigError, match="cohort") as raised:
        run(name, digits, "cohort")
    assert "executor" in raised.value.cure


def test_a_network_with_convolutions_is_refused(digits: Federation) -> None:
    large = federate("digits", clients=6, split="classes:2", seed=0, min_size=28)
    with pytest.raises(ConfigError, match="Conv2d"):
        run("fedavg", large, "cohort", nets.build("lenet5", large.input_shape, large.num_classes))


def test_dropout_is_refused(digits: Federation) -> None:
    net = nets.build("mlp", digits.input_shape, digits.num_classes, dropout=0.5)
    with pytest.raises(ConfigError, match="Dropout"):
        run("fedavg", digits, "cohort", net)
