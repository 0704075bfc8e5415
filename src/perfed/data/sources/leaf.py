"""FEMNIST as the LEAF benchmark writes it: JSON files with users, and x and y of each, in train/ and test/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfed.data.source import Source
from perfed.data.sources.digits import DIGITS
from perfed.data.sources.emnist import LETTERS
from perfed.errors import ConfigError, DataError

CHARACTERS = (*DIGITS, *LETTERS, *(letter.lower() for letter in LETTERS))
PARTS = {
    "all": tuple(range(62)),
    "digits": tuple(range(10)),
    "letters": tuple(range(10, 62)),
    "a-j": tuple(range(36, 46)),
}
SIDE = 28


def _users(folder: Path) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            found += [(str(user), held["user_data"][user]) for user in held["users"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not one of LEAF's files: {error!r}.", "Make it again.") from None
    return found


def _half(folder: Path, writers: Sequence[str], kept: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    place, number = {c: i for i, c in enumerate(kept)}, {name: i for i, name in enumerate(writers)}
    x, y, domain = [], [], []
    for user, data in _users(folder):
        labels = np.asarray(data["y"], np.int64)
        rows = np.flatnonzero(np.isin(labels, kept))
        images = np.asarray(data["x"], np.float32).reshape(len(labels), -1)
        if images.shape[1:] != (SIDE * SIDE,):
            raise DataError(f"The images of {user} in {folder} have {images.shape[1:]} values, not 784.")
        x.append(np.rint((1 - images[rows]).clip(0, 1) * 255).astype(np.uint8))  # LEAF's paper is white, MNIST's black
        y += [place[int(label)] for label in labels[rows]]
        domain += [number[user]] * len(rows)
    pixels = np.concatenate(x) if x else np.empty((0, SIDE * SIDE), np.uint8)
    return torch.from_numpy(pixels).view(-1, 1, SIDE, SIDE), torch.tensor(y), torch.tensor(domain)


def load_femnist(data_dir: Path | str | None = None, part: str = "all") -> Source:
    """Handwritten characters of LEAF, gray, 28 x 28, a domain per writer: `part` is all, digits, letters or a-j."""
    if part not in PARTS:
        raise ConfigError(f"part = {part!r} is no part of FEMNIST.", f"Give one of {', '.join(PARTS)}.")
    base = Path("data" if data_dir is None else data_dir)
    places = [base / name for name in ("femnist", "femnist/data", "FEMNIST", "leaf/data/femnist/data")]
    folder = next((p for p in places if any((p / "train").glob("*.json")) and any((p / "test").glob("*.json"))), None)
    if folder is None:
        raise DataError(
            f"The data set 'femnist' is not complete: no JSON files in {places[0]}/train and {places[0]}/test.",
            "Make them with LEAF's data/femnist/preprocess.sh ('LEAF: A Benchmark for Federated Settings').",
        )
    writers = sorted({user for half in ("train", "test") for user, _ in _users(folder / half)})
    x, y, domain = _half(folder / "train", writers, PARTS[part])
    x_test, y_test, domain_test = _half(folder / "test", writers, PARTS[part])
    classes = tuple(CHARACTERS[c] for c in PARTS[part])
    return Source("femnist", x, y, classes, x_test, y_test, domain, domain_test, tuple(writers))
