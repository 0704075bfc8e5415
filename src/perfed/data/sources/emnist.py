"""EMNIST from NIST's archive in MNIST's format: idx files, plain or gzipped, with pictures lying on their side."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from perfed.data.source import Source, find
from perfed.data.sources.digits import DIGITS
from perfed.data.sources.idx import read_idx
from perfed.errors import ConfigError, DataError

PAGE = "the page 'The EMNIST Dataset' of NIST"
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
BALANCED = (*DIGITS, *LETTERS, *"abdefghnqrt")
PARTS = {"digits": DIGITS, "mnist": DIGITS, "letters": LETTERS, "balanced": BALANCED, "bymerge": BALANCED,
         "byclass": (*DIGITS, *LETTERS, *(c.lower() for c in LETTERS))}  # fmt: skip


def _half(folder: Path, part: str, half: str) -> tuple[Tensor, Tensor]:
    x = read_idx(folder / f"emnist-{part}-{half}-images-idx3-ubyte", 3)
    y = read_idx(folder / f"emnist-{part}-{half}-labels-idx1-ubyte", 1).long()
    if len(x) != len(y):
        raise DataError(f"EMNIST's {part} has {len(x)} {half} images and {len(y)} labels.")
    return x.transpose(1, 2).unsqueeze(1).contiguous(), y - 1 if part == "letters" else y


def load_emnist(data_dir: Path | str | None = None, part: str = "digits") -> Source:
    """Handwritten characters by many hands, gray, 28 x 28: `part` is digits, letters, balanced, byclass, ..."""
    if part not in PARTS:
        raise ConfigError(f"part = {part!r} is no part of EMNIST.", f"Give one of {', '.join(PARTS)}.")
    files = [
        f"emnist-{part}-{half}-{kind}-ubyte" for half in ("train", "test") for kind in ("images-idx3", "labels-idx1")
    ]
    folder = find("emnist", data_dir, ("EMNIST/raw", "EMNIST", "gzip", "."), files, PAGE)
    (x, y), (x_test, y_test) = _half(folder, part, "train"), _half(folder, part, "test")
    return Source("emnist", x, y, PARTS[part], x_test, y_test)
