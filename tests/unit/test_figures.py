"""The figure of a comparison: readable with few methods and with many."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.text import Annotation, Text

from perfed.report.figures import COLOURS, FEW, GREY, compared


def result(level: float, adapted: bool = False) -> Any:
    """A finished run as far as the figure looks at it."""
    history = [{"t": t, "local.mean": level * t / 4} for t in range(1, 5)]
    if adapted:
        history[-1] = {"t": 4, "local.mean": level, "local.before.mean": 0.1}
    clients = {"accuracy": [level - 0.1, level, level + 0.1, float("nan")]}
    return SimpleNamespace(history=history, metrics={"local.mean": level}, clients=clients)


def runs(many: int) -> dict[str, list[Any]]:
    """Methods that end close to each other, the last one best."""
    return {f"method{k}": [result(0.8 + 0.002 * k, adapted=k == 2)] * 2 for k in range(many)}


def names(axes: Any) -> list[Any]:
    return [text for text in axes.texts if isinstance(text, Annotation)]


@pytest.mark.parametrize("many", [2, FEW, 30])
def test_names_stand_at_the_lines_and_not_on_each_other(many: int) -> None:
    figure = compared(runs(many))
    figure.canvas.draw()
    left, _ = figure.axes
    boxes = [Text.get_window_extent(text) for text in names(left)]  # without the lines that lead to them
    assert len(boxes) == min(many, FEW)
    assert not any(one.y0 < other.y1 - 1 and other.y0 < one.y1 - 1 for one, other in combinations(boxes, 2))
    assert all(box.x1 <= figure.bbox.width and box.y0 >= 0 for box in boxes)
    assert not figure.legends


def test_of_many_methods_the_best_are_in_colour_and_all_are_named() -> None:
    figure = compared(runs(30))
    left, right = figure.axes
    coloured = {line.get_label() for line in left.lines if line.get_color() in COLOURS and line.get_label()[0] == "m"}
    assert coloured == {f"method{k}" for k in range(30 - FEW, 30)}
    assert sum(line.get_color() == GREY for line in left.lines) == 30 - FEW
    assert [tick.get_text() for tick in right.get_yticklabels()] == [f"method{k}" for k in reversed(range(30))]
    means = [line.get_xdata()[0] for line in right.lines[1::2]]
    assert means == pytest.approx([100 * (0.8 + 0.002 * k) for k in reversed(range(30))])
    assert all(len(line.get_xdata()) == 6 for line in right.lines[::2])  # three clients that have a score, two seeds


def test_few_methods_have_a_line_in_both_panels_and_a_star_where_they_adapt() -> None:
    figure = compared({name: found[:1] for name, found in runs(3).items()})
    left, right = figure.axes
    assert [line.get_marker() for line in left.lines].count("*") == 1
    assert len(right.lines) == 3
    assert not names(compared(runs(1)).axes[0])
