"""Channels of a network: masks by hand, sub-networks against a masked computation, refusals by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed import nets
from perfed.core.state import complement
from perfed.errors import NetError
from perfed.nets.channels import channel_map
from perfed.nets.flow import Channels
from perfed.nets.net import Net
from perfed.nets.subnets import Subnets


class Residual(nn.Module):
    """Convolution, a residual block with BatchNorm, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.inner_norm = nn.BatchNorm2d(4)
        self.wide = nn.Conv2d(4, 10, 3, stride=2)
        self.fc = nn.Linear(10 * 3 * 3, 6)
        self.fc_norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: bool = False) -> Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        out = self.inner_norm(self.inner(x))
        out += x
        x = F.relu(self.wide(F.relu(out)))
        if scale:
            x = x * 2
        return self.head(torch.relu(self.fc_norm(self.fc(x.view(x.size(0), -1)))))


class Plain(nn.Module):
    """Two convolutions and a linear head with a given way from one to the other."""

    def __init__(
        self, bridge: Callable[[Tensor], Tensor], inputs: int = 4 * 4, between: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.between = between or nn.ReLU()
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(inputs, 3)
        self.bridge = bridge

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x))
        return self.head(self.bridge(F.max_pool2d(self.second(x).relu(), 4)))


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def wrapped(model: nn.Module, size: int = 8) -> Net:
    return nets.wrap(model, "head", (1, size, size))


@pytest.fixture
def residual() -> Net:
    torch.manual_seed(0)
    return wrapped(Residual().double())


def private_index(net: Net, name: str, p: float) -> list[list[int]]:
    tensor = net.module.state_dict()[name]
    mask = channel_map(net).mask(name, tensor, p)
    return mask.nonzero().tolist() if isinstance(mask, Tensor) else [[int(mask)]]


def test_masks_of_lenet_by_hand() -> None:
    net = nets.build("lenet5", (3, 32, 32), 10)
    chart = channel_map(net)
    state = net.module.state_dict()
    rows = {"conv1": (6, 3), "conv2": (16, 8), "fc1": (120, 60), "fc2": (84, 42)}
    for layer, (all_channels, private) in rows.items():
        for leaf in ("weight", "bias"):
            tensor = state[f"{layer}.{leaf}"]
            want = torch.zeros(tensor.shape, dtype=torch.bool)
            want[all_channels - private :] = True
            assert torch.equal(chart.mask(f"{layer}.{leaf}", tensor, 0.5), want)
            view = chart.private(f"{layer}.{leaf}", tensor, 0.5)
            assert view is not None
            assert torch.equal(view.flatten(), tensor[want])
            assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), "must be a view"
    head = torch.zeros(10, 84, dtype=torch.bool)
    head[:, 42:] = True
    assert torch.equal(chart.mask("fc3.weight", state["fc3.weight"], 0.5), head)
    assert chart.mask("fc3.bias", state["fc3.bias"], 0.5) is False
    assert chart.axes["fc1.weight"] == (Channels(120), Channels(16, 25)), "a channel owns its 5 x 5 block of inputs"
    assert chart.axes["conv1.weight"] == (Channels(6), None), "both halves see the whole input"
    assert all(chart.mask(name, tensor, 1.0) is True for name, tensor in state.items())
    assert all(chart.mask(name, tensor, 0.0) is False for name, tensor in state.items())


def test_masks_of_a_residual_network_by_hand(residual: Net) -> None:
    chart = channel_map(residual)
    for name in ("stem.weight", "stem.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"):
        assert {index[0] for index in private_index(residual, name, 0.3)} == {3}
        assert {index[0] for index in private_index(residual, name, 0.5)} == {2, 3}
    for name in ("inner.weight", "inner_norm.weight", "inner_norm.running_var"):
        assert {index[0] for index in private_index(residual, name, 0.5)} == {2, 3}, "both sides of + agree"
    assert {index[0] for index in private_index(residual, "wide.weight", 0.5)} == {5, 6, 7, 8, 9}
    assert {index[0] for index in private_index(residual, "fc_norm.running_mean", 0.5)} == {3, 4, 5}
    assert {index[1] for index in private_index(residual, "head.weight", 0.5)} == {3, 4, 5}
    assert {index[0] for index in private_index(residual, "head.weight", 0.5)} == {0, 1, 2}, "of every class"
    counter = residual.module.state_dict()["norm.num_batches_tracked"]
    assert chart.mask("norm.num_batches_tracked", counter, 0.5) is False
    assert chart.mask("norm.num_batches_tracked", counter, 1.0) is True
    assert chart.axes["fc.weight"] == (Channels(6), Channels(10, 9))
    assert chart.divides(0.5)
    assert not chart.divides(0.2), "four channels give no private one"
    assert not chart.divides(0.0)
    assert not chart.divides(1.0)


