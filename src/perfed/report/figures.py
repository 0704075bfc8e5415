"""Figures: accuracy by round, and accuracy by client. Colours by Okabe and Ito, told apart by the colour-blind too."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from perfed.result import Result

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
LINES = ("-", "--", "-.", ":")

GREY = "#b9bfc7"
SMALLEST = 8
"""points of the smallest letters"""
FEW = len(COLOURS)
"""methods that have a colour each; of more, the best ones have"""

Runs = Mapping[str, Sequence["Result"]]
"""Method by name, one result per seed."""


def curves(runs: Runs, path: Path) -> None:
    """Write the figure of a comparison."""
    figure = compared(runs)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(temporary)
    temporary.replace(path)


def compared(runs: Runs) -> Any:
    """Mean accuracy by round and the clients' accuracies; shading is the range over seeds.

    Up to eight methods have a line each in both panels. Of more, the best eight have colours and names at their lines,
    the others are grey, and the clients stand beside the names of all methods, the best one on top.
    """
    ranked = sorted(runs, key=lambda name: -_final(runs[name]))
    colours = dict(zip(runs if len(runs) <= FEW else ranked, COLOURS, strict=False))
    figure, (left, right) = _figure(runs)
    for name in reversed(ranked):  # the best ones on top
        _rounds(left, runs[name], name, colours.get(name, GREY), name in colours)
    left.set(
        xlabel="round",
        ylabel="accuracy, mean over clients (%)",
        title="By round" + (" (star: after adaptation)" if _stars(left) else ""),
    )
    if len(runs) <= FEW:
        for name in runs:
            sorts = [_accuracies(result) for result in runs[name]]
            least = min(map(len, sorts))
            _band(right, list(range(1, least + 1)), [s[:least] for s in sorts], name, colours[name])
        right.set(xlabel="clients, worst first", ylabel="accuracy (%)", title="By client, after the last round")
    else:
        _rows(right, runs, ranked, colours)
    if len(runs) > 1:
        _names(left, colours, {name: 100 * _final(runs[name]) for name in colours})
    return figure


def _accuracies(result: Result) -> list[float]:
    """The clients' accuracies, worst first."""
    return sorted(a for a in result.clients["accuracy"] if a is not None and math.isfinite(a))


def _final(results: Sequence[Result]) -> float:
    return float(np.mean([result.metrics["local.mean"] for result in results]))


def _rows(axes: Any, runs: Runs, ranked: Sequence[str], colours: Mapping[str, str]) -> None:
    """A row per method: a small dot for every client, a large one for their mean."""
    for row, name in enumerate(ranked):
        colour = colours.get(name, "#6b7480")
        clients = [100 * a for result in runs[name] for a in _accuracies(result)]
        axes.plot(clients, [row] * len(clients), "o", color=colour, alpha=0.3, markersize=3, markeredgewidth=0)
        axes.plot([100 * _final(runs[name])], [row], "o", color=colour, markersize=6.5, markeredgecolor="white")
    axes.set_yticks(range(len(ranked)), ranked, fontsize=SMALLEST)
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="accuracy (%)", title="Every client, and the mean (large), at the end")


def _names(axes: Any, colours: Mapping[str, str], ends: Mapping[str, float]) -> None:
    """The methods' names beside the ends of their lines, pushed apart where these are close."""
    low, high = axes.get_ylim()
    left, edge = axes.get_xlim()
    room = (high - low) * 0.19 / axes.figure.get_figheight()
    order = sorted(ends, key=lambda name: -ends[name])
    places: list[float] = []
    for number, name in enumerate(order):
        highest = places[-1] - room if places else high
        places.append(max(min(ends[name], highest), low + (len(order) - 1 - number) * room))
    for place, name in zip(places, order, strict=True):
        colour = colours[name]
        axes.annotate(
            name,
            (edge, ends[name]),
            xytext=(edge + 0.07 * (edge - left), place),
            color=colour,
            fontsize=SMALLEST,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1},
        )


def _rounds(axes: Any, results: Sequence[Result], name: str, colour: str, shaded: bool = True) -> None:
    """Accuracy by round. Where clients adapt at the very end only, that jump is a mark of its own."""
    history = results[0].history
    jump = "local.before.mean" in history[-1] and len(history) > 1 and "local.before.mean" not in history[0]
    keys = ["local.mean"] * (len(history) - 1) + ["local.before.mean" if jump else "local.mean"]
    rounds = [entry["t"] for entry in history]
    _band(
        axes, rounds, [[e[key] for e, key in zip(r.history, keys, strict=True)] for r in results], name, colour, shaded
    )
    if jump and shaded:
        after = np.mean([r.history[-1]["local.mean"] for r in results])
        axes.plot(rounds[-1:], [100 * after], marker="*", markersize=11, color=colour, clip_on=False)
        axes.plot([rounds[-1]] * 2, [100 * after, axes.lines[-2].get_ydata()[-1]], ":", color=colour, linewidth=1)


def _band(axes: Any, x: list[int], values: list[list[float]], name: str, colour: str, shaded: bool = True) -> None:
    y = 100 * np.array(values, dtype=float)
    marker = "o" if shaded and len(x) <= 12 else None
    axes.plot(
        x, y.mean(axis=0), label=name, linewidth=1.8 if shaded else 1.0, marker=marker, markersize=3.5, color=colour
    )
    if shaded and len(y) > 1:
        axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.13, linewidth=0)


def _stars(axes: Any) -> bool:
    return any(line.get_marker() == "*" for line in axes.lines)


def _figure(runs: Runs) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    many = len(runs) > FEW
    size = (12.0, max(4.4, 0.19 * len(runs) + 1.2)) if many else (9.6 + (1.2 if len(runs) > 1 else 0), 3.8)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for one in axes:
        one.grid(color="#e6e6e6", linewidth=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
        one.xaxis.get_major_locator().set_params(integer=True)
    return figure, axes
