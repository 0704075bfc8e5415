"""Gradients straight through compiled code: what they are, for what they are, and what a run with them is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import perfed
from perfed import nets
from perfed.core.fit import set_trainable
from perfed.nets import Net, compiler, fused, straight
from perfed.nets.straight import ROOMS, Straight
from perfed.nets.written import written
from perfed.prepare import prepare


def made(*modules: nn.Module, shape: tuple[int, ...] = (2, 9, 9), seed: int = 0) -> Net:
    torch.manual_seed(seed)
    for module in modules:
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()
    net = perfed.wrap(nn.Sequential(*modules), str(len(modules) - 1), shape)
    net.compiled = True
    net.module.to(memory_format=torch.channels_last)
    return net


def block(inputs: int, outputs: int, size: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, padding=padding), nn.MaxPool2d(2), nn.ReLU()]


def lenet(shape: tuple[int, int, int]) -> Net:
    torch.manual_seed(0)
    net = nets.build("lenet5", shape, 10)
    net.compiled = True
    net.module.to(memory_format=torch.channels_last)
    return net


def build(name: str) -> Net:
    match name:
        case "gray":
            return lenet((1, 28, 28))
        case "colour":
            return lenet((3, 32, 32))
        case "one layer":
            return made(*block(2, 8, 2), nn.Flatten(), nn.Linear(128, 3))
        case "deep":  # odd maps, partial vectors, ReLU left out, a layer that is nothing
            first, rest = block(2, 19, 4, 1), block(19, 5, 1)
            linears = nn.Linear(20, 33), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 4)
            return made(*first, nn.Identity(), *rest, nn.Flatten(), *linears)
        case "narrow":  # vectors are longer than maps
            return made(*block(1, 4, 3), nn.Flatten(), nn.Linear(8, 3), shape=(1, 6, 4))
        case _:  # one channel and many filters, and few filters with wide rows
            return made(*block(1, 40, 3), *block(40, 2, 2), nn.Flatten(), nn.Linear(18, 6), shape=(1, 18, 18))


NAMES = ["gray", "colour", "one layer", "deep", "narrow", "wide"]


def samples(net: Net, n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n, *net.input_shape), torch.randint(net.num_classes, (n,))


def known(net: Net, trained: Sequence[Tensor], cut: int = 0) -> Straight:
    """What computes the gradients, which there must be."""
    found = written(net, cut, trained)
    assert found is not None
    assert found.quick is not None
    return found.quick


def computed(quick: Straight, x: Tensor, y: Tensor) -> list[Tensor]:
    assert quick.takes(x, y)
    found = quick(x, y)
    assert found is not None
    return found


def exact(net: Net, x: Tensor, y: Tensor, cut: int, trained: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients by torch, in twice as many bits."""
    plain, names = net.clone(), {id(parameter): name for name, parameter in net.module.named_parameters()}
    plain.compiled = False
    plain.module.double()
    parameters = dict(plain.module.named_parameters())
    z = plain.run_suffix(x.double(), cut) if cut else plain(x.double())
    return list(torch.autograd.grad(F.cross_entropy(z, y), [parameters[names[id(one)]] for one in trained]))


def alike(found: Sequence[Tensor], right: Sequence[Tensor], trained: Sequence[Tensor]) -> None:
    for mine, other, parameter in zip(found, right, trained, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5 * scale)
        assert mine.stride() == parameter.stride()
        assert not mine.requires_grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 10, 16, 33])
def test_gradients_are_those_of_autograd(name: str, n: int) -> None:
    net = build(name)
    x, y = samples(net, n)
    for trains in (net.layers, net.layers[:1], net.layers[-1:], net.layers[::2], net.layers[1:]):
        trained = set_trainable(net, trains)
        for cut in {0, net.cut(trains)}:
            z = net.run_prefix(x, cut).detach()
            if not any(len(group) > 1 for group in net.groups_from(cut)) and z.dim() > 2 and cut:
                z = z.flatten(1) if written(net, cut, trained).flat else z  # type: ignore[union-attr]
            alike(computed(known(net, trained, cut), z, y), exact(net, z, y, cut, trained), trained)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 70), min_size=2, max_size=4),
    cuts=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_linear_layers_of_any_size(n: int, sizes: list[int], cuts: list[bool]) -> None:
    torch.manual_seed(n)
    modules: list[nn.Module] = [*block(1, 2, 1), nn.Flatten(), nn.Linear(8, sizes[0])]
    for one, two, cut in zip(sizes, sizes[1:], cuts, strict=False):
        modules += [nn.ReLU()] * cut + [nn.Linear(one, two)]
    net = made(*modules, shape=(1, 4, 4), seed=n)
    trained, (x, y) = set_trainable(net, net.layers), samples(net, n)
    alike(computed(known(net, trained), x, y), exact(net, x, y, 0, trained), trained)


