"""Convolutions by tiles: they compute what torch computes, for the right convolutions, and nothing is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import perfed
from perfed import nets
from perfed.core.fit import set_trainable
from perfed.errors import ConfigError
from perfed.methods.pse import divide, extract
from perfed.nets import compiler, fused, tiled
from perfed.nets.written import written

# channels in and out, padding, samples, height, width: whole tiles and parts of some, more than are computed at once
SHAPES = [
    (32, 32, 1, 2, 8, 8),
    (64, 128, 1, 9, 7, 7),
    (48, 32, 1, 2, 13, 6),
    (32, 80, 0, 3, 9, 14),
    (32, 48, 2, 2, 5, 7),
    (256, 32, 1, 1, 16, 3),
    (256, 256, 1, 3, 8, 8),
]


def layer(inputs: int, outputs: int, padding: int, bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(inputs, outputs, 3, padding=padding, bias=bias)


def gradients(y: Tensor, dy: Tensor, x: Tensor, conv: nn.Conv2d) -> list[Tensor]:
    return list(torch.autograd.grad(y, [x, *conv.parameters()], dy))


def by_tiles(conv: nn.Module, x: Tensor) -> Tensor:
    with tiled.Tiles():
        y: Tensor = conv(x)
    return y


def close(mine: Tensor, right: Tensor, share: float = 1e-5) -> None:
    """Equal to a share of the largest value."""
    torch.testing.assert_close(mine, right, rtol=0, atol=share * float(right.detach().abs().max()))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the maps that were computed by tiles."""
    shapes: list[tuple[int, ...]] = []
    convolve = tiled.convolve
    monkeypatch.setattr(tiled, "convolve", lambda x, *others: shapes.append(tuple(x.shape)) or convolve(x, *others))
    return shapes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("bias", [True, False])
def test_the_same_as_torch(
    shape: tuple[int, ...], layout: torch.memory_format, bias: bool, counted: list[tuple[int, ...]]
) -> None:
    inputs, outputs, padding, n, height, width = shape
    conv = layer(inputs, outputs, padding, bias)
    x = torch.randn(n, inputs, height, width).contiguous(memory_format=layout).requires_grad_()
    theirs, ours = conv(x), by_tiles(conv, x)
    assert counted == [x.shape]
    close(ours, theirs)
    dy = torch.randn_like(theirs).contiguous(memory_format=layout)
    exact, wide = layer(inputs, outputs, padding, bias).double(), x.detach().double().requires_grad_()
    for mine, right in zip(gradients(ours, dy, x, conv), gradients(exact(wide), dy.double(), wide, exact), strict=True):
        close(mine.double(), right)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 5), height=st.integers(1, 19), width=st.integers(1, 19), seed=st.integers(0, 99))
