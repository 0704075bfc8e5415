"""USPS digits: the .npz with x_train, y_train, x_test, y_test, or LIBSVM's usps.bz2 and usps.t.bz2."""

from __future__ import annotations

import bz2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perfed.data.source import Source, find, from_tensors
from perfed.data.sources.digits import DIGITS
from perfed.data.sources.npz import read_arrays
from perfed.errors import DataError

PAGE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"


def read_libsvm(path: Path) -> tuple[Tensor, Tensor]:
    """Lines of `label index:value ...` with labels 1..10 and 256 values in [-1, 1]."""
    try:
        lines = bz2.decompress(path.read_bytes()).decode("ascii").splitlines()
        x = np.zeros((len(lines), 256))
        y = np.empty(len(lines), np.int64)
        for i, line in enumerate(lines):
            label, *pairs = line.split()
            y[i] = int(label) - 1
            for pair in pairs:
                at, value = pair.split(":")
                if not 1 <= int(at) <= 256:
                    raise ValueError(f"line {i + 1} has the index {at}")
                x[i, int(at) - 1] = float(value)
    except (OSError, EOFError, ValueError) as e:
        raise DataError(f"{path} is not LIBSVM's USPS file: {e}.", "Delete it and fetch it again.") from e
    gray = np.clip((x + 1) / 2 * 255, 0, 255).astype(np.uint8)
    return torch.from_numpy(gray).view(-1, 1, 16, 16), torch.from_numpy(y)


def load_usps(data_dir: Path | str | None = None) -> Source:
    """7,291 + 2,007 digits from envelopes, gray, 16 x 16."""
    base = Path("data" if data_dir is None else data_dir)
    for path in (base / "usps" / "usps.npz", base / "usps.npz"):
        if path.exists():
            held = read_arrays(path)
            if missing := {"x_train", "y_train", "x_test", "y_test"} - set(held):
                raise DataError(f"{path} has no {', '.join(sorted(missing))}.")
            return from_tensors(
                held["x_train"],
                held["y_train"],
                x_test=held["x_test"],
                y_test=held["y_test"],
                classes=DIGITS,
                name="usps",
            )
    folder = find("usps", data_dir, ("usps", "USPS", "."), ("usps.bz2", "usps.t.bz2"), PAGE)
    x, y = read_libsvm(folder / "usps.bz2")
    x_test, y_test = read_libsvm(folder / "usps.t.bz2")
    return Source("usps", x, y, DIGITS, x_test, y_test)
