"""How measured figures stand to published ones: ranks, figures that are close, pairs in order, who is first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from perfed.recipes.column import Column

Rows = Mapping[str, Mapping[str, Any]]
"""The rows of a results file by label; the figures of a column are in `cells`."""


def rank(rows: Rows, columns: Sequence[Column]) -> None:
    """Give every measured figure its place, and the published one beside it its place among those of measured rows.

    A place is given where there are two figures or more.
    """
    for column in columns:
        done = [cell for cell in _cells(rows, column.key) if "measured" in cell]
        for kind in ("published", "measured"):
            held = [cell for cell in done if kind in cell]
            sign = -1 if column.falls else 1
            for cell in held if len(held) > 1 else ():
                cell[f"rank_{kind}"] = 1 + sum(sign * _ahead(other, cell, kind) > 0 for other in held)


def close(rows: Rows, within: float) -> list[int]:
    """How many figures are as published, of how many."""
    found = [cell for row in rows.values() for cell in row["cells"].values() if "difference" in cell]
    return [sum(abs(cell["difference"]) <= within for cell in found), len(found)]


def in_order(found: Mapping[str, Any]) -> tuple[int, int]:
    """How many pairs of methods are in the published order, of all pairs of which both were measured.

    Pairs that are level in the paper do not count.
    """
    same = of = 0
    for key in keys(found["rows"]):
        both = [cell for cell in _cells(found["rows"], key) if "difference" in cell]
        for a, b in combinations(both, 2):
            said, seen = (_ahead(a, b, kind) for kind in ("published", "measured"))
            of += said != 0
            same += said * seen > 0
    return same, of


def first_of_all(found: Mapping[str, Any]) -> tuple[int, int]:
    """In how many columns one of the paper's own methods ranks first, of how many that are the paper's.

    A column counts once every method of its setting was run, and if an own method and another one have figures in it.
    The paper's are columns with published figures, and settings that it draws without numbers.
    """
    open_settings = {name.rpartition("/")[0] for name in found["missing"]}
    printed = {key for row in found["rows"].values() for key, cell in row["cells"].items() if "published" in cell}
    settings = {Column(key).setting for key in printed}
    best = []
    for key in keys(found["rows"]):
        cells = {label: row["cells"].get(key, {}) for label, row in found["rows"].items()}
        own = [
            cell["rank_measured"] for label, cell in cells.items() if label in found["own"] and "rank_measured" in cell
        ]
        said = key in printed or (bool(printed) and Column(key).setting not in settings)
        several = sum("measured" in cell for cell in cells.values()) > 1
        if own and said and several and Column(key).setting not in open_settings:
            best.append(min(own))
    return best.count(1), len(best)


def keys(rows: Rows) -> list[str]:
    """Every column, in order."""
    return list(dict.fromkeys(key for row in rows.values() for key in row["cells"]))


def _ahead(a: Mapping[str, Any], b: Mapping[str, Any], kind: str) -> float:
    """By how much one figure is above another; nothing, if only their rounding differs."""
    return round(float(a[kind] - b[kind]), 9)


def _cells(rows: Rows, key: str) -> list[dict[str, Any]]:
    return [row["cells"][key] for row in rows.values() if row["cells"].get(key)]
