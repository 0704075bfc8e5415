"""The plot of a reproduced table: published beside measured, for every method and column."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import groupby, pairwise
from math import ceil
from pathlib import Path
from typing import Any

from perfed import rundir, standing
from perfed.recipes.column import SETTLED, Column
from perfed.report.figures import COLOURS, LINES

PANELS, MANY = 3, 12
"""Columns up to which each has a panel of its own, twice as many of one or two settings, in a table of many methods or
where no two neighbours are of one metric.

More are drawn as lines over the settings."""


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the results of a recipe as SVG, the same bytes for the same figures."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = found["rows"]
    keys = [key for key in standing.keys(rows) if any("measured" in row["cells"].get(key, {}) for row in rows.values())]
    with mpl.rc_context({"svg.hashsalt": "perfed", "font.size": 8}):
        metrics = [Column(key).metric for key in keys]
        apart = all(one != other for one, other in pairwise(metrics))
        wide = apart or len(rows) >= MANY or len({Column(key).setting for key in keys}) <= 2
        few = len(keys) <= (2 * PANELS if wide else PANELS)
        down, across = _grid(len(keys))
        size = (2.6 * across + 1.4, (1.0 + 0.22 * len(rows)) * down + 0.2) if few else (8.0, 3.8)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        if few:
            _panels(figure, rows, keys)
        else:
            _lines(figure, rows, keys)
        made = io.BytesIO()
        figure.savefig(made, format="svg", metadata={"Date": None})
    rundir.write(path, made.getvalue())


def _grid(panels: int) -> tuple[int, int]:
    """How many of them below and beside each other: up to four in one line, or else in lines of `PANELS`."""
    down = 1 if panels <= PANELS + 1 else ceil(panels / PANELS)
    return down, max(1, ceil(panels / down))


def _panels(figure: Any, rows: Mapping[str, Any], keys: list[str]) -> None:
    """A panel per column: a ring is published, a dot is measured."""
    panels = figure.subplots(*_grid(len(keys)), sharey=True, squeeze=False).flatten()
    names = list(rows)
    if _grid(len(keys))[0] > 1:  # those of a metric one after another
        metrics = [Column(key).metric for key in keys]
        keys = sorted(keys, key=lambda key: metrics.index(Column(key).metric))
    for axes, key in zip(panels, keys, strict=False):
        for y, label in enumerate(names):
            cell = rows[label]["cells"].get(key, {})
            if "published" in cell:
                axes.plot([cell["published"]], [y], "o", mfc="none", color=COLOURS[1], label="published")
            if "measured" in cell:
                axes.errorbar(
                    [cell["measured"]], [y], xerr=cell.get("spread") or None, fmt="o", color=COLOURS[0],
                    markersize=4, capsize=2, label="measured",
                )  # fmt: skip
            if "difference" in cell:
                axes.plot([cell["published"], cell["measured"]], [y, y], color="#bbbbbb", linewidth=0.8, zorder=0)
        _plain(axes)
        axes.set_title(key)
        axes.set_xlabel(_unit(key))
        axes.locator_params(axis="x", nbins=5)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 5), useOffset=False)
    for axes in panels[len(keys) :]:
        axes.set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    _legend(figure, panels)


def _lines(figure: Any, rows: Mapping[str, Any], keys: list[str]) -> None:
    """Dots per method over the columns, joined while the metric is the same; rings are published."""
    axes = figure.subplots(1, 1)
    for number, (label, row) in enumerate(rows.items()):
        colour = COLOURS[number % len(COLOURS)]
        held = [(x, row["cells"].get(key, {})) for x, key in enumerate(keys)]
        said = [(x, cell["published"]) for x, cell in held if "published" in cell]
        style = LINES[number // len(COLOURS) % len(LINES)]
        drawn = {"color": colour, "linewidth": 1.2, "marker": "."}
        axes.plot([], [], style, label=label, **drawn)
        for _, alike in groupby(held, lambda one: Column(keys[one[0]]).metric):
            seen = [(x, cell["measured"]) for x, cell in alike if "measured" in cell]
            axes.plot([x for x, _ in seen], [y for _, y in seen], style, **drawn)
        axes.plot([x for x, _ in said], [y for _, y in said], "o", mfc="none", color=colour, markersize=5)
    one = len({key.rpartition("/")[2] for key in keys}) == 1
    shown = [Column(key).setting if one else key for key in keys]
    axes.set_xticks(range(len(keys)), shown, rotation=0 if one else 30, ha="center" if one else "right")
    published = any("published" in row["cells"].get(key, {}) for row in rows.values() for key in keys)
    axes.set_title(f"dots: measured{'; rings: published' if published else ''}")
    axes.set_ylabel(f"{Column(keys[0]).metric}, {_unit(keys[0])}" if one else _unit(keys[0]))
    _plain(axes)
    figure.legend(loc="outside right center", frameon=False)


def _unit(key: str) -> str:
    """What a column's figures are in."""
    column = Column(key)
    if not column.whole:
        return "points" if column.falls else "%"
    return "rounds" if column.metric.startswith(SETTLED) else "10^9"


def _plain(axes: Any) -> None:
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, panels: Any) -> None:
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
