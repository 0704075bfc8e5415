"""What sets the clients' data apart beyond their classes: shifts of the images or of the labels.

A shift is written as a word, some with a value:

    gray            as it is, or the gray version of a colour image
    colour:PATH     a random crop of the photographs in PATH (default DATA_DIR/bsds500) added to the gray image
    edge            the edges of the image (Canny)
    stain:SIGMA     a stain of its own for every client: optical density in the haematoxylin-eosin-DAB space,
                    scaled and offset by up to SIGMA (default 0.2)
    rotate:0,90,..  an angle for every client in turn, in degrees counter-clockwise
    permute:K       K groups of clients, each naming the classes differently (the first as published)

Several joined by `+` are dealt to the clients in turn: `gray+colour:photos` makes every second client's
images colourful. With `whole:` in front, each of the joined shifts is applied to the whole data set, and every
such copy is divided among its own share of the clients, as in PSE's joint shift. Then a test image of one client
can be, shifted otherwise, a training image of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from perfed.data import images
from perfed.data.canny import canny
from perfed.data.draw import generator
from perfed.data.partition import Ints
from perfed.errors import ConfigError, DataError, unknown

WORDS = ("gray", "colour", "edge", "stain", "rotate", "permute")
PHOTOGRAPHS = "bsds500"
# Ruifrok and Johnston 2001: the optical densities of haematoxylin, eosin and DAB in red, green and blue
STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]
Rows = Callable[[Tensor, Ints], Tensor]


@dataclass(frozen=True)
class One:
    """A single shift."""

    word: str
    angles: tuple[float, ...] = ()
    value: float = 0.0
    path: str = ""

    @property
    def colourful(self) -> bool:
        """Whether its images need three channels."""
        return self.word in ("colour", "stain")


@dataclass(frozen=True)
class Shift:
    """The shifts that clients get in turn."""

    ones: tuple[One, ...] = ()
    whole: bool = False

    @property
    def copies(self) -> int:
        """How many copies of the data set there are to divide."""
        return len(self.ones) if self.whole else 1

    def apply(
        self, x: Tensor, y: Tensor, owner: Ints, *, classes: int, seed: int, data_dir: Path | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """The shifted images and labels; a sample without an owner stays as it is."""
        if not self.ones:
            return x, y
        number = len(self.ones)
        y = y.clone()
        if any(one.word != "permute" for one in self.ones):
            if x.dtype != torch.uint8:
                x = (x * 255).round().to(torch.uint8)
            channels = 3 if any(one.colourful for one in self.ones) else x.shape[1]
            x = images.with_channels(x, channels).clone()
        for k, one in enumerate(self.ones):
            rows = np.flatnonzero((owner >= 0) & (owner % number == k))
            turn = owner[rows] // number  # the how-manieth client of this shift
            rng = generator(seed, one.word, k)
            if one.word == "permute":
                names = _permutations(int(one.value), classes, rng)
                y[rows] = torch.from_numpy(names[turn % len(names), y[rows].numpy()])
                continue
            size = (x.shape[2], x.shape[3])
            photographs = _photographs(one.path, data_dir, *size) if one.word == "colour" else []
            change = _change(one, turn, rng, size, photographs)
            for i in range(0, len(rows), images.CHUNK):
                some = np.arange(i, min(i + images.CHUNK, len(rows)))
                at = torch.from_numpy(rows[some])
                x.index_copy_(0, at, change(x.index_select(0, at), some).contiguous())
        return x, y


def parse(shift: str | None) -> Shift:
    """Take a shift string apart, or refuse it with what would be accepted."""
    if not shift or shift == "none":
        return Shift()
    body = shift.removeprefix("whole:")
    words = "|".join(WORDS)
    return Shift(tuple(_one(part) for part in re.split(rf"\+(?=(?:{words})(?:[:+]|$))", body)), whole=body != shift)


def _one(text: str) -> One:
    word, colon, value = text.partition(":")
    if word not in WORDS:
        raise unknown("shift", text, WORDS)
    if word in ("gray", "edge") and colon:
        raise ConfigError(f"The shift {text!r} has a value, and {word} takes none.", f"Write {word}.")
    if word == "colour":
        return One(word, path=value)
    try:
        if word == "rotate":
            angles = tuple(float(a) for a in value.split(","))
            if all(np.isfinite(angles)):
                return One(word, angles=angles)
        if word == "stain" and (not colon or 0 <= float(value) <= 1):
            return One(word, value=float(value) if colon else 0.2)
        if word == "permute" and 2 <= int(value) <= 10_000:
            return One(word, value=float(int(value)))
    except ValueError:
        pass
    else:
        if word in ("gray", "edge"):
            return One(word)
    examples = {"rotate": "rotate:0,90,180,270", "stain": "stain:0.2", "permute": "permute:2"}
    raise ConfigError(f"The shift {text!r} is not understood.", f"Write for example {examples[word]}.")


def _change(one: One, turn: Ints, rng: np.random.Generator, size: tuple[int, int], photographs: list[Pixels]) -> Rows:
    """A function of a chunk of images and of their numbers among the samples of this shift."""
    if one.word == "gray":
        return lambda x, _: images.with_channels(images.with_channels(x, 1), x.shape[1])
    if one.word == "edge":
        return lambda x, _: _edges(x)
    if one.word == "stain":
        clients = int(turn.max(initial=0)) + 1
        scale = rng.uniform(1 - one.value, 1 + one.value, (clients, 3))
        offset = rng.uniform(-one.value, one.value, (clients, 3))
        return lambda x, i: _stained(x, scale[turn[i]], offset[turn[i]])
    if one.word == "rotate":
        angles = np.array(one.angles)
        return lambda x, i: _rotated(x, angles[turn[i] % len(angles)])
    height, width = size
    which = rng.integers(len(photographs), size=len(turn))
    corner = rng.random((len(turn), 2))

    def coloured(x: Tensor, i: Ints) -> Tensor:
        crops = np.empty((len(i), 3, height, width), np.uint8)
        for k in np.unique(which[i]):
            here = np.flatnonzero(which[i] == k)
            windows = np.lib.stride_tricks.sliding_window_view(photographs[k], (height, width), (1, 2))
            top, left = (corner[i[here]] * windows.shape[1:3]).astype(np.int64).T
            crops[here] = windows[:, top, left].transpose(1, 0, 2, 3)
        gray = images.with_channels(images.with_channels(x, 1), 3)
        added: Tensor = (gray.short() + torch.from_numpy(crops).short()).clamp_(max=255).to(torch.uint8)
        return added

    return coloured


def _edges(x: Tensor) -> Tensor:
    found = canny(images.with_channels(x, 1)[:, 0].numpy())
    return torch.from_numpy(found.astype(np.uint8) * np.uint8(255))[:, None].expand(-1, x.shape[1], -1, -1)


def _stained(x: Tensor, scale: Floats, offset: Floats) -> Tensor:
    """Tellez et al. 2018: the concentration c of each stain becomes scale * c + offset."""
    density = -np.log10((x.numpy().astype(np.float64) + 1) / 256)
    stains = np.einsum("nchw,cs->nshw", density, np.linalg.inv(STAINS))
    stains = stains * scale[:, :, None, None] + offset[:, :, None, None]
    back = 256 * 10 ** -np.einsum("nshw,sc->nchw", stains, STAINS) - 1
    return torch.from_numpy(np.rint(back).clip(0, 255).astype(np.uint8))


def _rotated(x: Tensor, angles: Floats) -> Tensor:
    out = torch.empty_like(x)
    height, width = x.shape[2:]
    for angle in np.unique(angles):
        rows = torch.from_numpy(np.flatnonzero(angles == angle))
        if angle % 90 == 0 and (height == width or angle % 180 == 0):
            out[rows] = torch.rot90(x[rows], int(angle // 90) % 4, (2, 3))
            continue
        c, s = float(np.cos(np.deg2rad(angle))), float(np.sin(np.deg2rad(angle)))
        turn = torch.tensor([[c, -s * height / width, 0.0], [s * width / height, c, 0.0]])
        grid = F.affine_grid(turn.expand(len(rows), 2, 3).contiguous(), list(x[rows].shape), align_corners=False)
        turned = F.grid_sample(x[rows].float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        out[rows] = turned.round_().clamp_(0, 255).to(torch.uint8)
    return out


def _permutations(groups: int, classes: int, rng: np.random.Generator) -> Ints:
    """(groups, classes): a new name for every class, different in every group, unchanged in the first."""
    found = [tuple(range(classes))]
    for _ in range(100 * groups):
        if len(found) == groups:
            break
        if (drawn := tuple(rng.permutation(classes).tolist())) not in found:
            found.append(drawn)
    if len(found) < groups:
        raise ConfigError(f"{classes} classes cannot be named in {groups} different ways.", "Give fewer groups.")
    return np.array(found, np.int64)


def _photographs(path: str, data_dir: Path | str | None, height: int, width: int) -> list[Pixels]:
    base = Path("data" if data_dir is None else data_dir)
    folder = base / (path or PHOTOGRAPHS)
    if path and not folder.is_dir():
        folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"The shift 'colour' finds no photographs in {folder}.",
            "Write colour:PATH with a folder of colour photographs, such as BSDS500's images.",
        )
    found: list[Pixels] = []
    for file in sorted(f for f in folder.iterdir() if f.suffix.lower() in (".jpg", ".jpeg", ".png", ".bmp")):
        try:
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as e:
            raise DataError(f"The photograph {file} cannot be read: {e}.", "Repair or remove it.") from e
        if pixels.shape[0] >= height and pixels.shape[1] >= width:
            found.append(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    if not found:
        raise DataError(f"{folder} has no photograph of at least {width} x {height} pixels.")
    return found
