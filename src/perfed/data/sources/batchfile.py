"""The python release of CIFAR, read as plain data.

Those files are little programs for a stack machine that could call any function. This reader knows only the
instructions that build dicts, lists, strings, whole numbers and byte arrays, recognises the three NumPy names
that the publisher's files contain without importing anything, and refuses every other file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfed.errors import DataError

_NAMES = {
    f"{module}\n{name}": name
    for module, name in (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    )
}
_MARK = object()


@dataclass(frozen=True)
class _Name:
    name: str


@dataclass
class _Made:
    """What a call of a known name stands for: a dtype, or an array still without contents."""

    name: str
    args: tuple[Any, ...]
    value: Any = None


class _RefusedError(Exception):
    """The file is not one of the publisher's."""


class _Machine:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.raw):
            raise _RefusedError("it ends too early")
        self.at += n
        return self.raw[self.at - n : self.at]

    def number(self, layout: str) -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])

    def line(self) -> str:
        end = self.raw.find(b"\n", self.at)
        if end < 0:
            raise _RefusedError("it ends too early")
        text = self.take(end - self.at)
        self.at += 1
        return text.decode("latin-1")

    def pop(self) -> Any:
        if not self.stack:
            raise _RefusedError("it takes a value that was never made")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise _RefusedError("it takes a value that was never made")

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise _RefusedError("its values are out of order")
        return self.stack[-1]

    def keep(self, i: int) -> None:
        self.memo[i] = self.top(object)

    def recall(self, i: int) -> None:
        if i not in self.memo:
            raise _RefusedError("it takes a value that was never made")
        self.stack.append(self.memo[i])

    def tuple_of(self, n: int) -> None:
        if len(self.stack) < n:
            raise _RefusedError("it takes a value that was never made")
        items = tuple(self.stack[len(self.stack) - n :])
        del self.stack[len(self.stack) - n :]
        self.stack.append(items)

    def name(self) -> None:
        name = f"{self.line()}\n{self.line()}"
        if name not in _NAMES:
            raise _RefusedError(f"it asks for {name.replace(chr(10), '.')[:80]!r}, which no published file does")
        self.stack.append(_Name(_NAMES[name]))

    def call(self) -> None:
        args, what = self.pop(), self.pop()
        if not isinstance(what, _Name) or not isinstance(args, tuple) or what.name == "ndarray":
            raise _RefusedError("it calls something")
        self.stack.append(_Made(what.name, args))

    def build(self) -> None:
        state = self.pop()
        made = self.top(_Made)
        if not isinstance(state, tuple):
            raise _RefusedError("its values are out of order")
        if made.name == "dtype":
            return  # byte order and alignment, without meaning for single bytes
        if len(state) != 5 or not isinstance(state[1], tuple) or not isinstance(state[4], bytes):
            raise _RefusedError("its array is not described as an array")
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Made) or dtype.name != "dtype" or dtype.args[:1] not in ((b"u1",), ("u1",)):
            raise _RefusedError("its array is not one of unsigned bytes")
        if fortran or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise _RefusedError("its array is not laid out row by row")
        if int(np.prod(shape, dtype=np.int64)) != len(data):
            raise _RefusedError(f"its array of shape {shape} has {len(data)} bytes")
        made.value = np.frombuffer(data, np.uint8).reshape(shape)

    def set_items(self, items: list[Any]) -> None:
        into = self.top(dict)
        if len(items) % 2 or not all(isinstance(k, (bytes, str)) for k in items[::2]):
            raise _RefusedError("its dict is not one of named values")
        into.update(zip(items[::2], items[1::2], strict=True))

    def run(self) -> Any:
        push = self.stack.append
        steps: dict[int, Callable[[], Any]] = {
            0x80: lambda: self._version(self.take(1)[0]),
            ord("("): lambda: push(_MARK),
            ord("}"): lambda: push({}),
            ord("]"): lambda: push([]),
            ord(")"): lambda: push(()),
            ord("N"): lambda: push(None),
            0x88: lambda: push(True),
            0x89: lambda: push(False),
            ord("K"): lambda: push(self.number("<B")),
            ord("M"): lambda: push(self.number("<H")),
            ord("J"): lambda: push(self.number("<i")),
            ord("U"): lambda: push(self.take(self.number("<B"))),
            ord("T"): lambda: push(self.take(self.number("<i"))),
            ord("X"): lambda: push(self.take(self.number("<I")).decode("utf-8", "replace")),
            ord("q"): lambda: self.keep(self.number("<B")),
            ord("r"): lambda: self.keep(self.number("<I")),
            ord("h"): lambda: self.recall(self.number("<B")),
            ord("j"): lambda: self.recall(self.number("<I")),
            0x85: lambda: self.tuple_of(1),
            0x86: lambda: self.tuple_of(2),
            0x87: lambda: self.tuple_of(3),
            ord("t"): lambda: push(tuple(self.pop_to_mark())),
            ord("a"): lambda: self._append(self.pop()),
            ord("e"): lambda: self._extend(self.pop_to_mark()),
            ord("s"): lambda: self.set_items(self._last_two()),
            ord("u"): lambda: self.set_items(self.pop_to_mark()),
            ord("c"): self.name,
            ord("R"): self.call,
            ord("b"): self.build,
        }
        while True:
            code = self.take(1)[0]
            if code == ord("."):
                break
            if code not in steps:
                raise _RefusedError(
                    f"it has the instruction {code:#04x} at byte {self.at - 1}, which no published file has"
                )
            steps[code]()
        if len(self.stack) != 1 or self.at != len(self.raw):
            raise _RefusedError("something is left over")
        return self.stack[0]

    def _version(self, number: int) -> None:
        if number != 2:
            raise _RefusedError(f"its format has version {number} instead of 2")

    def _last_two(self) -> list[Any]:
        value, key = self.pop(), self.pop()
        return [key, value]

    def _append(self, item: Any) -> None:
        self.top(list).append(item)

    def _extend(self, items: list[Any]) -> None:
        self.top(list).extend(items)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, _Made):
        if value.value is None:
            raise _RefusedError("its array has no contents")
        return value.value
    if isinstance(value, (int, str)):
        return value
    raise _RefusedError(f"it holds a {type(value).__name__}")


def read_batch(path: Path) -> dict[str, Any]:
    """One file of the python release: names to strings, numbers, lists of them, and byte arrays."""
    try:
        made = _Machine(path.read_bytes()).run()
        if not isinstance(made, dict):
            raise _RefusedError("it does not hold a dict")
        return {str(_plain(k)): _plain(v) for k, v in made.items()}
    except _RefusedError as e:
        raise DataError(f"{path} is not a published CIFAR file: {e}.", "Delete it and fetch it again.") from e
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror or e}.") from e
