"""Networks that compute in bfloat16: nothing but the products inside has fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfed
from perfed import config, nets
from perfed.core import registry
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.errors import ConfigError, StoreError
from perfed.methods.pse import alpha, divide, excited, extract
from perfed.nets.net import Net
from perfed.prepare import first_weights, prepare
from tests.conftest import small_net

HALF = torch.bfloat16
NETS = ("cnn", "lenet5", "mlp", "conv3attn", "resnet18")


def pair(name: str) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    side = nets.min_size(name) or 8
    net = nets.build(name, (1, side, side), 10, **({"width": 0.0625} if name == "resnet18" else {}))
    return net, torch.rand(8, 1, side, side), torch.arange(8)


@pytest.mark.parametrize("name", NETS)
def test_products_have_fewer_bits_and_results_all_of_them(name: str) -> None:
    net, x, y = pair(name)
    net.module.eval()
    seen: list[torch.dtype] = []
    layer = next(m for m in reversed(list(net.module.modules())) if isinstance(m, nn.Linear))
    layer.register_forward_hook(lambda module, args, made: seen.append(made.dtype))
    full = net(x).detach()
    net.precision = HALF
    half = net(x)
    assert seen == [torch.float32, HALF]
    assert half.dtype == net.features(x).dtype == torch.float32
    assert not torch.equal(half, full)
    torch.testing.assert_close(half.detach(), full, rtol=0.05, atol=0.05 * float(full.abs().max()))
    F.cross_entropy(half, y).backward()
    assert {p.grad.dtype for p in net.module.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("name", NETS)
def test_a_cut_changes_nothing_but_the_bits_of_sums_after_it(name: str) -> None:
    net, x, _ = pair(name)
    net.module.eval()
    net.precision = HALF
    for k in range(len(net.layers) + 1):
        part = net.run_prefix(x, k)
        assert part.dtype == torch.float32
        near = 0.02 if name == "resnet18" else 0.0  # its blocks add what they received, which has all bits after a cut
        torch.testing.assert_close(net.run_suffix(part, k), net(x), rtol=0, atol=near)


def test_weights_that_moved_are_used() -> None:
    """Autocast may keep a weight's copy with fewer bits; one of the weight as it was would be wrong."""
    net, x, _ = pair("mlp")
    net.precision = HALF
    before = net(x)
    with torch.no_grad():
        for parameter in net.module.parameters():
            parameter.add_(0.1)
    assert not torch.equal(net(x), before)


def test_channels_that_differ_little_are_told_apart() -> None:
    """sigmoid(alpha) is near 1/2, where bfloat16 has steps of 0.002 or more: alpha has all bits."""
    net, x, y = pair("conv3attn")
    net.precision = HALF
    local, attention, linear = divide(net)
    with net.computing():
        features, maps = extract(local, x)
        p = linear(attention(features)).float()
    assert maps[0].dtype == HALF
    found = alpha(p, y, features, features, maps)
    assert {a.dtype for a in found} == {torch.float32}
    assert excited(found[2], found[2] + 1e-4).any(), "a lead that bfloat16 cannot hold"


@pytest.mark.parametrize("word", ["float16", "half", "bf16"])
def test_another_precision_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="precision"):
        config.resolve({"precision": word})


def test_a_cohort_is_refused(digits: Federation) -> None:
    net = small_net(digits)
    net.precision = HALF
    method = registry.make("fedavg", lr=0.05)
    with pytest.raises(ConfigError, match="bfloat16"):
        Simulation(digits, net, method, Settings(rounds=2), numerics="cohort")


def test_a_run_says_its_precision_and_goes_on_with_it(tmp_path: Path) -> None:
    words: dict[str, Any] = {"method": "fedrep", "net": "mlp", "clients": 5, "rounds": 2, "val_fraction": 0.0}
    full = perfed.run(**words)
    half = perfed.run(**words, precision="bfloat16", out=tmp_path / "half")
    assert half.state_sha256 != full.state_sha256
    assert half.config.precision == "bfloat16"
    assert "precision" not in full.config.identity()
    assert perfed.run(**words, precision="bfloat16", workers=2).state_sha256 == half.state_sha256
    made = prepare(half.config)
    assert first_weights(made.config, made.net, made.method).precision == HALF
    other = prepare(full.config)
    with pytest.raises(StoreError):
        other.simulation(tmp_path / "half")
