"""Sealed sums: exact on the grid, opened by clients alone, damage refused."""

from __future__ import annotations

import stat
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from perfed.errors import ExtraError, StoreError, UpdateError
from perfed.privacy import ckks

tenseal = import_module("tenseal")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ckks.Keyring:
    return ckks.keyring(str(tmp_path_factory.mktemp("keys") / "clients.ckks"))


def some(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_a_sum_is_exact_on_the_grid(keys: ckks.Keyring) -> None:
    values = [some(ckks.SLOTS + 5, seed, scale=3.0) for seed in range(4)]
    total = ckks.add([keys.seal(v, 4) for v in values])
    assert total.shape == (2, ckks.FRAME)
    assert total.dtype == torch.uint8
    assert torch.equal(keys.open(total, ckks.SLOTS + 5), sum(ckks.on_grid(v) for v in values))


def test_the_noise_of_a_sum_is_far_below_the_grid(keys: ckks.Keyring) -> None:
    """Below a quarter of a step for a hundred summands, where a half is what rounding can bear."""
    values = [some(ckks.SLOTS, seed) for seed in range(100)]
    total, want = ckks.add([keys.seal(v, 100) for v in values]), sum(ckks.on_grid(v) for v in values)
    raw = torch.tensor(tenseal.ckks_vector_from(keys._context, ckks._bytes(total[0])).decrypt(), dtype=torch.float64)
    assert float((raw - want).abs().max()) < ckks.GRID / 4
    assert torch.equal(keys.open(total, ckks.SLOTS), want)


def test_equal_values_look_different_and_have_the_same_shape(keys: ckks.Keyring) -> None:
    zero, one = torch.zeros(10), torch.ones(10)
    sealed = [keys.seal(v, 2) for v in (zero, zero, one)]
    assert len({s.numpy().tobytes() for s in sealed}) == 3
    assert len({s.shape for s in sealed}) == 1


def test_the_server_s_context_opens_nothing(keys: ckks.Keyring) -> None:
    context = ckks._server_context(0)
    assert not context.is_private()
    sealed = tenseal.ckks_vector_from(context, ckks._bytes(keys.seal(some(5), 1)[0]))
    with pytest.raises(ValueError, match="secret_key"):
        sealed.decrypt()
    with pytest.raises(ValueError, match="Secret"):
        context.secret_key()


def test_values_out_of_range_are_refused(keys: ckks.Keyring) -> None:
    keys.seal(torch.tensor([100.0]), 100)
    for bad in (200.0, float("nan"), float("inf")):
        with pytest.raises(UpdateError, match="cannot be sealed"):
            keys.seal(torch.tensor([bad]), 100)


def test_bytes_that_are_no_ciphertext_are_refused(keys: ckks.Keyring) -> None:
    good = keys.seal(some(5), 1)
    ckks.check(good, "Client 3")
    noise = torch.randint(256, good.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    long, cut, empty = good.clone(), good.clone(), torch.zeros_like(good)
    long[0, :8] = 255
    cut[0, :8] = torch.frombuffer(bytearray((1000).to_bytes(8, "little")), dtype=torch.uint8)
    short = torch.stack([ckks._framed(tenseal.ckks_vector(keys._context, [1.0, 2.0]).serialize())])
    other = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 4096, coeff_mod_bit_sizes=[40, 40])
    other.global_scale = 2.0**20
    foreign = torch.stack([ckks._framed(tenseal.ckks_vector(other, [1.0] * 2048).serialize())])
    for bad in (noise, long, cut, empty, short, foreign):
        with pytest.raises(UpdateError, match="Client 3"):
            ckks.check(bad, "Client 3")


def test_another_key_does_not_open_a_sum(keys: ckks.Keyring, tmp_path: Path) -> None:
    other = ckks.keyring(str(tmp_path / "other"))
    assert not torch.equal(other.open(keys.seal(some(5), 1), 5), ckks.on_grid(some(5)))


def test_the_key_file_is_the_owner_s_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "clients.ckks"
    ckks.keyring(str(path))
    before = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ckks.Keyring.make(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["clients.ckks"]


def test_damaged_and_public_key_files_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"not a key")
    with pytest.raises(StoreError, match="bad"):
        ckks.Keyring(bad)
    public = tmp_path / "public"
    public.write_bytes(ckks._server_context(0).serialize())
    with pytest.raises(StoreError, match="not a key file"):
        ckks.Keyring(public)
    with pytest.raises(StoreError, match="missing"):
        ckks.Keyring(tmp_path / "missing")


def test_without_the_package_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(ExtraError, match=r"perfed\[privacy\]"):
        ckks.tenseal()
