"""Compiled kernels: what they compute is what torch computes, for whom they are, and what a run with them is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfed
from perfed import config, nets
from perfed.errors import ConfigError, NetError, StoreError
from perfed.explain.explanation import explain
from perfed.nets import compiler, fused
from perfed.prepare import first_weights, prepare
from perfed.result import Result

# channels in and out, filter, padding, samples, height, width: LeNet-5's, full and partial vectors, odd and small maps
SHAPES = [
    (1, 6, 5, 2, 32, 28, 28),
    (6, 16, 5, 0, 5, 14, 14),
    (3, 6, 5, 0, 2, 32, 32),
    (4, 32, 3, 1, 3, 9, 6),
    (5, 19, 4, 1, 2, 7, 10),
    (2, 8, 1, 0, 1, 5, 5),
    (1, 1, 2, 0, 4, 3, 3),
    (20, 9, 3, 0, 2, 6, 9),
    (32, 64, 3, 1, 3, 8, 6),
    (64, 40, 5, 0, 2, 7, 8),
    (48, 32, 3, 1, 5, 13, 7),
    (32, 64, 5, 0, 3, 12, 9),
    (16, 16, 5, 2, 2, 5, 8),
    (16, 64, 3, 1, 2, 4, 5),
    (32, 16, 5, 2, 2, 2, 3),
]


def layer(inputs: int, outputs: int, size: int, padding: int, seed: int = 0) -> nn.Conv2d:
    torch.manual_seed(seed)
    return nn.Conv2d(inputs, outputs, size, padding=padding)


def quickly(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return fused.run([conv, nn.MaxPool2d(2), nn.ReLU()], x)


def plainly(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.relu(F.max_pool2d(F.conv2d(x, conv.weight, conv.bias, padding=conv.padding), 2))


def gradients(y: Tensor, dy: Tensor, x: Tensor, conv: nn.Conv2d) -> list[Tensor]:
    assert conv.bias is not None
    return list(torch.autograd.grad(y, [x, conv.weight, conv.bias], dy))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_same_as_torch(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    inputs, outputs, size, padding, n, height, width = shape
    conv = layer(inputs, outputs, size, padding)
    assert fused.fusible([conv, nn.MaxPool2d(2), nn.ReLU()])
    assert fused.fusible([conv, nn.ReLU(), nn.MaxPool2d(2)])
    x = torch.randn(n, inputs, height, width).contiguous(memory_format=layout).requires_grad_()
    ours, theirs = quickly(conv, x), plainly(conv, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(theirs).contiguous(memory_format=layout)
    exact = layer(inputs, outputs, size, padding).double()
    wide = x.detach().double().requires_grad_()
    for mine, right in zip(
        gradients(ours, dy, x, conv), gradients(plainly(exact, wide), dy.double(), wide, exact), strict=True
    ):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


@pytest.mark.parametrize("shape", [(6, 16, 5, 0), (32, 64, 3, 1), (16, 32, 5, 2)])
def test_what_a_sample_gives_does_not_depend_on_the_others(shape: tuple[int, int, int, int]) -> None:
    conv, x = layer(*shape), torch.randn(9, shape[0], 13, 14)
    assert torch.equal(quickly(conv, x)[4:6], quickly(conv, x[4:6]))


def test_equal_values_give_their_gradient_to_the_first_as_in_torch() -> None:
    conv = layer(2, 4, 3, 1)
    x = torch.ones(2, 2, 8, 8, requires_grad=True)  # nearly every window has four equal values
    theirs = plainly(conv, x)
    dy = torch.randn_like(theirs)
    for mine, right in zip(gradients(quickly(conv, x), dy, x, conv), gradients(theirs, dy, x, conv), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    conv = layer(1, 6, 5, 2)
    for place in ((0, 0), (13, 14), (27, 27)):
        x = torch.randn(1, 1, 28, 28)
        x[0, 0, *place] = bad
        theirs, ours = plainly(conv, x), quickly(conv, x)
        assert not ours[~theirs.isfinite()].isfinite().any()
        y = quickly(conv, torch.randn(1, 1, 28, 28))
        (found,) = torch.autograd.grad(y, [conv.weight], torch.full_like(y, bad))
        assert not found.isfinite().all()


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    conv = layer(6, 16, 5, 0).requires_grad_(False)
    x = torch.randn(2, 6, 14, 14)
    assert not quickly(conv, x).requires_grad
    quickly(conv, x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert conv.weight.grad is None


def other(kind: str) -> list[nn.Module]:
    """Three modules that look alike, of which one is not what the kernels compute."""
    conv, pool, relu = layer(6, 16, 5, 0), nn.MaxPool2d(2), nn.ReLU()
    if kind == "hook":
        conv.register_forward_hook(lambda *_: None)
    odd: dict[str, list[nn.Module]] = {
        "channels": [layer(6, 65, 5, 0), pool, relu],
        "filters": [layer(65, 16, 5, 0), pool, relu],
        "stride": [nn.Conv2d(6, 16, 5, stride=2), pool, relu],
        "groups": [nn.Conv2d(6, 16, 5, groups=2), pool, relu],
        "dilation": [nn.Conv2d(6, 16, 5, dilation=2), pool, relu],
        "bias": [nn.Conv2d(6, 16, 5, bias=False), pool, relu],
        "oblong": [nn.Conv2d(6, 16, (5, 3)), pool, relu],
        "same": [nn.Conv2d(6, 16, 5, padding="same"), pool, relu],
        "reflect": [nn.Conv2d(6, 16, 5, padding=1, padding_mode="reflect"), pool, relu],
        "window": [conv, nn.MaxPool2d(3), relu],
        "overlap": [conv, nn.MaxPool2d(2, stride=1), relu],
        "ceil": [conv, nn.MaxPool2d(2, ceil_mode=True), relu],
        "mean": [conv, nn.AvgPool2d(2), relu],
        "leaky": [conv, pool, nn.LeakyReLU()],
        "twice": [conv, pool, nn.MaxPool2d(2)],
        "hook": [conv, pool, relu],
        "short": [conv, pool],
    }
    return odd[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("channels", "filters", "stride", "groups", "dilation", "bias", "oblong", "same", "reflect"),
        *("window", "overlap", "ceil", "mean", "leaky", "twice", "hook", "short"),
    ],
)
def test_anything_else_stays_with_torch(kind: str) -> None:
    assert not fused.fusible(other(kind))
    assert fused.fusible([layer(6, 16, 5, 0), nn.MaxPool2d((2, 2), (2, 2)), nn.ReLU(inplace=True)])


@pytest.fixture
def anew() -> Iterator[None]:
    """Kernels are looked for anew, before and after."""
    fused._kernel.cache_clear()
    yield
    fused._kernel.cache_clear()


@pytest.mark.skipif("avx512vl" not in compiler._processor(), reason="the processor has one length of vectors")
@pytest.mark.parametrize(
    "shape", [(6, 16, 5, 0), (1, 6, 5, 2), (12, 3, 1, 0), (27, 9, 3, 1), (22, 40, 1, 0), (48, 32, 3, 1), (32, 64, 5, 0)]
)
def test_the_sums_do_not_depend_on_the_length_of_vectors(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    conv, x = layer(*shape), torch.randn(7, shape[0], 14, 14, requires_grad=True)
    y = quickly(conv, x)
    dy = torch.randn_like(y)
    expected = [y, *gradients(y, dy, x, conv)]
    for tuned in ("", "-mtune=haswell", "-mtune=znver3"):
        monkeypatch.setenv("CC", f"{compiler.compiler({})[0]} -mno-avx512f {tuned}")
        fused._kernel.cache_clear()
        y = quickly(conv, x)
        for mine, right in zip([y, *gradients(y, dy, x, conv)], expected, strict=True):
            assert torch.equal(mine, right)


def test_a_second_derivative_is_refused() -> None:
    conv, x = layer(2, 4, 3, 1), torch.randn(2, 2, 8, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(quickly(conv, x).sum(), [conv.weight], create_graph=True)


def strange(kind: str) -> tuple[nn.Conv2d, Tensor]:
    """A convolution and what it is given, of which one is not what the kernels know."""
    conv, x = layer(3, 6, 5, 0), torch.randn(2, 3, 14, 14)
    if kind == "bias" and conv.bias is not None:
        conv.bias = nn.Parameter(torch.randn(12)[::2])
    if kind == "double weights":
        conv = conv.double()
    given = {
        "channels": x[:, :1],
        "single": x[0],
        "nothing left": x[..., :5, :5],
        "too small": x[..., :4, :4],
        "double": x.double(),
        "transposed": x.transpose(2, 3),
        "no samples": x[:0],
    }
    return conv, given.get(kind, x)


@pytest.mark.parametrize(
    "kind",
    [
        *("channels", "single", "nothing left", "too small", "double"),
        *("transposed", "no samples", "bias", "double weights"),
    ],
)
def test_what_is_none_of_its_maps_is_left_to_torch(kind: str) -> None:
    conv, x = strange(kind)
    three = [conv, nn.MaxPool2d(2), nn.ReLU()]
    try:
        expected = nn.Sequential(*three)(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
            fused.run(three, x)
    else:
        torch.testing.assert_close(fused.run(three, x), expected, rtol=1e-5, atol=1e-5)


def test_no_samples_have_gradients_too() -> None:
    conv, x = layer(1, 6, 5, 2), torch.zeros(0, 1, 28, 28, requires_grad=True)
    quickly(conv, x).sum().backward()
    assert conv.weight.grad is not None
    assert not conv.weight.grad.any()


def test_more_places_than_an_index_can_name_are_left_to_torch() -> None:
    conv = layer(1, 6, 5, 2)
    many = torch.zeros(1).expand(3_000_000, 1, 28, 28)
    assert not fused.takes(conv, many)
    assert fused.takes(conv, many[:1000])


def test_a_hook_that_comes_later_is_called() -> None:
    net = nets.build("lenet5", (1, 28, 28), 10)
    net.compiled = True
    called: list[nn.Module] = []
    net.module.get_submodule("pool1").register_forward_hook(lambda module, *_: called.append(module))
    net(torch.rand(2, 1, 28, 28))
    assert called == [net.module.get_submodule("pool1")]


def test_in_another_default_precision(anew: None) -> None:
    conv, x = layer(1, 6, 5, 2), torch.rand(2, 1, 28, 28)
    expected = quickly(conv, x)
    torch.set_default_dtype(torch.float64)
    try:
        y = quickly(conv, x)
        y.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(y, expected)
    assert conv.weight.grad is not None
    assert conv.weight.grad.dtype == torch.float32


SMALL = {"CI": 1, "CO": 2, "K": 3, "PAD": 0, "SLACK": fused.SLACK}


@pytest.mark.parametrize("tiles", [(32, 64, 3, 1, 8, 8), (16, 16, 5, 2, 4, 4), (64, 64, 5, 0, 8, 9)])
@pytest.mark.parametrize(
    "none", [(32, 64, 3, 1, 4, 4), (16, 16, 5, 2, 2, 3), (32, 40, 3, 1, 8, 8), (6, 16, 5, 0, 14, 14)]
)
def test_tiles_are_for_many_channels_and_maps_that_are_not_small(tiles: tuple[int, ...], none: tuple[int, ...]) -> None:
    for (inputs, outputs, size, padding, *maps), some in ((tiles, True), (none, False)):
        room = fused.kernel(layer(inputs, outputs, size, padding)).room_size(*maps)
        assert bool(room) == some


def test_the_error_that_a_compiler_names_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    header = tmp_path / "vectors.h"
    header.write_text("int wrong(;\n")
    source = tmp_path / "some.c"
    source.write_text('#include "vectors.h"\n')
    with pytest.raises(ConfigError, match=r"failed: .*vectors\.h:1:.* error: "):
        compiler.load(source)
    source.write_text("int fine(void) { return 0; }\n")
    monkeypatch.setenv("CC", f"{compiler.compiler({})[0]} -lno-such-library")
    with pytest.raises(ConfigError, match=r"no-such-library"):
        compiler.load(source)


def test_autocast_is_left_to_torch() -> None:
    conv, x = layer(3, 6, 5, 0), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert quickly(conv, x).dtype == torch.bfloat16
    assert torch.equal(quickly(conv, torch._neg_view(x)), plainly(conv, torch._neg_view(x)))


def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.load(fused.SOURCE, **SMALL)
    (made,) = (tmp_path / "perfed").iterdir()
    before = made.stat().st_mtime_ns
    compiler.load(fused.SOURCE, **SMALL)
    assert made.stat().st_mtime_ns == before
    compiler.load(fused.SOURCE, **{**SMALL, "PAD": 1})
    assert len(list((tmp_path / "perfed").iterdir())) == 2


def test_a_damaged_library_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    compiler.load(fused.SOURCE, **SMALL)
    (made,) = (tmp_path / "first" / "perfed").iterdir()
    whole = made.read_bytes()
    damaged = tmp_path / "second" / "perfed" / made.name  # the first is in use
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(whole[:100])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    assert compiler.load(fused.SOURCE, **SMALL).padded_size
    assert len(damaged.read_bytes()) == len(whole)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cannot do it' >&2\nexit 1\n")
    broken.chmod(0o755)
    net = nets.build("lenet5", (1, 28, 28), 10)
    net.compiled = True
    for command, said in {
        "no-such-compiler": r"no-such-compiler.*apt-get install gcc",
        str(broken): f"{broken} failed: cannot do it",
        "true": "true failed: it ended with 0 and made nothing",
        'cc "': "CC = .* is no command: No closing quotation",
    }.items():
        monkeypatch.setenv("CC", command)
        with pytest.raises(ConfigError, match=said):
            net.ready()
    assert list((tmp_path / "perfed").iterdir()) == []
    monkeypatch.delenv("CC")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"kernels = 'compiled'.*file/perfed.*XDG_CACHE_HOME"):
        net.ready()


def test_words_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="kernels"):
        config.resolve({"kernels": "fast"})
    with pytest.raises(ConfigError, match=r"kernels = 'compiled'.*precision asks for bfloat16.*Leave one"):
        config.resolve({"kernels": "compiled", "precision": "bfloat16"})


def test_a_network_without_small_convolutions_is_refused() -> None:
    with pytest.raises(NetError, match="kernels = 'compiled'"):
        perfed.run(net="mlp", clients=5, rounds=1, kernels="compiled")


class Viewed(nn.Module):
    """A forward pass written for the default layout alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def test_a_network_that_wants_another_layout_is_refused_before_the_first_round() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), Viewed(), nn.Linear(36, 10))
    words: dict[str, Any] = {"net": nets.wrap(layers, "4", (1, 8, 8)), "clients": 5, "rounds": 1}
    perfed.run(**words)
    with pytest.raises(NetError, match=r"compiled kernels.*channels last.*reshape, or leave kernels out"):
        perfed.run(**words, kernels="compiled")


