"""How measured figures stand to published ones: ranks, figures that are close, pairs in order, who is first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

from perfed.recipes.column import Column

Rows = Mapping[str, Mapping[str, Any]]
"""The rows of a results file by label; the figures of a column are in `cells`."""


def rank(rows: Rows, columns: Sequence[Column]) -> None:
    """Give every measured figure its place, and the published one beside it its place among those of measured rows.

    A place is given where there are two figures or more.
    """
    for column in columns:
        measured = comparable(rows, column.key)
        published = {
            label: cell["published"] for label in measured if "published" in (cell := rows[label]["cells"][column.key])
        }
        sign = -1 if column.falls else 1
        for kind, held in (("published", published), ("measured", measured)):
            for label, value in held.items() if len(held) > 1 else ():
                ahead = sum(sign * _ahead(other, value) > 0 for other in held.values())
                rows[label]["cells"][column.key][f"rank_{kind}"] = 1 + ahead


def comparable(rows: Rows, key: str) -> dict[str, float]:
    """What the measured rows of a column are compared by: their means over the seeds that all of them have.

    A seed is a division of the data and first weights, which are kinder to all methods or to none. Where the rows have
    no seed in common, these are the means of what each has.
    """
    cells = {label: row["cells"][key] for label, row in rows.items() if "measured" in row["cells"].get(key, {})}
    setting = Column(key).setting or "run"
    by_seed = {
        label: {seed: value for seed, value in zip(rows[label]["seeds"][setting], cell["values"], strict=True)
                if value is not None}
        for label, cell in cells.items() if "seeds" in rows[label]
    }  # fmt: skip
    common = set.intersection(*map(set, by_seed.values())) if by_seed else set()
    if not common:
        return {label: float(cell["measured"]) for label, cell in cells.items()}
    return {label: fmean(values[seed] for seed in sorted(common)) for label, values in by_seed.items()}


def close(rows: Rows, within: float) -> list[int]:
    """How many figures are as published, of how many."""
    found = [cell for row in rows.values() for cell in row["cells"].values() if "difference" in cell]
    return [sum(abs(cell["difference"]) <= within for cell in found), len(found)]


def in_order(found: Mapping[str, Any]) -> tuple[int, int]:
    """How many pairs of methods are in the published order, of all pairs of which both were measured.

    Pairs that are level in the paper do not count, nor do rows that tell of the same runs.
    """
    same = of = 0
    for key in keys(found["rows"]):
        measured = comparable(found["rows"], key)
        cells = {label: found["rows"][label]["cells"][key] for label in measured}
        both = [(cell["published"], measured[label], label) for label, cell in cells.items() if "published" in cell]
        for (said_a, seen_a, a), (said_b, seen_b, b) in combinations(both, 2):
            if _same_runs(found["rows"], key, a, b):
                continue
            said, seen = _ahead(said_a, said_b), _ahead(seen_a, seen_b)
            of += said != 0
            same += said * seen > 0
    return same, of


def first_of_all(found: Mapping[str, Any], kind: Literal["measured", "published"] = "measured") -> tuple[int, int]:
    """In how many columns one of the paper's own methods ranks first, of how many that are the paper's.

    A column counts once every method of its setting was run, and if an own method and another one have figures in it.
    The paper's are columns with published figures, and settings that it draws without numbers. With `published`: in how
    many of these columns it is first in the paper, of those for which the paper has figures to rank.
    """
    open_settings = {name.rpartition("/")[0] for name in found["missing"]}
    printed = {key for row in found["rows"].values() for key, cell in row["cells"].items() if "published" in cell}
    settings = {Column(key).setting for key in printed}
    best = []
    for key in keys(found["rows"]):
        cells = {label: row["cells"].get(key, {}) for label, row in found["rows"].items()}
        own = [cell for label, cell in cells.items() if label in found["own"] and "rank_measured" in cell]
        said = key in printed or (bool(printed) and Column(key).setting not in settings)
        several = sum("measured" in cell for cell in cells.values()) > 1
        if own and said and several and Column(key).setting not in open_settings:
            places = [cell[f"rank_{kind}"] for cell in own if f"rank_{kind}" in cell]
            best += [min(places)] if places else []
    return best.count(1), len(best)


def keys(rows: Rows) -> list[str]:
    """Every column, in order."""
    return list(dict.fromkeys(key for row in rows.values() for key in row["cells"]))


def _same_runs(rows: Rows, key: str, a: str, b: str) -> bool:
    """Whether two rows tell of the same runs. Fine-tuning leaves the federation's state, but not the figures."""
    setting = Column(key).setting or "run"
    ends = [rows[label].get("state_sha256", {}).get(setting) for label in (a, b)]
    values = [rows[label]["cells"][key].get("values") for label in (a, b)]
    return bool(ends[0]) and ends[0] == ends[1] and values[0] == values[1]


def _ahead(a: float, b: float) -> float:
    """By how much one figure is above another; nothing, if only their rounding differs."""
    return round(a - b, 9)
