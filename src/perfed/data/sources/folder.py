"""Image folders: DIR/class/image, or DIR/client/class/image with one folder per client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError

from perfed.data.source import Source
from perfed.errors import ConfigError, DataError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
UNREADABLE = (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError)
GRAY = {"1", "L", "I;16", "I", "F", "LA"}


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)


def _listed(base: Path) -> list[tuple[str, str, Path]]:
    """(client, class, file) of every image; the client is '' when the folders are classes."""
    deep, flat = [], []
    for outer in _folders(base):
        flat += [("", outer.name, f) for f in _files(outer)]
        deep += [(outer.name, inner.name, f) for inner in _folders(outer) for f in _files(inner)]
    if deep and flat:
        raise DataError(
            f"{base} has images in {flat[0][2].parent} and in {deep[0][2].parent}.",
            "Keep all at one depth: DIR/class/image, or DIR/client/class/image.",
        )
    if not deep and not flat:
        raise DataError(f"There are no images in the folders of {base}.", f"Known: {', '.join(sorted(SUFFIXES))}.")
    return deep or flat


def _refused(path: Path, e: Exception) -> DataError:
    return DataError(f"The image {path} cannot be read: {e}.", "Repair or remove it.")


def _header(path: Path) -> tuple[tuple[int, int], str]:
    try:
        with Image.open(path) as image:
            return image.size, image.mode
    except UNREADABLE as e:
        raise _refused(path, e) from e


def _pixels(path: Path, mode: str, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits: keep the upper eight
                upper = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
                plain = Image.fromarray(upper).convert(mode)
            else:
                plain = image.convert(mode)
    except UNREADABLE as e:
        raise _refused(path, e) from e
    return np.asarray(plain if plain.size == size else plain.resize(size, Image.Resampling.BILINEAR))


def load_images(paths: Sequence[Path], size: int | None = None, channels: int | None = None) -> torch.Tensor:
    """Single images as uint8 (n, C, H, W); the first one's size and colours are those of all, unless given."""
    (wide, high), first = _header(paths[0])
    wide, high = (size, size) if size else (wide, high)
    mode = "L" if (channels or (1 if first in GRAY else 3)) == 1 else "RGB"
    x = np.stack([_pixels(path, mode, (wide, high)).reshape(high, wide, -1) for path in paths])
    return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()


def load_folder(data_dir: Path | str | None = None, size: int | None = None, channels: int | None = None) -> Source:
    """Your own images: DIR/class/image, or DIR/client/class/image with one folder per client."""
    if data_dir is None or not Path(data_dir).is_dir():
        raise DataError(f"There is no image folder {data_dir}.", "Write folder:PATH.")
    if channels not in (None, 1, 3):
        raise ConfigError(f"Images cannot have {channels} channels.", "Give 1 (gray) or 3 (colour).")
    if size is not None and size < 1:
        raise ConfigError(f"Images cannot have the side {size}.", "Give a number of pixels.")
    base = Path(data_dir)
    listed = _listed(base)
    headers = [_header(path) for _, _, path in listed]
    wide, high = (size, size) if size else Counter(shape for shape, _ in headers).most_common(1)[0][0]
    mode = "L" if (channels or (1 if all(m in GRAY for _, m in headers) else 3)) == 1 else "RGB"
    x = np.empty((len(listed), high, wide, 1 if mode == "L" else 3), np.uint8)
    for i, (_, _, path) in enumerate(listed):
        x[i] = _pixels(path, mode, (wide, high)).reshape(x.shape[1:])
    classes = tuple(sorted({c for _, c, _ in listed}))
    clients = tuple(sorted({c for c, _, _ in listed if c}))
    y = torch.tensor([classes.index(c) for _, c, _ in listed])
    domain = torch.tensor([clients.index(c) for c, _, _ in listed]) if clients else None
    pixels = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()
    return Source(base.name, pixels, y, classes, domain=domain, domain_names=clients)