def test_maps_of_any_size(n: int, height: int, width: int, seed: int) -> None:
    """By tiles or, where they are not worth while, by torch; what a sample gives does not depend on the others."""
    conv = layer(32, 32, 1)
    x = torch.randn(n, 32, height, width, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    ours, theirs = by_tiles(conv, x), conv(x)
    close(ours, theirs)
    dy = torch.ones_like(theirs)
    for mine, right in zip(gradients(ours, dy, x, conv), gradients(theirs, dy, x, conv), strict=True):
        close(mine, right, 2e-5)  # both are rounded
    if tiled.takes(x, conv.weight, conv.bias, 1):
        assert torch.equal(by_tiles(conv, x[-1:]), ours[-1:])


@pytest.fixture
def anew() -> Iterator[None]:
    """Kernels are looked for anew, before and after."""
    kernel = tiled.kernel
    kernel.cache_clear()
    yield
    kernel.cache_clear()


@pytest.mark.skipif("avx512vl" not in compiler._processor(), reason="the processor has one length of vectors")
@pytest.mark.parametrize("shape", [(32, 32, 1), (48, 80, 0), (64, 128, 2)])
def test_the_sums_do_not_depend_on_the_length_of_vectors(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    conv, x = layer(*shape), torch.randn(5, shape[0], 11, 9, requires_grad=True)
    y = by_tiles(conv, x)
    dy = torch.randn_like(y)
    expected = [y, *gradients(y, dy, x, conv)]
    for tuned in ("", "-mtune=haswell", "-mtune=znver3"):
        monkeypatch.setenv("CC", f"{compiler.compiler({})[0]} -mno-avx512f {tuned}")
        tiled.kernel.cache_clear()
        y = by_tiles(conv, x)
        for mine, right in zip([y, *gradients(y, dy, x, conv)], expected, strict=True):
            assert torch.equal(mine, right)


def other(kind: str) -> tuple[nn.Module, Tensor]:
    """A module and what it is given, of which one is not what tiles are for."""
    x = torch.randn(2, 32, 8, 8)
    odd: dict[str, tuple[nn.Module, Tensor]] = {
        "few channels": (layer(16, 32, 1), x[:, :16]),
        "few filters": (layer(32, 31, 1), x),
        "many channels": (layer(32, 272, 1), x),
        "1x1": (nn.Conv2d(32, 32, 1), x),
        "5x5": (nn.Conv2d(32, 32, 5), x),
        "stride": (nn.Conv2d(32, 32, 3, stride=2, padding=1), x),
        "dilation": (nn.Conv2d(32, 32, 3, dilation=2), x),
        "groups": (nn.Conv2d(64, 64, 3, groups=2), x.repeat(1, 2, 1, 1)),
        "oblong padding": (nn.Conv2d(32, 32, 3, padding=(0, 1)), x),
        "same": (nn.Conv2d(32, 32, 3, padding="same"), x),
        "reflect": (nn.Conv2d(32, 32, 3, padding=1, padding_mode="reflect"), x),
        "transposed": (nn.ConvTranspose2d(32, 32, 3), x),
        "small": (layer(32, 32, 1), x[..., :2, :2]),
        "few tiles": (layer(32, 32, 1), x[..., :4]),
        "parts of tiles": (layer(32, 32, 1), x[..., :5, :5]),
        "negative": (layer(32, 32, 1), torch._neg_view(x)),
        "double": (layer(32, 32, 1).double(), x.double()),
        "one map": (layer(32, 32, 1), x[0]),
        "none": (layer(32, 32, 1), x[:0]),
        "one row": (nn.Conv1d(32, 32, 3), x[..., 0]),
    }
    return odd[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("few channels", "few filters", "many channels", "1x1", "5x5", "stride", "dilation", "groups", "same"),
        *("oblong padding", "transposed", "small", "few tiles", "parts of tiles", "negative"),
        *("double", "one map", "none", "one row"),
    ],
)
def test_anything_else_stays_with_torch(kind: str, counted: list[tuple[int, ...]]) -> None:
    module, x = other(kind)
    assert torch.equal(by_tiles(module, x), module(x))
    assert counted == []
    small = ("small", "few tiles", "parts of tiles")
    assert tiled.known(module) == (kind in (*small, "negative", "double", "one map", "none"))


def test_padding_that_is_no_zeros_comes_before_the_convolution(counted: list[tuple[int, ...]]) -> None:
    module, x = other("reflect")
    close(by_tiles(module, x), module(x))
    assert counted == [(2, 32, 10, 10)], "the maps as they were padded"
    assert not tiled.known(module)


def test_what_torch_refuses_is_refused_with_its_words() -> None:
    conv = layer(32, 32, 1)
    x, short, flat = torch.randn(2, 32, 8, 8), layer(32, 32, 1), layer(32, 32, 1)
    short.bias, flat.weight = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(32))
    for module, z in ((conv, torch.randn(2, 48, 8, 8)), (conv, x.double()), (short, x), (flat, x)):
        with pytest.raises(RuntimeError) as expected:
            module(z)
        with pytest.raises(RuntimeError) as found:
            by_tiles(module, z)
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    conv = layer(32, 32, 1)
    for place in ((0, 0), (3, 4), (8, 8)):
        x = torch.randn(1, 32, 9, 9)
        x[0, 5, *place] = bad
        theirs = conv(x)
        assert not by_tiles(conv, x)[~theirs.isfinite()].isfinite().any()
    x = torch.randn(1, 32, 9, 9, requires_grad=True)
    y = by_tiles(conv, x)
    for found in gradients(y, torch.full_like(y, bad), x, conv):
        assert not found.isfinite().all()


def test_a_bias_may_lie_anywhere(counted: list[tuple[int, ...]]) -> None:
    conv, x = layer(32, 32, 1), torch.randn(2, 32, 8, 8)
    conv.bias = nn.Parameter(torch.randn(64)[::2])
    close(by_tiles(conv, x), conv(x))
    assert counted


