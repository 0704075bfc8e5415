"""The optical digits that scikit-learn carries: 1,797 gray images of 8 x 8, nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from perfed.data.source import Source
from perfed.errors import ConfigError

DIGITS = tuple(str(d) for d in range(10))


def load_digits(data_dir: Path | str | None = None, samples: int | None = None) -> Source:
    """UCI optical digits (the test half, as scikit-learn ships it); the values 0..16 become 0..255."""
    if samples is not None and samples < 1:
        raise ConfigError(f"samples = {samples} is not accepted.", "Give how many of the first digits to take.")
    from sklearn.datasets import load_digits as read

    bunch = read()
    x = np.rint(bunch.images[:samples] * (255 / 16)).astype(np.uint8)[:, None]
    return Source("digits", torch.from_numpy(x), torch.from_numpy(bunch.target[:samples].astype(np.int64)), DIGITS)
