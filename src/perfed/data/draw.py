"""Random generators of the data layer: one per (seed, purpose), so that no draw depends on another."""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """The generator for this purpose; the same seed and purpose give the same numbers everywhere."""
    words = "\x1f".join(str(p) for p in purpose).encode()
    mixed = int.from_bytes(hashlib.sha256(words).digest()[:16], "little")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, mixed])))
