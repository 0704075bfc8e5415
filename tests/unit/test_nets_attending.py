"""Compiled attention: what it computes is what torch computes, for which heads, and that nothing is hidden."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import perfed
from perfed import nets
from perfed.errors import ConfigError
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
def test_the_same_as_torch(shape: tuple[int, ...], position: bool) -> None:
    attention, q, kv = block(shape, position)
    theirs = attention(q, kv)
    d = torch.randn_like(theirs)
    attention.compiled = True
    ours = attention(q, kv)
    assert not torch.equal(ours, theirs) or shape[2] * shape[3] == 1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    mine = gradients(ours, d, q, kv, *attention.parameters())
    attention.compiled = False
    exact, wide = attention.double(), [z.detach().double().requires_grad_() for z in (q, kv)]
    right = gradients(exact(*wide), d.double(), *wide, *exact.parameters())
    for found, expected in zip(mine, right, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()) + 1e-7)


def test_large_scores_are_no_trouble_and_what_is_not_finite_is_not_hidden() -> None:
    attention, q, _ = block((16, 2, 3, 3, 2))
    theirs = attention(300 * q)
    attention.compiled = True
    torch.testing.assert_close(attention(300 * q), theirs, rtol=1e-4, atol=1e-3)
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
    attention, q, _ = block((8, 1, 3, 3, 2))
    attention.double().compiled = True
    assert attention(q.double()).dtype == torch.float64


@pytest.fixture
def anew() -> Iterator[None]:
    """Kernels are looked for anew, before and after."""
    attending.kernel.cache_clear()
    yield
    attending.kernel.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only there the flags that change vectors are known")
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx512f -mprefer-vector-width=128"])
def test_the_sums_do_not_depend_on_the_length_of_vectors(
    flags: str, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    attention, q, kv = block((64, 2, 7, 7, 2))
    attention.compiled = True
    o = attention(q, kv)
    d = torch.randn_like(o)
    expected = [o, *gradients(o, d, q, kv)]
    monkeypatch.setenv("CC", f"{compiler.compiler()[0]} {flags}")
    attending.kernel.cache_clear()
    o = attention(q, kv)
    for mine, right in zip([o, *gradients(o, d, q, kv)], expected, strict=True):
        assert torch.equal(mine, right)


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
    net.ready()
    assert asked == [(16, 32)]
    torch.testing.assert_close(net.clone()(x), plain, rtol=0, atol=1e-5)
    assert asked == [(16, 32)] * 2
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
    assert not net.plain().compiled
