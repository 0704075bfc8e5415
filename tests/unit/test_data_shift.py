"""Shifts: what is done to whose images or labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from perfed.data import Source, federate, from_tensors
from perfed.data.canny import canny
from perfed.data.federation import PARTS
from perfed.data.shift import parse
from perfed.errors import ConfigError, DataError, SplitError, UnknownNameError


def source(n: int = 120, channels: int = 1, side: int = 8) -> Source:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 200, (n, channels, side, side), dtype=torch.uint8, generator=g)
    return from_tensors(x, torch.arange(n) % 4, name="noise")


def pixels(x: torch.Tensor) -> torch.Tensor:
    return ((x * 0.5 + 0.5) * 255).round().to(torch.uint8)


def photographs(folder: Path, colours: list[tuple[int, int, int]], side: int = 20) -> Path:
    folder.mkdir()
    for k, colour in enumerate(colours):
        Image.new("RGB", (side, side), colour).save(folder / f"{k}.png")
    return folder


def test_colour_adds_a_crop_to_the_gray_image(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "photos", [(10, 20, 100)])
    plain = federate(source(), clients=3, split="iid")
    f = federate(source(), clients=3, split="iid", shift=f"colour:{folder}")
    assert f.input_shape == (3, 8, 8)
    was, now = pixels(plain.client(1).test.x).int(), pixels(f.client(1).test.x).int()
    for channel, added in enumerate((10, 20, 100)):
        assert torch.equal(now[:, channel], (was[:, 0] + added).clamp(max=255))


def test_crops_differ_by_sample_and_seed_and_come_from_every_photograph(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k in range(3):
        noise = rng.integers(0, 50, (30, 40, 3)).astype(np.uint8)
        noise[..., 2] = 60 * k
        Image.fromarray(noise).save(folder / f"{k}.png")
    dark = from_tensors(torch.zeros(60, 1, 8, 8, dtype=torch.uint8), torch.arange(60) % 4)
    a, b, c = (
        federate(dark, clients=1, split="iid", shift="colour:photos", data_dir=tmp_path, seed=s) for s in (0, 0, 1)
    )
    x = pixels(a.client(0).train.x)
    assert set(x[:, 2].unique().tolist()) == {0, 60, 120}
    assert len({i.numpy().tobytes() for i in x}) > 0.9 * len(x)
    assert a.sha256 == b.sha256 != c.sha256


def test_joined_shifts_go_round_the_clients(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "a+edge case", [(0, 0, 50)])
    f = federate(source(), clients=5, split="iid", shift=f"gray+colour:{folder}")
    for i in range(5):
        x = pixels(f.client(i).train.x).int()
        assert torch.equal(x[:, 2] - x[:, 0], torch.full_like(x[:, 0], 50 * (i % 2)))


def test_whole_copies_are_divided_among_their_own_clients(tmp_path: Path) -> None:
    s, folder = source(), photographs(tmp_path / "photos", [(0, 0, 50)])
    f = federate(s, clients=6, split="classes:2", shift=f"whole:gray+colour:{folder}")
    total = sum(f.sizes(p) for p in PARTS)
    assert total[::2].sum() == total[1::2].sum() == len(s.y)
    assert not np.array_equal(f.counts()[::2], f.counts()[1::2])  # the copies are divided independently
    for part in (0, 1):
        red = torch.cat([pixels(getattr(f.client(i), p).x)[:, 0] for i in range(part, 6, 2) for p in PARTS])
        assert sorted(red.flatten(1).sum(1).tolist()) == sorted(s.x.flatten(1).sum(1).tolist())
    with pytest.raises(SplitError, match="multiple of 2"):
        federate(s, clients=5, split="iid", shift=f"whole:gray+colour:{folder}")


def test_rotation_by_client() -> None:
    plain = federate(source(), clients=5, split="iid")
    f = federate(source(), clients=5, split="iid", shift="rotate:0,90,180")
    for i, turns in enumerate((0, 1, 2, 0, 1)):
        assert torch.equal(f.client(i).train.x, torch.rot90(plain.client(i).train.x, turns, (2, 3)))


def test_other_angles_turn_the_same_way_as_right_angles() -> None:
    x = torch.zeros(8, 1, 21, 21, dtype=torch.uint8)
    x[:, :, 9:12, 10:] = 255  # a hand that points right
    s = from_tensors(x, torch.zeros(8, dtype=torch.long))
    f = federate(s, clients=1, split="iid", shift="rotate:45")
    mean = pixels(f.client(0).train.x)[0, 0].float()
    yy, xx = torch.meshgrid(torch.arange(21.0), torch.arange(21.0), indexing="ij")
    assert float((mean * (10 - yy)).sum()) > 0  # up
    assert float((mean * (xx - 10)).sum()) > 0  # and right
    assert float(mean[4, 16]) > 200
    near = federate(s, clients=1, split="iid", shift="rotate:89.999")
    exact = federate(s, clients=1, split="iid", shift="rotate:90")
    assert float((near.client(0).train.x - exact.client(0).train.x).abs().max()) < 0.02


def test_label_permutation_is_one_bijection_per_group() -> None:
    plain = federate(source(), clients=6, split="iid")
    f = federate(source(), clients=6, split="iid", shift="permute:3")
    maps = []
    for i in range(6):
        pairs = set(zip(plain.client(i).train.y.tolist(), f.client(i).train.y.tolist(), strict=True))
        pairs |= set(zip(plain.client(i).test.y.tolist(), f.client(i).test.y.tolist(), strict=True))
        assert len(pairs) == 4
        assert len({b for _, b in pairs}) == 4
        maps.append(pairs)
        assert torch.equal(f.client(i).train.x, plain.client(i).train.x)
    assert maps[:3] == maps[3:]
    assert maps[0] == {(c, c) for c in range(4)}
    assert len({frozenset(m) for m in maps}) == 3
    with pytest.raises(ConfigError, match="4 classes cannot"):
        federate(source(), clients=30, split="iid", shift="permute:25")


def test_stains_differ_between_clients_and_not_within_one() -> None:
    x = torch.full((40, 3, 4, 4), 150, dtype=torch.uint8)
    s = from_tensors(x, torch.zeros(40, dtype=torch.long))
    f = federate(s, clients=4, split="iid", shift="stain")
    colours = [pixels(f.client(i).train.x)[:, :, 0, 0] for i in range(4)]
    assert all((c == c[0]).all() for c in colours)
    assert len({tuple(c[0].tolist()) for c in colours}) == 4
    same = federate(source(channels=3), clients=2, split="iid", shift="stain:0")
    was = federate(source(channels=3), clients=2, split="iid")
    assert (pixels(same.client(0).train.x).int() - pixels(was.client(0).train.x).int()).abs().max() <= 1


def test_gray_makes_colour_images_gray() -> None:
    f = federate(source(channels=3), clients=2, split="iid", shift="gray")
    x = f.client(0).train.x
    assert torch.equal(x[:, 0], x[:, 1])
    assert torch.equal(x[:, 0], x[:, 2])


def test_edges_are_black_and_white() -> None:
    x = torch.zeros(20, 1, 16, 16, dtype=torch.uint8)
    x[:, :, 4:12, 4:12] = 255
    f = federate(from_tensors(x, torch.zeros(20, dtype=torch.long)), clients=2, split="iid", shift="edge")
    assert set(f.client(0).train.x.unique().tolist()) == {-1.0, 1.0}
    assert f.input_shape == (1, 16, 16)


def test_the_source_is_left_as_it_was(tmp_path: Path) -> None:
    s = source(channels=3)
    before, labels = s.x.clone(), s.y.clone()
    for shift in ("edge", "stain", "permute:2", "rotate:30", "gray"):
        federate(s, clients=2, split="iid", shift=shift)
    assert torch.equal(s.x, before)
    assert torch.equal(s.y, labels)


def test_float_images_can_be_shifted() -> None:
    s = source()
    f = federate(from_tensors(s.x.float() / 255, s.y), clients=2, split="iid", shift="rotate:90")
    g = federate(s, clients=2, split="iid", shift="rotate:90")
    assert torch.equal(f.client(1).train.x, g.client(1).train.x)


@pytest.mark.parametrize(
    "words", ["rotate", "rotate:x", "rotate:nan", "stain:2", "stain:x", "permute", "permute:1", "gray:1", "edge:3"]
)
def test_misspelt_shifts_say_what_to_write(words: str) -> None:
    with pytest.raises(ConfigError, match="Write"):
        parse(words)


def test_unknown_shifts_and_missing_photographs(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'rotate'"):
        parse("rotat:90")
    assert parse(None).ones == ()
    with pytest.raises(DataError, match="bsds500"):
        federate(source(), clients=2, split="iid", shift="colour", data_dir=tmp_path)
    photographs(tmp_path / "small", [(1, 2, 3)], side=4)
    with pytest.raises(DataError, match="at least 8 x 8"):
        federate(source(), clients=2, split="iid", shift="colour:small", data_dir=tmp_path)
    (tmp_path / "small/9.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"9\.png"):
        federate(source(), clients=2, split="iid", shift="colour:small", data_dir=tmp_path)


# ---- the edge detector itself


def square(side: int = 32, low: int = 8, high: int = 24) -> np.ndarray:
    out = np.zeros((side, side), np.uint8)
    out[low:high, low:high] = 255
    return out


def test_a_step_has_one_thin_edge() -> None:
    step = np.zeros((20, 20), np.uint8)
    step[:, 10:] = 255
    found = canny(step[None])[0]
    assert found[1:-1].sum(1).tolist() == [1] * 18
    assert set(np.flatnonzero(found.any(0))) <= {9, 10}
    assert np.array_equal(canny(step.T[None])[0], found.T)


def test_nothing_has_no_edges_and_faint_steps_have_none() -> None:
    assert not canny(np.full((2, 16, 16), 130, np.uint8)).any()
    faint = np.full((1, 16, 16), 100, np.uint8)
    faint[:, :, 8:] = 110
    assert not canny(faint).any()


def test_a_square_has_a_closed_outline_near_its_border() -> None:
    from scipy import ndimage

    found = canny(square()[None])[0]
    _, pieces = ndimage.label(found, np.ones((3, 3)))
    assert pieces == 1
    _, regions = ndimage.label(~found)
    assert regions == 2  # inside and outside are parted
    far = ndimage.distance_transform_edt(~(square() ^ ndimage.binary_erosion(square())).astype(bool))
    assert far[found].max() <= 2


def test_images_of_a_stack_do_not_see_each_other() -> None:
    rng = np.random.default_rng(0)
    stack = np.stack([square(), square(low=3, high=12), rng.integers(0, 256, (32, 32)).astype(np.uint8)])
    together = canny(stack)
    for image, found in zip(stack, together, strict=True):
        assert np.array_equal(canny(image[None])[0], found)


def test_a_weak_edge_survives_only_beside_a_strong_one() -> None:
    image = np.zeros((30, 30), np.uint8)
    image[:, 15:] = np.linspace(255, 50, 20).astype(np.uint8)[np.minimum(np.arange(30), 19), None]
    assert canny(image[None])[0][25].any()
    assert not canny(image[None, 20:])[0].any()
