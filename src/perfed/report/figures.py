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

TALLEST_LEGEND = 16
"""names in a column of the legend"""

Runs = Mapping[str, Sequence["Result"]]
"""Method by name, one result per seed."""


def curves(runs: Runs, path: Path) -> None:
    """Mean accuracy by round and each client's accuracy, worst first; shading is the range over seeds."""
    figure, (left, right) = _figure(2, runs)
    for number, (name, results) in enumerate(runs.items()):
        style = {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number // len(COLOURS) % len(LINES)]}
        _rounds(left, results, name, style)
        sorts = [sorted(a for a in r.clients["accuracy"] if a is not None and math.isfinite(a)) for r in results]
        least = min(map(len, sorts))
        _band(right, list(range(1, least + 1)), [s[:least] for s in sorts], name, style)
    left.set(
        xlabel="round",
        ylabel="accuracy, mean over clients (%)",
        title="By round" + (" (star: after adaptation)" if _stars(left) else ""),
    )
    right.set(xlabel="clients, worst first", ylabel="accuracy (%)", title="By client, after the last round")
    if len(runs) > 1:
        handles, labels = left.get_legend_handles_labels()
        columns = -(-len(labels) // TALLEST_LEGEND)
        figure.legend(handles, labels, loc="outside right center", frameon=False, ncols=columns, fontsize="small")
    _save(figure, path)


def _rounds(axes: Any, results: Sequence[Result], name: str, style: dict[str, str]) -> None:
    """Accuracy by round. Where clients adapt at the very end only, that jump is a mark of its own."""
    history = results[0].history
    jump = "local.before.mean" in history[-1] and len(history) > 1 and "local.before.mean" not in history[0]
    keys = ["local.mean"] * (len(history) - 1) + ["local.before.mean" if jump else "local.mean"]
    rounds = [entry["t"] for entry in history]
    _band(axes, rounds, [[e[key] for e, key in zip(r.history, keys, strict=True)] for r in results], name, style)
    if jump:
        after = np.mean([r.history[-1]["local.mean"] for r in results])
        axes.plot(rounds[-1:], [100 * after], marker="*", markersize=11, color=style["color"], clip_on=False)
        axes.plot(
            [rounds[-1]] * 2, [100 * after, axes.lines[-2].get_ydata()[-1]], ":", color=style["color"], linewidth=1
        )


def _band(axes: Any, x: list[int], values: list[list[float]], name: str, style: dict[str, str]) -> None:
    y = 100 * np.array(values, dtype=float)
    axes.plot(
        x, y.mean(axis=0), label=name, linewidth=1.8, marker="o" if len(x) <= 12 else None, markersize=3.5, **style
    )
    if len(y) > 1:
        axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=style["color"], alpha=0.13, linewidth=0)


def _stars(axes: Any) -> bool:
    return any(line.get_marker() == "*" for line in axes.lines)


def _figure(panels: int, runs: Runs) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = -(-len(runs) // TALLEST_LEGEND) if len(runs) > 1 else 0
    figure = Figure(figsize=(4.8 * panels + 1.6 * columns, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    for one in axes:
        one.grid(color="#e6e6e6", linewidth=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
        one.xaxis.get_major_locator().set_params(integer=True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(temporary)
    temporary.replace(path)
