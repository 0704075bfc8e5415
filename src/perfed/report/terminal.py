"""A plot of accuracy by round made of characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.text import Text

MARKS = "●▲■◆+x*o"
COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan", "white", "bright_black")


def plot(series: Mapping[str, Sequence[tuple[int, float | None]]], width: int = 80, height: int = 14) -> Text:
    """Accuracy in per cent over rounds, one mark per method, with a legend."""
    points = [(t, value) for line in series.values() for t, value in line if value is not None]
    if not points:
        return Text("There is no evaluation to plot.")
    last, low, high = max(t for t, _ in points), min(v for _, v in points), max(v for _, v in points)
    if high - low < 0.02:
        low, high = max(0.0, low - 0.01), min(1.0, high + 0.01)
    wide = max(20, width - 10)
    grid = [[(" ", "")] * wide for _ in range(height)]
    for number, line in reversed(list(enumerate(series.values()))):
        mark = MARKS[number % len(MARKS)], COLOURS[number % len(COLOURS)]
        for t, value in _filled([(t, v) for t, v in line if v is not None], wide, last):
            row = round((high - value) / (high - low) * (height - 1))
            grid[row][t] = ("·", mark[1]) if grid[row][t][0] == " " else grid[row][t]
        for t, v in line:
            if v is not None:
                grid[round((high - v) / (high - low) * (height - 1))][_column(t, wide, last)] = mark
    text = Text()
    for row, cells in enumerate(grid):
        value = high - row * (high - low) / (height - 1)
        text.append(f"{100 * value:6.1f} % " if row % 3 == 0 or row == height - 1 else " " * 9)
        text.append("│")
        for letter, colour in cells:
            text.append(letter, style=colour)
        text.append("\n")
    text.append(" " * 9 + "└" + "─" * wide + "\n")
    text.append(" " * 10 + "1" + f"round {last}".rjust(wide - 1) + "\n")
    for number, name in enumerate(series):
        text.append(f"  {MARKS[number % len(MARKS)]} {name}", style=COLOURS[number % len(COLOURS)])
    return text


def _column(t: int, wide: int, last: int) -> int:
    return round((t - 1) / max(1, last - 1) * (wide - 1))


def _filled(line: Sequence[tuple[int, float]], wide: int, last: int) -> list[tuple[int, float]]:
    """The straight lines between points, one value per column."""
    found = []
    for (t0, v0), (t1, v1) in pairwise(line):
        a, b = _column(t0, wide, last), _column(t1, wide, last)
        found += [(c, v0 + (v1 - v0) * (c - a) / max(1, b - a)) for c in range(a + 1, b)]
    return found