def test_a_network_in_parts_is_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = nets.build("lenet5", (1, 28, 28), 10), torch.rand(4, 1, 28, 28)
    plain, features = net(x), net.features(x)
    calls: list[nn.Module] = []
    run = fused.run
    monkeypatch.setattr(fused, "run", lambda three, x: calls.append(three[0]) or run(three, x))
    net.compiled = True
    net(x)
    assert calls == [net.module.get_submodule(name) for name in ("conv1", "conv2")]
    torch.testing.assert_close(net(x), plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(net.features(x), features, rtol=0, atol=1e-5)
    for k in range(len(net.layers) + 1):
        assert torch.equal(net.run_suffix(net.run_prefix(x, k), k), net(x))
    assert torch.equal(net.clone()(x), net(x))
    assert torch.equal(net.plain()(x), plain)


def test_a_run_says_its_kernels_and_goes_on_with_them(tmp_path: Path) -> None:
    words: dict[str, Any] = {
        **{"method": "fedrep", "net": {"name": "cnn", "channels": [4, 8]}, "clients": 5, "rounds": 2},
        "data": {"name": "digits", "samples": 200},
    }
    torchs = perfed.run(**words)
    ours = perfed.run(**words, kernels="compiled", out=tmp_path / "ours")
    assert ours.state_sha256 != torchs.state_sha256
    assert ours.cost["flops"] == torchs.cost["flops"]
    assert "kernels" not in torchs.config.identity()
    assert perfed.run(**words, kernels="compiled", workers=2).state_sha256 == ours.state_sha256
    made = prepare(ours.config)
    assert first_weights(made.config, made.net, made.method).compiled
    assert made.simulation(tmp_path / "stopped").run(stop_after=1) is None
    resumed = made.simulation(tmp_path / "stopped", workers=2).run()
    assert resumed is not None
    assert resumed.state_sha256 == ours.state_sha256
    with pytest.raises(StoreError):
        prepare(torchs.config).simulation(tmp_path / "ours")
    explain(ours, 0)
    x = ours.made().federation.client(0).test.x
    torch.testing.assert_close(ours.model(0)(x).softmax(1), ours.predict(0, x), rtol=0, atol=1e-6)


def test_a_finished_run_predicts_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None
) -> None:
    words: dict[str, Any] = {"net": {"name": "cnn", "channels": [4, 8]}, "data": {"name": "digits", "samples": 200}}
    ours = perfed.run(**words, kernels="compiled", method="fedper", clients=5, rounds=1, out=tmp_path / "run")
    x = ours.made().federation.client(0).test.x
    expected = ours.predict(0, x)
    fused._kernel.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert torch.equal(Result.load(tmp_path / "run").predict(0, x), expected)
    with pytest.raises(ConfigError, match="no-such-compiler"):
        perfed.run(**words, kernels="compiled", clients=5, rounds=1)
