"""Gradients that are written out: to the bit those of autograd, wherever all layers are known, and nowhere else.

Where compiled code computes all of a network, it is left out here and tested on its own (`test_nets_straight.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfed
from perfed import nets
from perfed.core import registry
from perfed.core.fit import Phase, fit, is_plain, set_trainable
from perfed.core.method import Method
from perfed.core.proximal import parameters, proximal
from perfed.core.sgd import Sgd
from perfed.core.twin import twin
from perfed.data import Federation
from perfed.engine.flopcount import CountFlops
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.methods.pfedme import PFedMe
from perfed.nets import Net, fused
from perfed.nets.written import Written, written
from tests.conftest import small_net
from tests.runs import at_work, whole

NETS: list[tuple[str, tuple[int, int, int], bool]] = [
    ("mlp", (1, 8, 8), False),
    ("lenet5", (1, 28, 28), False),
    ("lenet5", (3, 32, 32), True),
    ("cnn", (1, 28, 28), True),
    ("cnn", (3, 32, 32), False),
    ("cifarnet", (3, 32, 32), False),
    ("conv3", (1, 16, 16), True),
]


def made(name: str, shape: tuple[int, int, int], compiled: bool = False, **words: Any) -> Net:
    torch.manual_seed(0)
    net = nets.build(name, shape, 10, **words)
    net.compiled = compiled
    return net


def samples(net: Net, n: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(n, *net.input_shape)
    return (x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x), torch.arange(n) % 10


def differentiated(net: Net, x: Tensor, y: Tensor, cut: int, trained: Sequence[nn.Parameter]) -> list[Tensor | None]:
    for parameter in trained:
        parameter.grad = None
    F.cross_entropy(net.run_suffix(x, cut) if cut else net(x), y).backward()
    return [parameter.grad for parameter in trained]


def known(net: Net, cut: int, trained: Sequence[nn.Parameter]) -> Written:
    found = written(net, cut, trained)
    assert found is not None
    found.quick = None
    return found


@pytest.mark.parametrize(("name", "shape", "compiled"), NETS)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("n", [7, 1])
def test_all_gradients_are_those_of_autograd(
    name: str, shape: tuple[int, int, int], compiled: bool, layout: torch.memory_format, n: int
) -> None:
    net = made(name, shape, compiled)
    net.module.to(memory_format=layout)
    trained = set_trainable(net, net.layers)
    x, y = samples(net, n)
    expected = differentiated(net, x, y, 0, trained)
    found = known(net, 0, trained)(x, y)
    for mine, right, parameter in zip(found, expected, trained, strict=True):
        assert right is not None
        assert torch.equal(mine, right)
        assert mine.stride() == parameter.stride()
        assert not mine.requires_grad


@pytest.mark.parametrize(("name", "shape", "compiled"), NETS)
def test_frozen_layers_and_cuts(name: str, shape: tuple[int, int, int], compiled: bool) -> None:
    net = made(name, shape, compiled)
    x, y = samples(net)
    for trains in (net.layers[:1], net.layers[-1:], net.layers[::2], net.layers[1:]):
        trained = set_trainable(net, trains)
        for cut in (0, net.cut(trains)):
            z = net.run_prefix(x, cut).detach()
            expected = differentiated(net, z, y, cut, trained)
            for mine, right in zip(known(net, cut, trained)(z, y), expected, strict=True):
                assert right is not None
                assert torch.equal(mine, right)


def sequence(*modules: nn.Module) -> Net:
    torch.manual_seed(0)
    net = perfed.wrap(nn.Sequential(*modules), str(len(modules) - 1), (2, 9, 9))
    assert net.num_classes == 10
    return net


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


ODD: dict[str, list[nn.Module]] = {
    "dropout": [nn.Dropout(0.5), nn.Flatten()],
    "batch norm": [nn.BatchNorm2d(4), nn.Flatten()],
    "activation": [nn.Tanh(), nn.Flatten()],
    "no bias": [nn.Flatten(), nn.Linear(196, 196, bias=False)],
    "subclass": [nn.Flatten(), Doubled(196, 196)],
    "flatten": [nn.Flatten(1, 2), nn.Flatten()],
    "groups": [nn.Conv2d(4, 4, 1, groups=4), nn.Flatten()],
    "around the edge": [nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.Flatten()],
    "padding by name": [nn.Conv2d(4, 4, 3, padding="same"), nn.Flatten()],
}


def unknown(kind: str) -> Net:
    conv, head = nn.Conv2d(2, 4, 3), nn.Linear(196, 10)
    net = sequence(conv, nn.ReLU(), *ODD.get(kind, [nn.Flatten()]), head)
    outer, nothing = net.module, lambda *_: None
    match kind:
        case "half bits":
            net.precision = torch.bfloat16
        case "tied":
            one = nn.Linear(162, 162)
            module = nn.Sequential(nn.Flatten(), one, nn.ReLU(), one, nn.Linear(162, 10))
            return Net(module, {"body": ["0", "1", "2", "3"], "head": ["4"]}, (2, 9, 9), 10)
        case "hook":
            conv.register_forward_hook(nothing)
        case "pre-hook":
            head.register_forward_pre_hook(nothing)
        case "backward hook":
            head.register_full_backward_hook(nothing)
        case "backward pre-hook":
            head.register_full_backward_pre_hook(nothing)
        case "outer hook":
            outer.register_forward_hook(nothing)
        case "outer backward pre-hook":
            outer.register_full_backward_pre_hook(nothing)
        case "other forward":
            forward = conv.forward
            conv.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
        case "gradient hook":
            conv.weight.register_hook(lambda g: g / 2)
        case "gradient post-hook":
            conv.weight.register_post_accumulate_grad_hook(nothing)
        case "transposed":
            head.weight.data = head.weight.data.t().contiguous().t()
    return net


@pytest.mark.parametrize(
    "kind",
    [
        *ODD,
        *("half bits", "tied", "hook", "pre-hook", "backward hook", "backward pre-hook", "outer hook", "other forward"),
        *("outer backward pre-hook", "gradient hook", "gradient post-hook", "transposed"),
    ],
)
def test_what_is_not_known_is_left_to_autograd(kind: str) -> None:
    net = unknown(kind)
    assert written(net, 0, set_trainable(net, net.layers)) is None


def test_what_is_known_without_all_that() -> None:
    net = unknown("nothing")
    assert written(net, 0, trained := set_trainable(net, net.layers)) is not None
    assert written(net, 0, trained[1:]) is None
    assert written(net, 0, trained[::-1]) is None
    assert written(net, 0, []) is None
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert written(net, 0, trained) is None


def test_compiled_steps_of_which_one_is_hooked_are_left_to_autograd() -> None:
    net = made("lenet5", (1, 28, 28), compiled=True)
    trained = set_trainable(net, net.layers)
    assert written(net, 0, trained) is not None
    net.module.get_submodule("relu1").register_forward_hook(lambda *_: None)
    assert written(net, 0, trained) is None


def test_rows_are_what_a_linear_layer_in_front_takes(digits: Federation) -> None:
    net = perfed.wrap(nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(40, 10)), "3", (1, 8, 8))
    found = known(net, 0, set_trainable(net, net.layers))
    assert not found.takes(torch.zeros(2, 1, 8, 8))
    assert found.takes(torch.zeros(2, 8))
    behind = sequence(nn.Flatten(), nn.Linear(162, 10))
    assert known(behind, 0, set_trainable(behind, behind.layers)).takes(torch.zeros(2, 2, 9, 9))
    Simulation(digits, net, registry.make("fedavg"), Settings(rounds=1, fraction=1.0)).step(1)


def test_a_module_whose_inside_is_not_known_is_left_to_autograd() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(72, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(2 * self.conv(x).flatten(1))  # type: ignore[no-any-return]

    net = perfed.wrap(Odd(), "fc", (1, 8, 8))
    assert written(net, 0, set_trainable(net, net.layers)) is None
    x = torch.randn(3, 72)
    trained = set_trainable(net, net.layers[-1:])
    assert torch.equal(
        known(net, 1, trained)(x, torch.arange(3))[0], differentiated(net, x, torch.arange(3), 1, trained)[0]
    )


def test_other_ways_of_known_layers() -> None:
    odd = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.MaxPool2d(3, 2, 1), nn.Identity()
    long = nn.Conv2d(2, 4, (3, 1), dilation=2), nn.ReLU(), nn.MaxPool2d((2, 3), ceil_mode=True)
    for modules in ((*odd, nn.Flatten(), nn.Linear(36, 10)), (*long, nn.Flatten(), nn.Linear(36, 10))):
        net = sequence(*modules)
        trained, (x, y) = set_trainable(net, net.layers), samples(net)
        for mine, right in zip(known(net, 0, trained)(x, y), differentiated(net, x, y, 0, trained), strict=True):
            assert right is not None
            assert torch.equal(mine, right)


def test_maps_that_compiled_kernels_do_not_take_are_torchs_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    net = made("lenet5", (1, 28, 28), compiled=True)
    net.module.double()
    monkeypatch.setattr(fused, "by_hand", None)
    trained, (x, y) = set_trainable(net, net.layers), samples(net)
    found = known(net, 0, trained)(x.double(), y)
    for mine, right in zip(found, differentiated(net, x.double(), y, 0, trained), strict=True):
        assert right is not None
        assert torch.equal(mine, right)


def test_nothing_is_left_behind_and_flops_are_the_same() -> None:
    net = made("lenet5", (1, 28, 28))
    trained, (x, y) = set_trainable(net, net.layers), samples(net)
    with CountFlops() as plain:
        differentiated(net, x, y, 0, trained)
    for parameter in trained:
        parameter.grad = None
    with CountFlops() as counted:
        known(net, 0, trained)(x, y)
    assert counted.total == plain.total > 0
    assert all(parameter.grad is None for parameter in trained)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "pfedme", "perfedavg", "lgfedavg"])
def test_runs_end_in_the_same_bits_with_and_without(
    name: str, digits: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    compute = Written.__call__

    def counted(self: Written, x: Tensor, y: Tensor) -> list[Tensor]:
        calls.append(len(x))
        return compute(self, x, y)

    monkeypatch.setattr(Written, "__call__", counted)
    ends = []
    for off in (False, True):
        if off:
            assert calls
            calls.clear()
            monkeypatch.setattr("perfed.core.fit.written", lambda *_: None)
        method = registry.make(name, lr=0.05, momentum=0.9, weight_decay=0.01)
        net = method.build(small_net(digits))
        simulation = Simulation(digits, net, method, Settings(rounds=2, fraction=1.0, eval_every=99))
        for t in (1, 2):
            simulation.step(t)
        ends.append(simulation.server.state)
    assert not calls
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("net", ["mlp", "batchnorm"])
def test_pfedmes_steps_are_those_on_the_sum_of_both_losses_to_the_bit(net: str, digits: Federation) -> None:
    method = PFedMe(lam=2.3, K=3, weight_decay=0.01)
    client = at_work(method, digits, net=net)
    w, batch = parameters(client.net), whole(client)
    mine = twin(client, client.weights())
    mine.net.module.register_parameter("unused", nn.Parameter(torch.ones(2)))
    w["unused"] = torch.zeros(2)
    plain = twin(replace(client, net=client.net.clone()), client.weights())
    plain.net.module.register_parameter("unused", nn.Parameter(torch.ones(2)))
    sgd = method.plain(client.round).over(list(plain.net.module.parameters()), method.personal_lr)
    for _ in range(3):
        sgd.zero_grad()
        (method.loss(plain, batch) + 2.3 * proximal(plain.net, w)).backward()
        sgd.step()
    method.solve(mine, w, batch)
    right = dict(plain.net.module.named_parameters())
    for name, parameter in mine.net.module.named_parameters():
        assert torch.equal(parameter, right[name])
        assert not torch.equal(parameter, w[name])


def test_a_loss_around_the_plain_one_is_not_taken_for_it() -> None:
    @wraps(Method.loss)
    def threefold(*given: Any) -> Tensor:
        return 3 * Method.loss(*given)

    assert is_plain(Method.loss)
    assert is_plain(registry.make("fedavg").loss)
    assert not is_plain(threefold)


class Clipped(Sgd):
    """Steps on signs."""

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad.sign()
        super().step()


@pytest.mark.parametrize("trains", [slice(None), slice(-1, None)])
def test_other_optimisers_make_their_own_steps(
    trains: slice, digits: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = registry.make("fedavg", lr=0.01, batch_size=10_000)
    client = at_work(method, digits)
    before = client.weights()
    monkeypatch.setattr("perfed.core.fit.Optimiser.over", lambda self, given, lr: Clipped(given, lr=0.01))
    fit(client, [Phase(1, client.net.layers[trains])], method.loss, method.optimiser(client.round))
    moved = {name for name, tensor in client.weights().items() if not torch.equal(tensor, before[name])}
    assert moved == client.net.names(*client.net.layers[trains])
    for name in moved:
        far = (client.weights()[name] - before[name]).abs()
        assert ((far - 0.01).abs() < 1e-6).logical_or(far == 0).all()