def test_autocast_and_transforms_are_left_to_torch(counted: list[tuple[int, ...]]) -> None:
    conv, x = layer(32, 32, 1).requires_grad_(False), torch.randn(2, 32, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert by_tiles(conv, x).dtype == torch.bfloat16
    with tiled.Tiles():
        each = torch.func.vmap(lambda one: conv(one[None])[0])(x)
    close(each, conv(x))
    assert counted == []


@pytest.mark.parametrize("hooked", [False, True])
def test_what_is_saved_for_going_back_may_come_in_another_layout(hooked: bool) -> None:
    conv, x = layer(32, 32, 1), torch.randn(2, 32, 8, 8).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    theirs = conv(x)
    if hooked:
        with torch.autograd.graph.saved_tensors_hooks(lambda z: z.detach().numpy().copy(order="C"), torch.tensor):
            ours = by_tiles(conv, x)
    else:
        conv.weight.requires_grad_()
        with tiled.Tiles():
            ours = checkpoint(conv, x, use_reentrant=False)
    dy = torch.randn_like(theirs)
    for mine, right in zip(gradients(ours, dy, x, conv), gradients(theirs, dy, x, conv), strict=True):
        close(mine, right, 2e-5)


def test_to_ask_for_compiled_code_changes_no_state() -> None:
    model = Nested()
    nn.utils.parametrizations.spectral_norm(model.deep)
    net = nets.wrap(model, "fc", (1, 8, 8))
    net.module.train()
    before = {name: tensor.clone() for name, tensor in net.module.state_dict().items()}
    net.compiled = True
    assert net.compiled
    assert all(torch.equal(before[name], tensor) for name, tensor in net.module.state_dict().items())


def test_a_second_derivative_is_refused() -> None:
    conv, x = layer(32, 32, 1), torch.randn(2, 32, 8, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(by_tiles(conv, x).sum(), [conv.weight], create_graph=True)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    conv, x = layer(32, 32, 1).requires_grad_(False), torch.randn(2, 32, 8, 8)
    assert not by_tiles(conv, x).requires_grad
    by_tiles(conv, x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert conv.weight.grad is None
    conv.weight.requires_grad_()
    by_tiles(conv, x.detach()).sum().backward()
    assert conv.weight.grad is not None
    assert conv.bias is not None
    assert conv.bias.grad is None
    conv.weight.requires_grad_(False)
    conv.bias.requires_grad_()
    by_tiles(conv, x.detach()).sum().backward()
    assert conv.bias.grad is not None
    torch.testing.assert_close(conv.bias.grad, torch.full((32,), 128.0))


def test_going_back_by_hand_gives_what_is_asked_for() -> None:
    conv, x = layer(32, 32, 1), torch.randn(2, 32, 8, 8)
    with torch.no_grad():
        y, back = tiled.by_hand(conv, x)
        dx, dw, db = back(y, (False, True, True))
        assert (dx is None, dw is None, db is None) == (True, False, False)
        dx, dw, db = back(y, (True, False, False))
        assert (dx is None, dw is None, db is None) == (False, True, True)


class Nested(nn.Module):
    """A model of a user's own: what is inside is called by its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep, self.fc = nn.Conv2d(1, 32, 3, padding=1), layer(32, 32, 1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions, one of which is added to the other."""
        x = F.relu(self.stem(x))
        x = F.relu(self.deep(x) + x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def test_every_kind_of_network_is_computed_so(counted: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    wrapped = nets.wrap(Nested(), "fc", (1, 8, 8))
    for net, x, many in (
        (wrapped, torch.rand(2, 1, 8, 8), 1),
        (nets.build("resnet18", (1, 16, 16), 10, width=0.5), torch.rand(2, 1, 16, 16), 7),
        (nets.build("conv3attn", (1, 28, 28), 10), torch.rand(2, 1, 28, 28), 1),
    ):
        net.module.eval()
        plain = net(x)
        assert not net.compiled
        net.compiled = True
        assert net.compiled
        net.ready()
        counted.clear()
        ours = net(x)
        assert len(counted) == many
        close(ours, plain)
        assert torch.equal(net.run_suffix(net.features(x), len(net.body)), ours)
        assert torch.equal(net.clone()(x), ours)
        counted.clear()
        net.width(x, net.cuts[0])
        assert torch.equal(net.plain()(x), plain)
        assert counted == [], "by torch where it is only looked at"


class Standardised(nn.Conv2d):
    """A convolution of a user's own: its filters have no mean."""

    def forward(self, x: Tensor) -> Tensor:
        """With filters that are not the weight."""
        return F.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias, 1, 1, 1, 1)


def test_only_what_is_torchs_own_is_written_out() -> None:
    torch.manual_seed(0)
    own, hooked, patched = Standardised(32, 32, 3, padding=1), layer(32, 32, 1), layer(32, 32, 1)
    patched._conv_forward = lambda x, weight, bias: F.conv2d(x, 2 * weight, bias, padding=1)  # type: ignore[method-assign]
    hooked.register_forward_hook(lambda module, given, y: 2 * y)
    for conv, known in ((own, False), (hooked, False), (patched, False), (layer(32, 32, 1), True)):
        model = nn.Sequential(nn.Conv2d(1, 32, 3), conv, nn.Flatten(), nn.Linear(32 * 36, 10))
        net = nets.wrap(model, "3", (1, 8, 8))
        net.compiled = True
        assert bool(written(net, 0, set_trainable(net, net.layers))) == known


def test_everything_is_compiled_before_a_run(monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    loaded: list[object] = []
    load = compiler.load
    monkeypatch.setattr(
        compiler, "load", lambda source, **sizes: loaded.append((source, sizes)) or load(source, **sizes)
    )
    fused._kernel.cache_clear()
    for net in (nets.wrap(Nested(), "fc", (1, 8, 8)), nets.build("conv3attn", (1, 28, 28), 10)):
        net.compiled = True
        net._pass.ready()
        before = len(loaded)
        assert before
        net(torch.rand(2, *net.input_shape))
        if net.head == "classifier":
            with net.computing():
                extract(divide(net)[0], torch.rand(2, *net.input_shape))
        assert len(loaded) == before


def test_hooks_on_such_modules_are_called() -> None:
    net = nets.wrap(Nested(), "fc", (1, 8, 8))
    net.compiled = True
    called: list[nn.Module] = []
    net.module.register_forward_hook(lambda module, *_: called.append(module))
    net.module.get_submodule("deep").register_forward_hook(lambda module, *_: called.append(module))
    net(torch.rand(2, 1, 8, 8))
    assert called == [net.module.get_submodule("deep"), net.module]


def test_pse_which_calls_modules_one_by_one_has_them_too(counted: list[tuple[int, ...]]) -> None:
    net = nets.build("conv3attn", (1, 28, 28), 10)
    net.compiled = True
    extractor, _, _ = divide(net)
    with net.computing():
        extract(extractor, torch.rand(2, 1, 28, 28))
    assert counted == [(2, 32, 14, 14), (2, 64, 7, 7)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [(), ("1",)])
def test_written_gradients_are_those_of_the_graph(bias: bool, frozen: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(2, 32, 3), nn.ReLU(), layer(32, 32, 1, bias), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10)),
    )
    net = nets.wrap(model, "6", (2, 8, 8))
    net.compiled = True
    trained = set_trainable(net, [name for name in net.layers if name not in frozen])
    x, y = torch.randn(7, 2, 8, 8), torch.randint(0, 10, (7,))
    short = written(net, 0, trained)
    assert short is not None
    for mine, right in zip(short(x, y), torch.autograd.grad(F.cross_entropy(net(x), y), trained), strict=True):
        assert torch.equal(mine, right)
    assert short(x[:0], y[:0])[0].isfinite().all(), "left to torch"


def test_a_run_is_the_same_however_it_is_computed(counted: list[tuple[int, ...]]) -> None:
    words: dict[str, Any] = {
        **{"method": "fedrep", "net": nets.wrap(Nested(), "fc", (1, 8, 8)), "clients": 5, "rounds": 2},
        "data": {"name": "digits", "samples": 120},
    }
    torchs = perfed.run(**words)
    assert counted == []
    ours = perfed.run(**words, kernels="compiled")
    assert counted
    assert ours.state_sha256 != torchs.state_sha256
    assert ours.cost["flops"] == torchs.cost["flops"]
    assert perfed.run(**words, kernels="compiled", workers=2).state_sha256 == ours.state_sha256


def test_without_a_compiler_it_is_refused_before_the_first_round(monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    net = nets.wrap(Nested(), "fc", (1, 8, 8))
    net.compiled = True
    with pytest.raises(ConfigError, match="no-such-compiler"):
        net.ready()
