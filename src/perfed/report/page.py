"""The report: everything that runs and comparisons found, as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perfed import rundir
from perfed.explain.explanation import kept
from perfed.report import facts
from perfed.report.collect import Setting, collect
from perfed.report.html import embedded, page
from perfed.report.tables import COLUMNS, cells


def write(directories: Iterable[Path | str], out: Path) -> Path:
    """Write the page of these runs and comparisons."""
    return rundir.hand_out(render(directories), out)


def render(directories: Iterable[Path | str]) -> str:
    """The page as text."""
    settings = collect(directories)
    groups = [facts.of(setting) for setting in settings]
    first = groups[0]
    what = first["methods"][0]["name"] if len(first["methods"]) == 1 else f"{len(first['methods'])} methods"
    return page(
        "page.html",
        ("report.js",),
        title=f"{what}: {first['title']}",
        data=embedded({"groups": groups}),
        seeds=any(len(group["seeds"]) > 1 for group in groups),
        columns=COLUMNS,
        groups=[{"title": s.title, "rows": [cells(row) for row in s.rows]} for s in settings],
        explanations=list(_explanations(settings)),
    )


PICTURES = 3_000_000
"""bytes of explanations in a page; those beyond it are left out"""


def _explanations(settings: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """What `perfed explain` wrote beside the runs."""
    left = PICTURES
    for setting in settings:
        for row in setting.rows:
            for result in setting.runs[row["method"]]:
                for found in kept(result.directory):
                    left -= sum(len(picture["data"]) for picture in found["pictures"])
                    if left >= 0:
                        yield found
