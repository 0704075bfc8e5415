"""Networks that compute in bfloat16: what is computed so, and what is not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfed
from perfed import config, nets
from perfed.core import registry
from perfed.core.client import Batch, Client
from perfed.core.fit import set_trainable
from perfed.core.state import State
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.errors import ConfigError, NetError, StoreError
from perfed.explain.explanation import explain
from perfed.export import export
from perfed.methods.perfedavg import PerFedAvg
from perfed.methods.pse import alpha, divide, excited, extract
from perfed.nets import halfbits
from perfed.nets.net import Net
from perfed.prepare import first_weights, prepare
from tests.conftest import small_net
from tests.runs import at_work, whole

HALF = torch.bfloat16
NETS = ("cnn", "lenet5", "mlp", "conv3attn", "resnet18")


def pair(name: str) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    side = nets.min_size(name) or 8
    net = nets.build(name, (1, side, side), 10, **({"width": 0.0625} if name == "resnet18" else {}))
    return net, torch.rand(8, 1, side, side), torch.arange(8)


@pytest.mark.parametrize("name", NETS)
def test_products_have_fewer_bits_and_nobody_outside_meets_the_type(name: str) -> None:
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
    with net.computing():
        before = net.module(x)
        with torch.no_grad():
            for parameter in net.module.parameters():
                parameter.add_(0.1)
        assert not torch.equal(net.module(x), before)


def test_small_differences_of_gradients_are_taken_in_full(digits: Federation) -> None:
    """Per-FedAvg's Hessian-free step divides by 2 delta what two gradients differ by."""
    found = []
    for precision in (None, HALF):
        client = at_work(registry.make("perfedavg", lr=0.05, variant="hf", alpha=0.5), digits, net=small_net(digits))
        client.net.precision = precision
        set_trainable(client.net, client.net.layers)
        batch, method = whole(client), client.plan.method
        assert isinstance(method, PerFedAvg)
        found.append([_flat(part) for part in _hessian_term(method, client, batch)])
    (term, _), (rough, _) = found
    assert float((rough - term).norm()) < 0.3 * float(term.norm())


def _hessian_term(method: PerFedAvg, client: Client, batch: Batch) -> tuple[State, State]:
    """What the Hessian-free step adds to the first-order one, and that one."""
    simple = dataclasses.replace(method, variant="fo").meta_gradient(client, batch, batch, batch)
    whole = method.meta_gradient(client, batch, batch, batch)
    return {name: whole[name] - simple[name] for name in whole}, simple


def _flat(state: State) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in state.values()])


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


@pytest.mark.parametrize(("dies", "unit"), [(True, True), (False, True), (True, False)])
def test_a_matrix_unit_that_kills_is_refused(
    dies: bool, unit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells = tmp_path / "cpuinfo"
    tells.write_text("flags\t\t: avx512f avx512_bf16" + unit * " amx_bf16" + "\n")
    monkeypatch.setattr(halfbits, "CPUINFO", tells)
    trial = "import os, signal\n" + dies * "os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(halfbits, "works", partial(halfbits.works.__wrapped__, trial))
    if dies and unit:
        with pytest.raises(ConfigError, match=r"precision = 'bfloat16'.*ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
            perfed.run(net="mlp", clients=5, rounds=1, precision="bfloat16")
    else:
        assert perfed.run(net="mlp", clients=5, rounds=1, precision="bfloat16").config.precision == "bfloat16"


def test_what_is_tried_is_what_would_be_computed() -> None:
    """The trial names operators of torch: where nothing kills it, it ends well."""
    assert subprocess.run([sys.executable, "-c", halfbits.TRIAL], check=False).returncode == 0


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
    assert made.simulation(tmp_path / "stopped").run(stop_after=1) is None
    resumed = made.simulation(tmp_path / "stopped", workers=2).run()
    assert resumed is not None
    assert resumed.state_sha256 == half.state_sha256
    other = prepare(full.config)
    with pytest.raises(StoreError):
        other.simulation(tmp_path / "half")


@pytest.mark.parametrize("method", ["fedavg", "pfedc"])
def test_models_that_are_looked_at_have_all_bits(method: str, tmp_path: Path) -> None:
    words: dict[str, Any] = {"net": "cnn", "clients": 5, "rounds": 1, "precision": "bfloat16"}
    result = perfed.run(method={"name": method, "lr": 0.05}, data={"name": "digits", "samples": 200}, **words)
    x = result.made().federation.client(0).test.x
    scores = result.model(0)(x).detach()
    assert not torch.equal(scores, scores.to(HALF).float())
    torch.testing.assert_close(scores.softmax(1), result.predict(0, x), rtol=0, atol=1e-5)
    explain(result, 0)
    export(result, 0, tmp_path / "taken", "onnx")
    session = import_module("onnxruntime").InferenceSession(tmp_path / "taken" / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.tensor(found), scores, rtol=0, atol=1e-4)


def test_a_network_that_cannot_be_computed_so_is_refused(tmp_path: Path) -> None:
    class Writes(nn.Module):
        """Puts what a layer gives into a tensor of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            held = torch.zeros(len(x), 8)
            held[torch.arange(len(x))] = self.body(x.flatten(1))
            made: Tensor = self.head(held)
            return made

    net = perfed.wrap(Writes(), head="head")
    assert perfed.run(net=net, clients=5, rounds=1).metrics
    with pytest.raises(NetError, match="bfloat16"):
        perfed.run(net=net, clients=5, rounds=1, precision="bfloat16")
