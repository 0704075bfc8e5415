"""Digits in MATLAB files with X of shape (32, 32, 3, N) and y: SVHN's format 2, and SynthDigits in the same layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perfed.data.source import Source, find
from perfed.data.sources.digits import DIGITS
from perfed.errors import DataError


def read_mat(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels; the label 10 is the digit 0."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    unreadable = (OSError, LookupError, ValueError, TypeError, NotImplementedError, MatReadError)
    try:
        held = loadmat(path, variable_names=["X", "y"])
        x, y = np.asarray(held["X"]), np.asarray(held["y"]).reshape(-1)
        if x.ndim != 4 or x.dtype != np.uint8 or x.shape[3] != len(y):
            raise ValueError(f"X is {x.dtype} of shape {x.shape}, y has {len(y)} labels")
    except unreadable as error:
        raise DataError(f"{path} is not such a MATLAB file: {error}.", "Fetch it again.") from None
    return torch.from_numpy(np.ascontiguousarray(x.transpose(3, 2, 0, 1))), torch.from_numpy(y.astype(np.int64) % 10)


def _load(
    name: str, data_dir: Path | str | None, folders: tuple[str, ...], files: tuple[str, str], page: str
) -> Source:
    folder = find(name, data_dir, folders, files, page)
    x, y = read_mat(folder / files[0])
    x_test, y_test = read_mat(folder / files[1])
    return Source(name, x, y, DIGITS, x_test, y_test)


def load_svhn(data_dir: Path | str | None = None) -> Source:
    """73,257 + 26,032 house numbers from street photographs, colour, 32 x 32."""
    page = "'The Street View House Numbers (SVHN) Dataset' of Stanford, format 2"
    return _load("svhn", data_dir, ("svhn", "SVHN", "."), ("train_32x32.mat", "test_32x32.mat"), page)


def load_synthdigits(data_dir: Path | str | None = None) -> Source:
    """Digits rendered from fonts on coloured ground, 32 x 32 (Ganin and Lempitsky's SYNTH)."""
    page = "the data of 'Unsupervised Domain Adaptation by Backpropagation'"
    files = ("synth_train_32x32.mat", "synth_test_32x32.mat")
    return _load("synthdigits", data_dir, ("SynthDigits", "synthdigits", "."), files, page)
