"""CIFAR-10 and CIFAR-100 from either of their releases, python or binary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from perfed.data.source import Source, find
from perfed.data.sources.batchfile import read_batch
from perfed.data.sources.cifar_names import CIFAR10, CIFAR100, CIFAR100_COARSE
from perfed.errors import ConfigError, DataError

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32
Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def _python(path: Path, key: str) -> Pair:
    held = read_batch(path)
    x, y = held.get("data"), held.get(key)
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != PIXELS:
        raise DataError(f"{path} has no images of {PIXELS} bytes.", "Delete it and fetch it again.")
    if not isinstance(y, list) or len(y) != len(x) or not all(isinstance(v, int) for v in y):
        raise DataError(f"{path} has no {key!r} for its {len(x)} images.", "Delete it and fetch it again.")
    return x, np.array(y, dtype=np.int64)


def _binary(path: Path, column: int, columns: int) -> Pair:
    raw = np.fromfile(path, np.uint8)
    row = columns + PIXELS
    if len(raw) == 0 or len(raw) % row:
        raise DataError(f"{path} has {len(raw)} bytes, not a multiple of {row}.", "Delete it and fetch it again.")
    rows = raw.reshape(-1, row)
    return rows[:, columns:], rows[:, column].astype(np.int64)


def _source(
    name: str,
    classes: tuple[str, ...],
    folder: Path,
    train: list[str],
    test: str,
    read: Callable[[Path], Pair],
) -> Source:
    first = [read(folder / f) for f in train]
    x = torch.empty((sum(len(x) for x, _ in first), 3, 32, 32), dtype=torch.uint8)
    np.concatenate([x for x, _ in first], out=x.view(len(x), PIXELS).numpy())
    x_test, y_test = read(folder / test)
    return Source(
        name,
        x,
        torch.from_numpy(np.concatenate([y for _, y in first])),
        classes,
        torch.from_numpy(x_test.copy()).view(-1, 3, 32, 32),
        torch.from_numpy(y_test),
    )


def _either(name: str, data_dir: Path | str | None, python: str, binary: str, files: list[str]) -> tuple[Path, bool]:
    """The folder of the release that is there, and whether it is the binary one."""
    bins = [f"{f}.bin" for f in files]
    base = Path("data" if data_dir is None else data_dir)
    for folder in (base / binary, base):
        if all((folder / f).exists() for f in bins):
            return folder, True
    return find(name, data_dir, (python, "."), files, PAGE), False


def load_cifar10(data_dir: Path | str | None = None) -> Source:
    """50,000 + 10,000 colour pictures of ten things, 32 x 32."""
    train = [f"data_batch_{k}" for k in range(1, 6)]
    folder, binary = _either("cifar10", data_dir, "cifar-10-batches-py", "cifar-10-batches-bin", [*train, "test_batch"])
    if binary:
        bins = [f"{f}.bin" for f in train]
        return _source("cifar10", CIFAR10, folder, bins, "test_batch.bin", lambda p: _binary(p, 0, 1))
    return _source("cifar10", CIFAR10, folder, train, "test_batch", lambda p: _python(p, "labels"))


def load_cifar100(data_dir: Path | str | None = None, labels: str = "fine") -> Source:
    """50,000 + 10,000 colour pictures, 32 x 32, of 100 classes (or 20: `labels="coarse"`)."""
    if labels not in ("fine", "coarse"):
        raise ConfigError(f"The labels of CIFAR-100 cannot be {labels!r}.", "Give 'fine' or 'coarse'.")
    classes = CIFAR100 if labels == "fine" else CIFAR100_COARSE
    folder, binary = _either("cifar100", data_dir, "cifar-100-python", "cifar-100-binary", ["train", "test"])
    if binary:
        column = 1 if labels == "fine" else 0
        return _source("cifar100", classes, folder, ["train.bin"], "test.bin", lambda p: _binary(p, column, 2))
    return _source("cifar100", classes, folder, ["train"], "test", lambda p: _python(p, f"{labels}_labels"))