def test_memory_that_is_kept_holds_nothing_of_the_batch_before() -> None:
    net = lenet((1, 28, 28))
    trained = set_trainable(net, net.layers)
    quick, batches = known(net, trained), [samples(net, n, seed) for seed, n in enumerate((16, 5, 16, 1, 2, 3, 4, 5))]
    x, y = batches[0]
    quick(x * torch.nan, y)
    for x, y in [*batches, *batches[::-1]]:
        fresh = computed(known(net, trained), x, y)
        found = computed(quick, x, y)
        assert all(torch.equal(mine, right) for mine, right in zip(found, fresh, strict=True))
        assert len(quick._rooms) <= ROOMS
    assert len(quick._rooms) == ROOMS


def test_gradients_that_were_given_stay() -> None:
    net = build("deep")
    quick = known(net, set_trainable(net, net.layers))
    first = computed(quick, *samples(net, 8))
    kept = [one.clone() for one in first]
    computed(quick, *samples(net, 8, seed=2))
    assert all(torch.equal(mine, right) for mine, right in zip(first, kept, strict=True))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_layout_of_images_changes_nothing(layout: torch.memory_format) -> None:
    net = build("colour")
    quick, (x, y) = known(net, set_trainable(net, net.layers)), samples(net, 6)
    expected = computed(quick, x[:5].clone(), y[:5])
    for images in (x.contiguous(memory_format=layout), torch.stack([x, x], 2)[:, :, 0]):
        found = computed(quick, images[:5], y[:5])
        assert all(torch.equal(mine, right) for mine, right in zip(found, expected, strict=True))


@pytest.fixture
def anew() -> Iterator[None]:
    """Libraries are looked for anew, before and after."""
    straight.library.cache_clear()
    fused._kernel.cache_clear()
    yield
    straight.library.cache_clear()
    fused._kernel.cache_clear()


