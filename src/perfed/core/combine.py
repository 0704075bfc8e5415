"""The server's arithmetic: weighted means over what arrived, always in client order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from perfed.core.state import Selection, State


def weighted_mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
    """sum_i (w_i / sum w) * state_i for every name; whole-number tensors are rounded to the nearest."""
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    mean: State = {}
    for name, first in states[0].items():
        exact = first.dtype if first.is_floating_point() else torch.float64
        value = first.to(exact) * shares[0]
        for state, share in zip(states[1:], shares[1:], strict=True):
            value.add_(state[name].to(exact), alpha=share)
        mean[name] = value if first.is_floating_point() else value.round().to(first.dtype)
    return mean


def merge(state: Mapping[str, Tensor], which: Mapping[str, Selection], values: Mapping[str, Tensor]) -> State:
    """A new state in which the selected elements have new values and all others are as they were."""
    merged = dict(state)
    for name, value in values.items():
        chosen = which.get(name, True)
        if isinstance(chosen, bool):
            merged[name] = value
        else:
            merged[name] = merged[name].clone()
            merged[name][chosen] = value
    return merged


def stride(old: Mapping[str, Tensor], new: Mapping[str, Tensor], rate: float, names: Collection[str]) -> State:
    """The new state, but old + rate * (new - old) for these names: a server's own step size; 1 changes nothing."""
    return {name: torch.lerp(old[name], tensor, rate) if name in names else tensor for name, tensor in new.items()}
