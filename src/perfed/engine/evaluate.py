"""From each client's confusion matrix to the numbers that are reported. Test data never selects anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.core.state import State

Numbers = NDArray[np.float64]


PIECE = 256
"""clients whose matrices are looked at together"""


def accuracy(confusion: Tensor) -> float:
    """The share of right predictions; not a number for a client without samples."""
    return float(_rates([confusion]).accuracy[0])


def macro_f1(confusion: Tensor) -> float:
    """The mean F1 over the classes that occur in the labels."""
    return float(_rates([confusion]).f1[0])


class Rates(NamedTuple):
    """What the clients' matrices say: numbers of samples, accuracies and macro-F1, in the clients' order."""

    counts: Numbers
    accuracy: Numbers
    f1: Numbers


def _rates(confusions: Sequence[Tensor]) -> Rates:
    parts = []
    for at in range(0, len(confusions), PIECE):
        some = torch.stack(list(confusions[at : at + PIECE])).double().numpy()
        hits, support, predicted = some.diagonal(axis1=1, axis2=2), some.sum(axis=2), some.sum(axis=1)
        present, counts = support > 0, support.sum(axis=1)
        f1 = np.where(present, 2 * hits / np.maximum(support + predicted, 1), 0).sum(axis=1)
        known = np.where(counts > 0, 1.0, np.nan)
        accuracies = hits.sum(axis=1) / np.maximum(counts, 1) * known
        parts.append((counts, accuracies, f1 / np.maximum(present.sum(axis=1), 1) * known))
    return Rates(*(np.concatenate(one) for one in zip(*parts, strict=True)))


def without_labels(state: State) -> State:
    """Scores whose matrices tell right (first cell) from wrong (second), and nothing about any class."""
    return {name: _folded(value) if name.endswith("/confusion") else value for name, value in state.items()}


def _folded(confusion: Tensor) -> Tensor:
    folded, right = torch.zeros_like(confusion), confusion.diagonal().sum()
    folded[0, 0] = right
    if len(folded) > 1:
        folded[0, 1] = confusion.sum() - right
    return folded


def summary(values: Numbers, weights: Numbers) -> dict[str, float]:
    """Mean over clients, weighted by samples and not, spread over clients, and the worst tenth."""
    known = np.isfinite(values)
    values, weights = values[known], weights[known]
    if not len(values):
        return {}
    worst = np.sort(values)[: max(1, len(values) // 10)]
    return {
        "mean": float(values.mean()),
        "weighted": float((values * weights).sum() / weights.sum()),
        "std": float(values.std()),
        "worst10": float(worst.mean()),
    }


def scores(states: Sequence[State], stage: str, *, labels: bool = True) -> dict[str, Any]:
    """Local metrics over clients from what workers measured, before or after adaptation; by class with labels."""
    found: dict[str, Any] = {}
    counts, accuracies, f1 = _rates([state[f"{stage}/test/confusion"] for state in states])
    found |= summary(accuracies, counts)
    losses = np.array([float(state[f"{stage}/test/loss"]) for state in states])
    if counts.sum():
        found["loss"] = float(losses.sum() / counts.sum())
    if counts.sum() and labels:
        found["macro_f1"] = float(np.nanmean(f1))
    prefix = f"{stage}/test/measure/"
    for name in sorted(key for key in states[0] if key.startswith(prefix)):
        values = np.array([float(state[name]) for state in states]) / np.where(counts > 0, counts, np.nan)
        found |= {f"{name.removeprefix(prefix)}.{k}": v for k, v in summary(values, counts).items()}
    weights, accuracies, _ = _rates([state[f"{stage}/val/confusion"] for state in states])
    if weights.sum():
        found["val"] = summary(accuracies, weights)["mean"]
    return found


def per_client(states: Sequence[State], stage: str) -> list[float]:
    """Every client's test accuracy."""
    return [float(one) for one in _rates([state[f"{stage}/test/confusion"] for state in states]).accuracy]


def ensemble_accuracy(total: Tensor, y: Tensor) -> float:
    """The accuracy of the clients' summed probabilities: the client is unknown, all of them vote."""
    return float((total.argmax(dim=1) == y).double().mean()) if len(total) else float("nan")


def best_validation(history: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The evaluation with the highest validation accuracy, the earliest of equals."""
    judged = [entry for entry in history if "local.val" in entry]
    return max(judged, key=lambda entry: entry["local.val"]) if judged else None