def test_batchnorm_after_a_flatten_follows_the_blocks() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 2))
    net = nets.wrap(model, "3", (1, 4, 4))
    assert private_index(net, "2.running_mean", 0.5) == [[i] for i in range(8, 16)]
    assert {index[1] for index in private_index(net, "3.weight", 0.25)} == {12, 13, 14, 15}


@pytest.mark.parametrize(("p", "count", "private"), [(0.29, 100, 29), (0.7, 10, 7), (0.5, 5, 2), (0.999, 3, 2)])
def test_the_number_of_private_channels_is_the_floor(p: float, count: int, private: int) -> None:
    assert Channels(count).private(p) == private


def test_a_mask_takes_no_memory_of_its_tensor() -> None:
    net = nets.build("mlp", (1, 28, 28), 10)
    weight = net.module.state_dict()["fc1.weight"]
    mask = channel_map(net).mask("fc1.weight", weight, 0.5)
    others = complement(mask)
    assert isinstance(mask, Tensor)
    assert isinstance(others, Tensor)
    assert torch.equal(others, ~mask)
    assert mask.untyped_storage().nbytes() == others.untyped_storage().nbytes() == 200


@contextmanager
def only(net: Net, p: float, *, private: bool) -> Iterator[None]:
    """Inside, the outputs of all hidden layers are zero in the other sub-network's channels."""
    hooks = []
    for module in list(net.module.modules()):
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm1d | nn.BatchNorm2d) and not _is_head(net, module):
            hooks.append(module.register_forward_hook(_masking(p, private=private)))
    yield
    for hook in hooks:
        hook.remove()


def _is_head(net: Net, module: nn.Module) -> bool:
    return module is net.module.get_submodule(net.head_path)


def _masking(p: float, *, private: bool) -> Callable[..., Tensor]:
    def mask(module: nn.Module, args: object, output: Tensor) -> Tensor:
        channels = output.shape[1]
        belongs = torch.arange(channels) >= channels - int(p * channels)
        return output * (belongs == private).view(-1, *(1,) * (output.dim() - 2))

    return mask


def objective(y: Tensor, private: Tensor, shared: Tensor, labels: Tensor) -> Tensor:
    difference = (private.softmax(1) - shared.softmax(1)).square().sum()
    return F.cross_entropy(y, labels) + difference + F.cross_entropy(private, labels) + shared.square().mean()


def compare_with_masking(net: Net, p: float, tolerance: float) -> None:
    module = net.module.train()
    like = next(module.parameters())
    x = torch.randn(6, *net.input_shape, dtype=like.dtype)
    labels = torch.arange(6) % net.num_classes
    fast = Subnets(net, p)(x)
    objective(*fast, labels).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    statistics = {name: buffer.clone() for name, buffer in module.named_buffers()}

    naive = net.clone()
    naive.module.zero_grad()
    y = naive(x)
    with only(naive, p, private=True):
        private = naive(x)
    with only(naive, p, private=False):
        shared = naive(x)
    objective(y, private, shared, labels).backward()
    for ours, theirs in zip(fast, (y, private, shared), strict=True):
        assert torch.allclose(ours, theirs, atol=tolerance, rtol=tolerance)
    for name, parameter in naive.module.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad, atol=tolerance, rtol=tolerance), name
    assert all(int(value) == 1 for name, value in statistics.items() if name.endswith("num_batches_tracked"))


