"""Compiled attention: what it computes is what torch computes, for which heads, and that nothing is hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import perfed
from perfed import nets
from perfed.engine.worker import _lay_out
from perfed.errors import ConfigError
from perfed.methods.fedem import FedEM
from perfed.nets import CrossAttention, attending, compiler

# channels, heads, height, width, samples: PSE's, few and many tokens, half and several vectors a head
SHAPES = [(128, 4, 7, 7, 3), (8, 1, 1, 1, 2), (48, 2, 3, 5, 2), (40, 1, 8, 8, 2), (128, 1, 2, 2, 1), (16, 2, 13, 11, 2)]


def block(shape: tuple[int, ...], position: bool = True) -> tuple[CrossAttention, Tensor, Tensor]:
    channels, heads, height, width, n = shape
    torch.manual_seed(0)
    made = CrossAttention(channels, height, width, heads=heads, position=position)
    if made.position is not None:
        torch.nn.init.normal_(made.position)
    q, kv = torch.randn(2, n, channels, height, width)
    return made, q.requires_grad_(), kv.contiguous(memory_format=torch.channels_last).requires_grad_()


def gradients(o: Tensor, d: Tensor, *of: Any) -> list[Tensor]:
    return list(torch.autograd.grad(o, of, d))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_the_same_as_torch(shape: tuple[int, ...], position: bool, alone: bool) -> None:
    attention, q, kv = block(shape, position)
    kv = q if alone else kv
    theirs = attention(q, kv)
    d = torch.randn_like(theirs)
    attention.compiled = True
    ours = attention(q, kv)
    assert not torch.equal(ours, theirs) or shape[2] * shape[3] == 1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    mine = gradients(ours, d, q, kv, *attention.parameters())
    attention.compiled = False
    exact, wide = attention.double(), [z.detach().double().requires_grad_() for z in (q, kv)]
    wide = [wide[0]] * 2 if alone else wide
    right = gradients(exact(*wide), d.double(), *wide, *exact.parameters())
    for found, expected in zip(mine, right, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()) + 1e-7)


def test_large_scores_are_no_trouble_and_what_is_not_finite_is_not_hidden() -> None:
    attention, q, _ = block((16, 2, 3, 3, 2))
    theirs = attention(30 * q)
    attention.compiled = True
    torch.testing.assert_close(attention(30 * q), theirs, rtol=1e-4, atol=1e-3)
    for bad in (float("nan"), float("inf")):
        x = q.detach().clone()
        x[0, 3, 1, 1] = bad
        found = attention(x)
        assert not found[0].isfinite().any()
        assert found[1].isfinite().all()
        (down,) = torch.autograd.grad(attention(q), [q], torch.full_like(q, bad))
        assert not down.isfinite().any()


def test_other_heads_and_maps_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "attend", None)
    for shape in ((12, 1, 3, 3, 2), (8, 1, 17, 16, 1), (136, 1, 2, 2, 1)):  # channels, tokens, channels again
        attention, q, _ = block(shape)
        expected = attention(q)
        attention.compiled = True
        assert torch.equal(attention(q), expected)


def strange(kind: str) -> tuple[CrossAttention, Tensor, Tensor]:
    """A block and what it is given, of which one is not what the kernel reads."""
    attention, q, kv = block((16, 2, 4, 4, 2), position=kind in ("oblong", "double position", "one position"))
    if kind == "one position":
        attention.position = torch.nn.Parameter(torch.ones(16, 1, 1))
    if kind == "hook":
        attention.key.register_forward_hook(lambda module, given, found: 2 * found)
    if kind == "narrow":
        attention.query, attention.key = torch.nn.Conv2d(16, 4, 1, bias=False), torch.nn.Conv2d(16, 4, 1, bias=False)
    if kind == "stride":
        attention.key = torch.nn.Conv2d(16, 16, 1, stride=2, bias=False)
        attention.value = torch.nn.Conv2d(16, 16, 1, stride=2, bias=False)
    if kind == "groups":
        attention.value = torch.nn.Conv2d(16, 16, 1, groups=2, bias=False)
    if kind == "padding":
        attention.query = torch.nn.Conv2d(16, 16, 1, padding=1, bias=False)
    if kind == "3x3":
        attention.query = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False)
    if kind == "heads":
        attention.heads = 3
    if kind == "bias":
        attention.query = torch.nn.Conv2d(16, 16, 1)
    if kind == "double position" and attention.position is not None:
        attention.position = torch.nn.Parameter(attention.position.double())
    if kind == "double":
        attention, q, kv = attention.double(), q.double(), kv.double()
    return attention, *{
        "fewer keys": (q, kv[..., :2, :2]),
        "one map for all": (q, kv[:1]),
        "oblong": (q.view(2, 16, 2, 8), kv.reshape(2, 16, 2, 8)),
        "larger": (torch.randn(1, 16, 20, 20), torch.randn(1, 16, 20, 20)),
        "channels": (q, torch.cat([kv, kv], 1)),
    }.get(kind, (q, kv))


@pytest.mark.parametrize(
    "kind",
    [
        "fewer keys",
        "one map for all",
        "oblong",
        "larger",
        "channels",
        "hook",
        "bias",
        "double",
        "double position",
        "one position",
        *("narrow", "stride", "groups", "padding", "3x3", "heads"),
    ],
)
def test_what_is_none_of_its_maps_is_left_to_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "attend", None)
    attention, q, kv = strange(kind)
    try:
        expected = attention(q, kv)
    except RuntimeError as error:
        attention.compiled = True
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
            attention(q, kv)
    else:
        attention.compiled = True
        assert torch.equal(attention(q, kv), expected)


def test_fewer_bits_are_left_to_torch() -> None:
    attention, q, kv = block((64, 2, 8, 8, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = attention(q, kv)
        attention.compiled = True
        assert torch.equal(attention(q, kv), expected)
    for given in [
        (torch.zeros(1, 4, 8), torch.zeros(1, 3, 16)),
        (torch.zeros(1, 4, 25),),
        (torch.zeros(1, 4, 24).double(),),
    ]:
        with pytest.raises(ValueError, match="one shape"):
            attending._Heads.apply(1, None, *given)
    with pytest.raises(ValueError, match="one shape"):
        attending._Heads.apply(1, torch.zeros(3, 8), torch.zeros(1, 4, 24))
    assert attention(q[:0]).shape == (0, *q.shape[1:])


@pytest.fixture
def anew() -> Iterator[None]:
    """Kernels are looked for anew, before and after."""
    kernel = attending.kernel
    kernel.cache_clear()
    yield
    kernel.cache_clear()


# channels, heads, height, width: heads whose last rows and columns are computed in blocks of every size
@pytest.mark.skipif("avx512vl" not in compiler._processor(), reason="the processor has one length of vectors")
@pytest.mark.parametrize(
    "shape", [(64, 2, 7, 7), (8, 1, 8, 8), (24, 1, 7, 7), (56, 1, 7, 7), (128, 1, 5, 5), (8, 1, 6, 6)]
)
def test_the_sums_do_not_depend_on_the_length_of_vectors(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    attention, q, kv = block((*shape, 2))
    attention.compiled = True
    o = attention(q, kv)
    d = torch.randn_like(o)
    expected = [o, *gradients(o, d, q, kv)]
    for tuned in ("", "-mtune=haswell", "-mtune=znver3"):
        monkeypatch.setenv("CC", f"{compiler.compiler({})[0]} -mno-avx512f {tuned}")
        attending.kernel.cache_clear()
        o = attention(q, kv)
        for mine, right in zip([o, *gradients(o, d, q, kv)], expected, strict=True):
            assert torch.equal(mine, right)


def test_a_second_derivative_is_refused() -> None:
    attention, q, kv = block((16, 2, 4, 4, 2))
    attention.compiled = True
    for loss in (attention(q, kv).sum(), attention(q, kv).square().sum()):
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(loss, list(attention.parameters()), create_graph=True)


def test_a_gradient_can_be_asked_for_twice_and_for_some_of_the_weights() -> None:
    attention, q, kv = block((16, 2, 4, 4, 3))
    for part in (attention.query.weight, attention.position):
        part.requires_grad_(False)
    wide = q.detach().repeat(1, 1, 1, 2)[..., ::2].requires_grad_()  # not in one piece
    theirs = attention(wide, kv.detach())
    attention.compiled = True
    ours, d = attention(wide, kv.detach()), torch.ones(()).expand_as(theirs)
    of = (wide, attention.key.weight, attention.value.weight)
    right = torch.autograd.grad(theirs, of, d)
    first, second = (torch.autograd.grad(ours, of, d, retain_graph=True) for _ in range(2))
    for mine, again, expected in zip(first, second, right, strict=True):
        assert torch.equal(mine, again)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    rows = torch.randn(2, 48, 16).transpose(1, 2).requires_grad_()
    o = attending._Heads.apply(2, None, rows)
    assert torch.equal(o, attending._Heads.apply(2, None, rows.contiguous()))


def test_a_network_compiles_its_attention_before_a_run_and_not_while_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    net = nets.build("conv3attn", (1, 16, 16), 10)
    x = torch.rand(2, 1, 16, 16)
    plain = net(x)
    asked: list[tuple[int, ...]] = []
    kernel = attending.kernel
    monkeypatch.setattr(attending, "kernel", lambda *size: asked.append(size) or kernel(*size))
    net.compiled = True
    net.width(torch.zeros(2, 1, 16, 16), len(net.layers) - 1)
    assert asked == []
    net.probe((1, 16, 16))
    _lay_out(net.clone(), (1, 16, 16))
    assert asked == []
    net.ready()
    assert asked == [(16, 32)] * 2, "it is compiled and tried"
    torch.testing.assert_close(net.clone()(x), plain, rtol=0, atol=1e-5)
    assert asked == [(16, 32)] * 3
    assert torch.equal(net.plain()(x), plain)
    monkeypatch.setattr(attending, "kernel", kernel)
    kernel.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    net.compiled = True
    with pytest.raises(ConfigError, match="no-such-compiler"):
        net.ready()


def test_a_network_of_attention_alone_can_be_compiled() -> None:
    layers = torch.nn.Sequential(CrossAttention(8, 4, 4, heads=1), torch.nn.Flatten(), torch.nn.Linear(128, 3))
    net = perfed.wrap(layers, "2", (8, 4, 4))
    assert not net.compiled
    net.compiled = True
    assert net.compiled
    assert not net.with_head(torch.nn.Linear(128, 4), 4).compiled
    assert not net.plain().compiled


def test_a_network_made_of_a_compiled_one_is_as_torch_has_it_until_it_is_asked() -> None:
    net = nets.build("conv3attn", (1, 16, 16), 10)
    net.compiled = True
    other = perfed.nets.Net(net.clone().module, net.prefixes, net.input_shape, net.num_classes)
    assert not other.compiled
    other.compiled = True
    assert other._pass.fused == net._pass.fused != frozenset()
    mixture = FedEM(M=2).build(net)
    assert not mixture.compiled
    assert not any(part.compiled for part in mixture.module.modules() if isinstance(part, CrossAttention))