@pytest.mark.skipif("avx512vl" not in compiler._processor(), reason="the processor has one length of vectors")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [3, 32])
def test_the_sums_do_not_depend_on_the_length_of_vectors(
    name: str, n: int, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    net = build(name)
    trained, (x, y) = set_trainable(net, net.layers), samples(net, n)
    expected = computed(known(net, trained), x, y)
    for tuned in ("", "-mtune=haswell", "-mtune=znver3"):
        monkeypatch.setenv("CC", f"{compiler.compiler({})[0]} -mno-avx512f {tuned}")
        straight.library.cache_clear()
        fused._kernel.cache_clear()
        found = computed(known(net, trained), x, y)
        assert all(torch.equal(mine, right) for mine, right in zip(found, expected, strict=True))


SANITIZER = Path(
    subprocess.run(
        [*compiler.compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
)


@pytest.mark.skipif(not SANITIZER.is_absolute(), reason="the compiler has no address sanitizer")
def test_nothing_but_its_own_memory_is_touched(tmp_path: Path) -> None:
    watched = f"{compiler.compiler()[0]} -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    words = {"CC": watched, "LD_PRELOAD": str(SANITIZER), "ASAN_OPTIONS": "detect_leaks=0"}
    words |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONMALLOC": "malloc"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_nets_straight"],
        env={**os.environ, **words},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "dense-" in "".join(path.name for path in (tmp_path / "perfed").iterdir())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    net = lenet((1, 28, 28))
    trained, (x, y) = set_trainable(net, net.layers), samples(net, 4)
    x[2, 0, 14, 14] = bad
    if bad != bad:  # an infinite value may well be cut off by ReLU
        for mine in computed(known(net, trained), x, y):
            assert not mine.isfinite().all()
    for name, parameter in net.module.named_parameters():
        clean, (x, y) = parameter.detach().clone(), samples(net, 4)
        with torch.no_grad():
            parameter[(-1,) * parameter.dim()] = bad
        right, found = exact(net, x, y, 0, trained), computed(known(net, trained), x, y)
        for mine, other in zip(found, right, strict=True):
            assert mine.isfinite().all() <= other.isfinite().all(), name
        parameter.data.copy_(clean)


def test_large_scores_do_not_overflow() -> None:
    net = build("one layer")
    trained, (x, y) = set_trainable(net, net.layers), samples(net, 4)
    x *= 1e6
    alike(computed(known(net, trained), x, y), exact(net, x, y, 0, trained), trained)


ODD: dict[str, list[nn.Module]] = {
    "a large layer": [nn.Flatten(), nn.Linear(32, 2100), nn.ReLU(), nn.Linear(2100, 10)],
    "no bias": [nn.Flatten(), nn.Linear(32, 32, bias=False), nn.Linear(32, 10)],
    "pooling": [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 10)],
    "a convolution by torch": [nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(32, 10)],
    "ReLU after flattening": [nn.Flatten(), nn.ReLU(), nn.Linear(32, 10)],
    "flattened twice": [nn.Flatten(), nn.Flatten(), nn.Linear(32, 10)],
}


@pytest.mark.parametrize("kind", ODD)
def test_other_networks_are_left_to_torch(kind: str) -> None:
    net = made(*block(2, 2, 2), *ODD[kind])
    trained, (x, y) = set_trainable(net, net.layers), samples(net, 5)
    found = written(net, 0, trained)
    assert found is None or found.quick is None
    if found:
        alike(found(x, y), exact(net, x, y, 0, trained), trained)


def test_what_is_trained_by_half_is_left_to_torch() -> None:
    net = build("one layer")
    trained = set_trainable(net, net.layers)
    trained[0].requires_grad_(False)
    found = written(net, 0, trained[1:])
    assert found is not None
    assert found.quick is None


def test_without_compiled_kernels_all_is_left_to_torch() -> None:
    net = build("one layer")
    net.compiled = False
    found = written(net, 0, set_trainable(net, net.layers))
    assert found is not None
    assert found.quick is None


def test_samples_that_are_none_of_its_own_are_left_to_torch() -> None:
    net = lenet((1, 28, 28))
    quick, (x, y) = known(net, set_trainable(net, net.layers)), samples(net, 4)
    assert quick.takes(x, y)
    for odd in (x.double(), x[:0], x[..., :20], x[:, :, :5, :5], x[0], x.expand(4, 2, 28, 28)):
        assert not quick.takes(odd, y[: len(odd)])
    for labels in (y.int(), y[:3], y.view(4, 1), y.double(), torch.stack([y, y], 1)[:, 0]):
        assert not quick.takes(x, labels)


def test_weights_that_others_took_the_place_of() -> None:
    net = lenet((1, 28, 28))
    trained, (x, y) = set_trainable(net, net.layers), samples(net, 4)
    found = written(net, 0, trained)
    assert found is not None
    found(x, y)
    for parameter in trained:
        parameter.data = torch.randn_like(parameter) / 9
    alike(found(x, y), exact(net, x, y, 0, trained), trained)
    assert known(net, trained).takes(x, y)
    trained[-2].data = trained[-2].data.t().contiguous().t()
    assert found.quick is not None
    assert not found.quick.takes(x, y)
    alike(found(x, y)[:-2], exact(net, x, y, 0, trained)[:-2], trained[:-2])
    trained[-2].data = trained[-2].data.contiguous()
    assert found.quick.takes(x, y)
    trained[4].data, trained[5].data = trained[4].data[:100], trained[5].data[:100]  # at the same place, but fewer
    trained[6].data = trained[6].data[:, :100].contiguous()
    assert not found.quick.takes(x, y)
    alike(found(x, y), exact(net, x, y, 0, trained), trained)


def test_weights_that_lie_another_way_at_the_same_place() -> None:
    net = made(*block(2, 8, 2), nn.Flatten(), nn.Linear(128, 32), nn.Linear(32, 32), nn.Linear(32, 3))
    trained, (x, y) = set_trainable(net, net.layers), samples(net, 4)
    quick = known(net, trained)
    assert quick.takes(x, y)
    trained[4].data = trained[4].data.t()
    assert not quick.takes(x, y)


def test_what_is_frozen_afterwards_changes_nothing() -> None:
    net = build("gray")
    trained, (x, y) = set_trainable(net, net.layers), samples(net, 4)
    quick = known(net, trained)
    expected = computed(quick, x, y)
    set_trainable(net, net.layers[:1])
    found = computed(quick, x, y)
    assert all(torch.equal(mine, right) for mine, right in zip(found, expected, strict=True))


def test_biases_that_come_before_their_weights_are_left_to_autograd() -> None:
    net = build("one layer")
    head = net.module.get_submodule("4")
    prune.random_unstructured(head, "weight", amount=0.5)  # type: ignore[no-untyped-call]
    prune.remove(head, "weight")  # type: ignore[no-untyped-call]
    assert [*dict(head.named_parameters())] == ["bias", "weight"]
    assert written(net, 0, set_trainable(net, net.layers)) is None


def test_labels_that_are_no_classes_are_torchs_to_judge() -> None:
    net = lenet((1, 28, 28))
    trained, (x, y) = set_trainable(net, net.layers), samples(net, 4)
    found = written(net, 0, trained)
    assert found is not None
    for bad in (10, -1):
        y[2] = bad
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            found(x, y)
    y[2] = -100  # by which cross-entropy knows what is to be passed over
    alike(found(x, y), exact(net, x, y, 0, trained), trained)


def test_in_another_default_precision(anew: None) -> None:
    net = lenet((1, 28, 28))
    trained, (x, y) = set_trainable(net, net.layers), samples(net, 4)
    expected = computed(known(net, trained), x, y)
    torch.set_default_dtype(torch.float64)
    try:
        found = computed(known(net, trained), x, y)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(mine, right) for mine, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "cd2pfed", "pfedc", "pfedme"])