@pytest.mark.parametrize("p", [0.3, 0.5, 0.75])
def test_sub_networks_equal_the_masked_network(residual: Net, p: float) -> None:
    compare_with_masking(residual, p, 1e-10)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("lenet5", (3, 32, 32), {}),
        ("cnn", (1, 28, 28), {}),
        ("cifarnet", (3, 32, 32), {}),
        ("conv3", (1, 8, 8), {}),
        ("mlp", (1, 8, 8), {"hidden": [8, 6]}),
        ("digitsnet", (1, 8, 8), {"hidden": [32, 16]}),
        ("alexnet", (3, 32, 32), {"batchnorm": True, "hidden": [32, 16]}),
        ("resnet18", (3, 8, 8), {"width": 0.1}),
        ("resnet32", (3, 8, 8), {"width": 0.5}),
        ("resnet34", (3, 8, 8), {"width": 0.1}),
    ],
)
def test_every_network_of_the_package_can_be_split(
    name: str, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    net = nets.build(name, shape, 4, **options)
    net.module.double()
    compare_with_masking(net, 0.5, 1e-8)


def test_single_precision_agrees_to_1e_5() -> None:
    torch.manual_seed(0)
    net = nets.build("lenet5", (3, 32, 32), 10)
    compare_with_masking(net, 0.5, 1e-5)


def test_the_whole_network_is_computed_as_it_would_be_alone(residual: Net) -> None:
    other = residual.clone()
    residual.module.train()
    other.module.train()
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    y, _, _ = Subnets(residual, 0.5)(x)
    assert torch.equal(y, other(x))
    for name, buffer in other.module.named_buffers():
        assert torch.equal(buffer, residual.module.get_buffer(name)), "the sub-networks moved the running statistics"


def test_frozen_batchnorm_uses_its_channels_statistics(residual: Net) -> None:
    module = residual.module.train()
    module(torch.randn(9, 1, 8, 8, dtype=torch.float64))
    module.eval()
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    y, private, shared = Subnets(residual, 0.5)(x)
    assert torch.equal(y, residual(x))
    with only(residual, 0.5, private=True):
        assert torch.allclose(private, residual(x))
    with only(residual, 0.5, private=False):
        assert torch.allclose(shared, residual(x))


@pytest.mark.parametrize(
    "bridge",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view(-1, 4 * 2 * 2),
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: x.flatten(1),
        lambda x: torch.flatten(x, 1),
        lambda x: torch.flatten(x, start_dim=1),
        lambda x: nn.functional.leaky_relu(x, 0.1).flatten(start_dim=1) * 0.5,
    ],
)
def test_any_way_to_write_a_flatten(bridge: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    compare_with_masking(wrapped(Plain(bridge).double()), 0.5, 1e-10)


@pytest.mark.parametrize(
    "bridge",
    [
        lambda x: x.mean((2, 3)),
        lambda x: x.mean(dim=[-2, -1]),
        lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
        lambda x: F.avg_pool2d(x, x.size()[2:]).view(-1, 4),
        lambda x: F.adaptive_max_pool2d(x, (1, 1)).squeeze(),
    ],
)
def test_global_pooling(bridge: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    compare_with_masking(wrapped(Plain(bridge, inputs=4).double()), 0.5, 1e-10)


class Shared(Plain):
    """One convolution, run twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.between(self.second(self.first(x))))
        return F.log_softmax(self.head(F.max_pool2d(x.relu(), 4).flatten(1)), dim=1)


def test_a_module_that_runs_twice_and_a_softmax_behind_the_head() -> None:
    torch.manual_seed(0)
    compare_with_masking(wrapped(Shared(flat).double()), 0.5, 1e-10)


def test_dropout_is_kept() -> None:
    torch.manual_seed(0)
    net = wrapped(Plain(lambda x: F.dropout(x, 0.5, training=True).flatten(1)))
    a, b = Subnets(net, 0.5)(torch.ones(1, 1, 8, 8)), Subnets(net, 0.5)(torch.ones(1, 1, 8, 8))
    assert not any(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Joined(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(F.max_pool2d(torch.cat([x, self.second(x)], 1), 8).flatten(1))


class Gated(Plain):
    def __init__(self) -> None:
        super().__init__(flat, 4)
        self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.second(self.first(x)) * self.gain).mean((2, 3)))


class Branching(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)[:, :16]) if x.mean() > 0 else self.head(x.flatten(1)[:, -16:])


class Skipping(Plain):
    """Adds a feature map of three channels to one of four."""

    def __init__(self) -> None:
        super().__init__(flat, 4)
        self.narrow = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head((self.second(x) + self.narrow(x)).mean((2, 3)))


class Handmade(Plain):
    """Its first layer is a parameter by itself."""

    def __init__(self, first: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__(flat)
        self.w, self.make = nn.Parameter(torch.ones(shape)), first

    def forward(self, x: Tensor) -> Tensor:
        x = self.make(x, self.w).relu().view(-1, 4, 8, 8)
        return self.head(F.max_pool2d(self.second(x), 4).flatten(1))


class Tempered(Plain):
    """A parameter and a buffer of its own, neither of which has to do with channels."""

    def __init__(self) -> None:
        super().__init__(flat, 4)
        self.heat = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.ones(1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x - self.mean)).mean((2, 3))) * self.heat.exp()


def test_a_parameter_behind_the_head_is_shared() -> None:
    chart = channel_map(net := wrapped(Tempered()))
    assert chart.mask("heat", net.module.state_dict()["heat"], 0.5) is False
    compare_with_masking(wrapped(Tempered().double()), 0.5, 1e-10)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (
            Handmade(lambda x, w: F.conv2d(x, w, padding=1), 4, 1, 3, 3),
            "conv2d in the network's own forward pass: it uses the parameter 'w'",
        ),
        (
            Handmade(lambda x, w: x.flatten(1) @ w, 64, 256),
            "matmul in the network's own forward pass: it uses the parameter 'w'",
        ),
        (Plain(flat, between=nn.Conv2d(4, 4, 1, groups=2)), "'between' (Conv2d)"),
        (Plain(flat, between=nn.GroupNorm(2, 4)), "'between' (GroupNorm)"),
        (Plain(flat, between=nn.PReLU()), "'between' (PReLU)"),
        (Plain(flat, between=nn.ConvTranspose2d(4, 4, 1)), "'between' (ConvTranspose2d)"),
        (Plain(flat, between=nn.Softmax(1)), "'between' (Softmax)"),
        (Plain(flat, between=nn.ChannelShuffle(2)), "'between' (ChannelShuffle)"),
        (Plain(flat, between=nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))), "'between' ("),
        (Plain(lambda x: x.transpose(1, 2).flatten(1)), "transpose in the network's own forward pass"),
        (Plain(lambda x: x.mean(1).repeat(1, 4, 1).flatten(1)), "mean in the network's own forward pass"),
        (Plain(lambda x: x[:, [3, 2, 1, 0]].flatten(1)), "getitem in the network's own forward pass"),
        (Plain(lambda x: F.max_pool2d(x, 1, return_indices=True)[0].flatten(1)), "max_pool2d"),
        (Joined(flat, 8), "cat in the network's own forward pass"),
        (Gated(), "mul in the network's own forward pass"),
        (Skipping(), "add in the network's own forward pass"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(model: nn.Module, named: str) -> None:
    net = wrapped(model)
    with pytest.raises(NetError) as error:
        channel_map(net)
    assert named in str(error.value)


def test_attention_is_refused_by_name() -> None:
    model = nn.Sequential()
    for name, module in (("conv", nn.Conv2d(1, 4, 3)), ("attention", nets.CrossAttention(4, 6, 6))):
        model.add_module(name, module)
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(4 * 6 * 6, 4))
    with pytest.raises(NetError, match="attention"):
        channel_map(wrapped(model))


def test_other_refusals() -> None:
    with pytest.raises(NetError, match="no hidden layer"):
        channel_map(nets.build("mlp", (1, 8, 8), 4, hidden=[]))
    with pytest.raises(NetError, match="cannot be followed"):
        channel_map(wrapped(Branching(flat)))
    with pytest.raises(NetError, match="input shape is not known"):
        channel_map(nets.wrap(Plain(flat), "head"))


def test_following_leaves_the_module_and_the_random_state_alone(residual: Net) -> None:
    residual.module.eval()
    residual.module.get_submodule("norm").train()
    state, random = residual.clone().module.state_dict(), torch.get_rng_state()
    channel_map(residual)
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in residual.module.modules()].count(True) == 1
    for name, tensor in residual.module.state_dict().items():
        assert torch.equal(tensor, state[name])
