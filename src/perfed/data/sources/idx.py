"""MNIST and Fashion-MNIST from their publishers' idx files, plain or gzipped."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perfed.data.source import Source, find
from perfed.errors import DataError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def _bytes(path: Path) -> bytes:
    packed = path.with_name(f"{path.name}.gz")
    if path.exists():
        return path.read_bytes()
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{packed} cannot be unpacked: {e}.", "Delete it and fetch it again.") from e


def read_idx(path: Path, dims: int) -> Tensor:
    """An idx file of unsigned bytes with so many dimensions; `path` may be gzipped as path.gz."""
    raw = _bytes(path)
    head = 4 + 4 * dims
    cure = "Delete it and fetch it again."
    if len(raw) < head:
        raise DataError(f"{path} has {len(raw)} bytes, not even a header.", cure)
    magic, *shape = struct.unpack(f">{1 + dims}I", raw[:head])
    if magic != 0x0800 + dims:
        raise DataError(f"{path} begins with {magic:#010x} instead of {0x0800 + dims:#010x}: no such idx file.", cure)
    want = int(np.prod(shape, dtype=np.int64))
    if len(raw) - head != want:
        raise DataError(f"{path} announces {want} bytes of data and has {len(raw) - head}.", cure)
    return (
        torch.frombuffer(bytearray(raw[head:]), dtype=torch.uint8).view(*shape)
        if want
        else torch.zeros(shape, dtype=torch.uint8)
    )


def _pair(folder: Path, images: str, labels: str) -> tuple[Tensor, Tensor]:
    x, y = read_idx(folder / images, 3), read_idx(folder / labels, 1)
    if len(x) != len(y):
        raise DataError(f"{folder / images} has {len(x)} images and {labels} {len(y)} labels.")
    return x.unsqueeze(1), y.long()


def _load(name: str, folder: str, classes: tuple[str, ...], page: str, data_dir: Path | str | None) -> Source:
    place = find(name, data_dir, (f"{folder}/raw", ".", folder, name), FILES, page)
    x, y = _pair(place, FILES[0], FILES[1])
    x_test, y_test = _pair(place, FILES[2], FILES[3])
    return Source(name, x, y, classes, x_test, y_test)


def load_mnist(data_dir: Path | str | None = None) -> Source:
    """60,000 + 10,000 handwritten digits, gray, 28 x 28."""
    page = "https://ossci-datasets.s3.amazonaws.com/mnist/"
    return _load("mnist", "MNIST", tuple(str(d) for d in range(10)), page, data_dir)


def load_fashionmnist(data_dir: Path | str | None = None) -> Source:
    """60,000 + 10,000 pictures of clothing, gray, 28 x 28."""
    page = "https://github.com/zalandoresearch/fashion-mnist"
    return _load("fashionmnist", "FashionMNIST", FASHION, page, data_dir)
