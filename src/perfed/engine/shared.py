"""Named tensors in memory that processes share: written once, read where they lie.

An area is anonymous memory behind an inherited file descriptor. It has no name, so nothing is left when processes are
killed. A table says where each tensor lies; it is plain data and travels beside the area, through a pipe.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from perfed.core.state import State

ALIGNED = 64
Table = list[tuple[str, str, list[int], int]]
"""name, type, shape and offset of each tensor"""


class Area:
    """Memory that grows to the largest content it ever had."""

    def __init__(self) -> None:
        self._file = _memory()
        self._map: mmap.mmap | None = None
        self.written = 0
        """bytes of tensors written so far by this process"""

    def write(self, state: Mapping[str, Tensor]) -> Table:
        """Put tensors into the area, over what was there; returns where they are."""
        table: Table = []
        end = 0
        for name, tensor in state.items():
            table.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            size = tensor.numel() * tensor.element_size()
            self.written += size
            end += -(-size // ALIGNED) * ALIGNED
        self._reach(end)
        for (name, *_), target in zip(table, self._views(table), strict=True):
            target.copy_(state[name].detach())
        return table

    def read(self, table: Sequence[Sequence[Any]]) -> State:
        """The tensors at these places, not copied: they last until the area is written again."""
        ends = [at + _bytes(kind, shape) for _, kind, shape, at in table]
        self._reach(max(ends, default=0))
        return {str(name): view for (name, *_), view in zip(table, self._views(table), strict=True)}

    def _views(self, table: Sequence[Sequence[Any]]) -> list[Tensor]:
        views = []
        for _, kind, shape, at in table:
            dtype, count = getattr(torch, kind), prod(shape)
            flat = (
                torch.frombuffer(self._map, dtype=dtype, count=count, offset=at)
                if count
                else torch.empty(0, dtype=dtype)
            )
            views.append(flat.view(shape))
        return views

    def _reach(self, size: int) -> None:
        if size > (len(self._map) if self._map is not None else 0):
            room = max(os.fstat(self._file).st_size, 1 << (size - 1).bit_length())
            os.ftruncate(self._file, room)  # costs nothing: pages are taken when they are written
            self._map = mmap.mmap(self._file, room)

    def close(self) -> None:
        """Let go of the memory."""
        self._map = None
        os.close(self._file)


def _bytes(kind: str, shape: Sequence[int]) -> int:
    return int(prod(shape) * getattr(torch, kind).itemsize)


def _memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("perfed")
    with tempfile.TemporaryFile() as file:  # unlinked from the start
        return os.dup(file.fileno())
