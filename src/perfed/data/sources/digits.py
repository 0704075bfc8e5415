"""The optical digits that scikit-learn carries: 1,797 gray images of 8 x 8, nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from perfed.data.source import Source

DIGITS = tuple(str(d) for d in range(10))


def load_digits(data_dir: Path | str | None = None) -> Source:
    """UCI optical digits (the test half, as scikit-learn ships it); the values 0..16 become 0..255."""
    from sklearn.datasets import load_digits as read

    bunch = read()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    return Source("digits", torch.from_numpy(x), torch.from_numpy(bunch.target.astype(np.int64)), DIGITS)
