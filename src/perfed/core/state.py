"""State: flat, named tensors. Equally a checkpoint, a message and a file in the safetensors format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor

from perfed.errors import StoreError, UpdateError

State: TypeAlias = dict[str, Tensor]
Scalars: TypeAlias = dict[str, Any]
Selection: TypeAlias = bool | Tensor
"""Which elements of a tensor are meant: none, all, or those where a mask is true."""

SEALED = "sealed/"
"""Names of ciphertexts begin with this."""


def take(tensor: Tensor, which: Selection) -> Tensor | None:
    """The selected elements: the tensor itself, a flat vector of the masked ones, or None for nothing."""
    if isinstance(which, bool):
        return tensor if which else None
    chosen = tensor[which]
    return chosen if chosen.numel() else None


def put(target: Tensor, which: Selection, values: Tensor) -> None:
    """Write what `take` took back into its place."""
    if isinstance(which, bool):
        if which:
            target.copy_(values)
    else:
        target[which] = values


def union(a: Selection, b: Selection) -> Selection:
    """The elements that either selection means."""
    if isinstance(a, bool):
        return True if a else b
    if isinstance(b, bool):
        return True if b else a
    return a | b


def complement(which: Selection) -> Selection:
    """The elements that the selection does not mean."""
    if isinstance(which, bool):
        return not which
    distinct = which[tuple(slice(0, 1) if step == 0 else slice(None) for step in which.stride())]
    return (~distinct).expand(which.shape)  # a mask of whole channels stays as small as it is


def without(a: Selection, b: Selection) -> Selection:
    """The elements that the first selection means and the second does not."""
    if isinstance(a, bool):
        return complement(b) if a else False
    return (a if not b else False) if isinstance(b, bool) else a & ~b


def under(prefix: str, state: Mapping[str, Tensor]) -> State:
    """The same tensors with a prefix before their names."""
    return {f"{prefix}/{name}": tensor for name, tensor in state.items()}


def within(prefix: str, state: Mapping[str, Tensor]) -> State:
    """The tensors whose names have the prefix, without it."""
    start = f"{prefix}/"
    return {name[len(start) :]: tensor for name, tensor in state.items() if name.startswith(start)}


def unsealed(state: Mapping[str, Tensor]) -> State:
    """The tensors that are not ciphertexts. Encryption is random, so these alone are the same in every equal run."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(SEALED)}


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names."""
    total = sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.numel():
            total.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def to_bytes(state: Mapping[str, Tensor], scalars: Scalars | None = None) -> bytes:
    """One message or file: tensors as safetensors, plain scalars as JSON in its header."""
    metadata = {"scalars": json.dumps(scalars, sort_keys=True)} if scalars is not None else None
    # Views of one storage (a slice, a channels-last weight, one tensor under two names) are written as plain tensors.
    plain: State = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        value = tensor.detach().contiguous()
        plain[name] = value.clone() if value.untyped_storage().data_ptr() in storages else value
        storages.add(value.untyped_storage().data_ptr())
    return safetensors.torch.save(plain, metadata=metadata)


def from_bytes(data: bytes) -> tuple[State, Scalars]:
    """The inverse of `to_bytes`; anything else is refused."""
    try:
        size = int.from_bytes(data[:8], "little")
        if size > len(data) - 8:
            raise ValueError("header longer than the data")
        header = json.loads(data[8 : 8 + size])
        scalars = json.loads(header.get("__metadata__", {}).get("scalars", "{}"))
        return safetensors.torch.load(data), scalars
    except Exception as error:
        raise StoreError(f"These bytes are not a safetensors message: {error}.") from error


_sizes: dict[tuple[Any, ...], int] = {}


def serialised_bytes(state: Mapping[str, Tensor]) -> int:
    """The length of `to_bytes(state)`. It depends on names, types and shapes alone, so it is measured once."""
    key = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(state.items()))
    if key not in _sizes:
        _sizes[key] = len(to_bytes(state)) if state else 0
    return _sizes[key]


def check(state: Mapping[str, Tensor], schema: Mapping[str, Tensor], sender: str) -> None:
    """Refuse a state whose names, shapes, types or values are not what the schema declares."""
    if state.keys() != schema.keys():
        missing, extra = sorted(schema.keys() - state.keys()), sorted(state.keys() - schema.keys())
        raise UpdateError(f"{sender} sent other tensors than declared: missing {_some(missing)}, extra {_some(extra)}.")
    for name, tensor in state.items():
        want = schema[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise UpdateError(
                f"{sender} sent {name} as {tensor.dtype} {tuple(tensor.shape)},"
                f" not as {want.dtype} {tuple(want.shape)}."
            )
        if not finite(tensor):
            raise UpdateError(f"{sender} sent values in {name} that are not finite.")


def finite(tensor: Tensor) -> bool:
    """Whether every value is finite, in one pass that allocates nothing: a value that is not shows in the extremes."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(map(math.isfinite, (end.item() for end in tensor.detach().aminmax())))


def largest(state: Mapping[str, Tensor]) -> float:
    """The largest absolute value of a state's real numbers."""
    real = [tensor for tensor in state.values() if tensor.is_floating_point() and tensor.numel()]
    return max((abs(end.item()) for tensor in real for end in tensor.detach().aminmax()), default=0.0)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return (", ".join(listed[:3]) + (" ..." if len(listed) > 3 else "")) or "none"
