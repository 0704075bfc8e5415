"""Numbers as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from perfed.report.tables import COLUMNS, count, duration, leaderboard_table, markdown, percent, plain_text, size
from perfed.report.terminal import plot


@pytest.mark.parametrize(
    ("said", "want"),
    [
        (size(999), "999 B"),
        (size(1000), "1.0 kB"),
        (size(2.5e9), "2.5 GB"),
        (size(3e15), "3000.0 TB"),
        (count(999), "999"),
        (count(1.25e9), "1.2 G"),
        (duration(9.96), "10.0 s"),
        (duration(125), "2 min 05 s"),
        (duration(3599), "59 min 59 s"),
        (duration(3600), "1 h 00 min"),
        (duration(7500), "2 h 05 min"),
        (percent(0.98765), "98.77 %"),
        (percent(None), "–"),
    ],
)
def test_units(said: str, want: str) -> None:
    assert said == want


def row(method: str, mean: float, spread: float | None) -> dict[str, Any]:
    costs = {"bytes_up": 294.4e3, "bytes_down": 309.6e3, "flops": 367.5e6, "seconds": 4.0}
    return {"method": method, "mean": mean, "spread": spread, "std": 0.1095, "worst10": 0.7, "new": None, **costs}


def test_leaderboard_shows_spread_over_seeds_and_fits_a_narrow_terminal() -> None:
    rows = [row("lgfedavg+ft", 0.9876, 0.0123), row("fedbn", 0.5, None) | {"net": "batchnorm"}]
    text = plain_text(leaderboard_table(rows, "title"), width=104)
    assert "98.76 ± 1.23" in text
    assert "…" not in text
    assert all(name in text for name in COLUMNS)
    narrow = plain_text(leaderboard_table(rows, "title", width=80), width=80)
    assert "…" not in narrow
    assert "367.5 M" in narrow
    lines = markdown(rows).splitlines()
    assert len(lines) == 4
    assert all(line.count("|") == len(COLUMNS) + 1 for line in lines)


def test_plot_puts_the_best_on_top_and_the_last_round_right() -> None:
    lines = plot({"a": [(1, 0.2), (2, 0.9)], "b": [(1, 0.1), (2, None)]}, width=40, height=8).plain.splitlines()
    assert lines[0].startswith("  90.0 %")
    assert lines[0].endswith("●")
    assert "▲" in lines[7]
    assert "round 2" in lines[9]
    assert "● a" in lines[10]
    assert "no evaluation" in plot({"a": [(1, None)]}).plain
    assert plot({"a": [(1, 1.0)]}).plain.count("●") == 2