def test_a_run_has_the_same_bits_however_it_is_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[int] = []
    compute = Straight.__call__

    def counted(self: Straight, x: Tensor, y: Tensor) -> list[Tensor] | None:
        calls.append(len(x))
        return compute(self, x, y)

    monkeypatch.setattr(Straight, "__call__", counted)
    words: dict[str, Any] = {
        **{"method": name, "net": {"name": "cnn", "channels": [4, 8]}, "clients": 5, "rounds": 2, "fraction": 1.0},
        **{"data": {"name": "digits", "samples": 160}, "kernels": "compiled"},
    }
    serial = perfed.run(**words)
    assert bool(calls) == (name in {"fedavg", "fedrep", "pfedme"})
    assert perfed.run(**words, workers=2).state_sha256 == serial.state_sha256
    run = prepare(serial.config)
    assert run.simulation(tmp_path / "stopped").run(stop_after=1) is None
    resumed = run.simulation(tmp_path / "stopped", workers=2).run()
    assert resumed is not None
    assert resumed.state_sha256 == serial.state_sha256
    monkeypatch.setattr("perfed.nets.written.straight", lambda groups: None)
    torchs = perfed.run(**words)
    assert torchs.cost["flops"] == serial.cost["flops"]
    assert (torchs.state_sha256 != serial.state_sha256) == bool(calls)


def touch_all() -> None:
    """What is watched for memory that is none of its own."""
    for name in ("gray", "deep", "narrow"):
        net = build(name)
        trained = set_trainable(net, net.layers)
        for n in (1, 16, 33):
            computed(known(net, trained), *samples(net, n))


def test_autocast_is_left_to_torch() -> None:
    net = lenet((1, 28, 28))
    short = written(net, 0, set_trainable(net, net.layers))
    assert short is not None
    assert short.quick is not None
    x, y = torch.rand(4, 1, 28, 28).contiguous(memory_format=torch.channels_last), torch.arange(4)
    assert short.quick.takes(x, y)
    assert not short.quick.takes(torch._neg_view(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        assert not short.quick.takes(x, y)


if __name__ == "__main__":
    touch_all()
