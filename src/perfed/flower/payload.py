"""Named arrays and plain scalars as Flower's records, and back only if they are what they claim to be.

Whatever arrives was written by somebody else: sizes are checked before anything is decoded, and nothing is unpickled.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from perfed.core.state import State
from perfed.errors import UpdateError

LARGEST = 1 << 30
"""Bytes of arrays in one message; more are refused."""
MOST = 100_000
"""Arrays in one message; more are refused."""
HEADER = 1024
"""What numpy's format may add to an array's bytes."""
DTYPES = ("float16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
NUMPY = "numpy.ndarray"

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)


def write_state(state: State) -> ArrayRecord:
    """Tensors as a record of arrays."""
    return ArrayRecord({name: Array(_plain(tensor)) for name, tensor in state.items()})


def _plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().contiguous().numpy()
    return array


def read_state(record: ArrayRecord, sender: str, limit: int = LARGEST) -> State:
    """The tensors of a record, or an error that names the sender."""
    total = sum(len(array.data) for array in record.values())
    if total > limit or len(record) > MOST:
        raise UpdateError(f"{sender} sent {len(record)} arrays of {total} bytes; {limit} bytes are accepted.")
    return {name: torch.from_numpy(_decoded(name, array, sender)) for name, array in record.items()}


def _decoded(name: str, array: Array, sender: str) -> np.ndarray[Any, Any]:
    """The array that the bytes hold, if type and shape are those that are stated beside them."""
    what = f"{sender} sent {name[:80]!r}"
    if array.stype != NUMPY or array.dtype not in DTYPES:
        raise UpdateError(f"{what} as {array.dtype[:40]!r} in the form {array.stype[:40]!r}.")
    shape = tuple(array.shape)
    if any(side < 0 for side in shape) or len(shape) > 16:
        raise UpdateError(f"{what} with the shape {shape[:16]}.")
    size = math.prod(shape) * np.dtype(array.dtype).itemsize
    if not size <= len(array.data) <= size + HEADER:
        raise UpdateError(f"{what} in {len(array.data)} bytes, which cannot be {array.dtype} {shape}.")
    try:
        found = np.load(io.BytesIO(array.data), allow_pickle=False)
    except Exception as error:
        raise UpdateError(f"{what} in bytes that are no array: {type(error).__name__}.") from None
    if not isinstance(found, np.ndarray) or found.dtype != np.dtype(array.dtype) or found.shape != shape:
        raise UpdateError(f"{what} as another array than stated.")
    return np.array(found, order="C")  # a copy that owns its memory, whatever order the bytes had


def record(content: RecordDict, name: str, kind: type[Record], sender: str) -> Record:
    """A record of a message, if it is there and of this kind."""
    found = content.get(name)
    if not isinstance(found, kind):
        raise UpdateError(f"{sender} sent no {kind.__name__} called {name!r}.")
    return found


def only(content: RecordDict, names: set[str], sender: str) -> None:
    """Refuse a message with other records than these."""
    if strange := sorted(set(content.keys()) - names):
        raise UpdateError(f"{sender} sent a record {strange[0][:80]!r}, which nobody asked for.")


class Fields:
    """Plain values of a record, each taken out once and checked; what is left over is refused."""

    def __init__(self, record: Mapping[str, Any], sender: str) -> None:
        self._left, self._sender = dict(record), sender

    def _take(self, name: str) -> Any:
        if name not in self._left:
            raise UpdateError(f"{self._sender} left out {name!r}.")
        return self._left.pop(name)

    def _refuse(self, name: str, value: object, want: str) -> UpdateError:
        return UpdateError(f"{self._sender} sent {name[:80]} = {str(value)[:80]!r}; it must be {want}.")

    def whole(self, name: str, low: int = 0, high: int = 2**53) -> int:
        """A whole number in a range."""
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise self._refuse(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number in a range."""
        value = self._take(name)
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self._refuse(name, value, f"a finite number from {low:g} to {high:g}")
        return float(value)

    def text(self, name: str, longest: int = 1000) -> str:
        """Some text."""
        value = self._take(name)
        if not isinstance(value, str) or len(value) > longest:
            raise self._refuse(name, value, f"text of at most {longest} characters")
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._take(name)
        if type(value) is not bool:
            raise self._refuse(name, value, "true or false")
        return value

    def texts(self, name: str, most: int = 10_000, longest: int = 200) -> tuple[str, ...]:
        """A list of texts."""
        value = self._take(name)
        listed = isinstance(value, list) and len(value) <= most
        if not listed or not all(isinstance(v, str) and len(v) <= longest for v in value):
            raise self._refuse(name, value, f"a list of at most {most} texts of at most {longest} characters")
        return tuple(value)

    def wholes(self, name: str, most: int = 16) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._take(name)
        if not isinstance(value, list) or len(value) > most or not all(type(v) is int for v in value):
            raise self._refuse(name, value, "a list of whole numbers")
        return tuple(value)

    def has(self, name: str) -> bool:
        """Whether a value is still there."""
        return name in self._left

    def end(self) -> None:
        """Refuse what was not taken."""
        if self._left:
            raise UpdateError(f"{self._sender} sent {min(self._left)[:80]!r}, which nobody asked for.")
