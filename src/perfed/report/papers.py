"""Tables for papers: methods down, settings and metrics across, mean and spread over seeds, the two best marked."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfed.errors import ConfigError, unknown
from perfed.report.collect import Setting, collect
from perfed.report.tables import METRICS
from perfed.result import Result

LOWER = ("std", "loss")
"""Ends of the metrics of which less is better."""
COSTS = ("bytes_up", "bytes_down", "flops", "param_batches", "samples", "seconds")


@dataclass(frozen=True)
class Cell:
    """A metric of one method in one setting; shares in per cent."""

    mean: float
    spread: float | None
    seeds: int


def table(directories: Iterable[Path | str], format: str, metrics: Sequence[str]) -> str:
    """The table as text in one of the formats."""
    if format not in FORMATS:
        raise ConfigError(f"format = {format[:80]!r} is not accepted.", f"It must be one of {', '.join(FORMATS)}.")
    settings = collect(directories)
    for metric in metrics:
        known = {key for s in settings for r in _results(s) for key in r.metrics} | set(COSTS)
        if metric not in known:
            raise unknown("metric in these runs", metric, known)
    rows = [row for setting in settings for row in setting.rows]
    shown = {row["method"]: f"{row['method']} ({row['net']})" if "net" in row else row["method"] for row in rows}
    columns = [(setting, metric) for setting in settings for metric in metrics]
    heads = [_head(setting, metric, len(settings) > 1, len(metrics) > 1) for setting, metric in columns]
    cells = [{shown[name]: cell(s.runs[name], metric) for name in s.runs} for s, metric in columns]
    found = [{label: held for label, held in column.items() if held} for column in cells]
    ranks = [places(column, metric) for column, (_, metric) in zip(found, columns, strict=True)]
    return FORMATS[format](list(shown.values()), heads, found, ranks, [_digits(metric) for _, metric in columns])


def cell(results: Sequence[Result], metric: str) -> Cell | None:
    """Mean and sample standard deviation over seeds; None if a run did not measure it."""
    values = [result.cost.get(metric) if metric in COSTS else result.metrics.get(metric) for result in results]
    known = [float(value) for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None
    factor = 1 if metric in COSTS or metric.endswith(("loss", "_round")) else 100
    spread = factor * statistics.stdev(known) if len(known) > 1 else None
    return Cell(factor * statistics.fmean(known), spread, len(known))


def places(column: Mapping[str, Cell], metric: str) -> dict[str, int]:
    """1 for the best and 2 for the second, by what is shown: equal figures share a place. A lone one has none."""
    digits = _digits(metric)
    shown = {label: round(held.mean, digits) for label, held in column.items()}
    if len(shown) < 2:
        return {}
    lower = metric in COSTS or metric.endswith(LOWER)
    order = sorted(set(shown.values()), reverse=not lower)
    return {label: place for place in (1, 2) for label, v in shown.items() if order[place - 1 : place] == [v]}


Columns = Sequence[dict[str, Cell]]
Ranks = Sequence[dict[str, int]]


def _markdown(labels: Sequence[str], heads: Sequence[str], columns: Columns, ranks: Ranks, digits: list[int]) -> str:
    marks = {0: "{}", 1: "**{}**", 2: "<u>{}</u>"}
    lines = ["| " + " | ".join(["method", *map(_md, heads)]) + " |", "|---|" + "---:|" * len(heads)]
    for label in labels:
        texts = [
            marks[rank.get(label, 0)].format(_text(column.get(label), places, " ± "))
            for column, rank, places in zip(columns, ranks, digits, strict=True)
        ]
        lines.append("| " + " | ".join([_md(label), *texts]) + " |")
    return "\n".join(lines) + "\n"


def _latex(labels: Sequence[str], heads: Sequence[str], columns: Columns, ranks: Ranks, digits: list[int]) -> str:
    marks = {0: "${}$", 1: "$\\mathbf{{{}}}$", 2: "\\underline{{${}$}}"}
    lines = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * len(heads)}}}",
        "\\toprule",
        " & ".join(["Method", *map(_tex, heads)]) + " \\\\",
        "\\midrule",
    ]
    for label in labels:
        texts = []
        for column, rank, places in zip(columns, ranks, digits, strict=True):
            text = _text(column.get(label), places, " \\pm ")
            texts.append("--" if text == "–" else marks[rank.get(label, 0)].format(text))
        lines.append(" & ".join([_tex(label), *texts]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _csv(labels: Sequence[str], heads: Sequence[str], columns: Columns, ranks: Ranks, digits: list[int]) -> str:
    """Full precision, for programs: mean, spread, number of seeds and place of every column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", *(f"{h} {what}" for h in heads for what in ("mean", "spread", "seeds", "place"))])
    for label in labels:
        row: list[object] = [_plain(label)]
        for column, rank in zip(columns, ranks, strict=True):
            held = column.get(label)
            spread = "" if held is None or held.spread is None else held.spread
            row += [held.mean, spread, held.seeds, rank.get(label, "")] if held else ["", "", "", ""]
        writer.writerow(row)
    return out.getvalue()


FORMATS: dict[str, Callable[..., str]] = {"md": _markdown, "latex": _latex, "csv": _csv}


def _results(setting: Setting) -> list[Result]:
    return [result for results in setting.runs.values() for result in results]


def _head(setting: Setting, metric: str, several: bool, metrics: bool) -> str:
    name = " ".join(METRICS.get(metric, metric).split()) + (
        "" if metric in COSTS or metric.endswith("loss") else " (%)"
    )
    if not several:
        return name
    config = setting.first.config
    where = f"{config.data['name']}, {config.split}, {config.clients} clients, {config.rounds} rounds"
    return f"{where}: {name}" if metrics else where


def _digits(metric: str) -> int:
    return 0 if metric in COSTS and metric != "seconds" else 4 if metric.endswith("loss") else 2


def _text(held: Cell | None, digits: int, between: str) -> str:
    if held is None:
        return "–"
    return f"{held.mean:.{digits}f}" + (f"{between}{held.spread:.{digits}f}" if held.spread is not None else "")


def _md(text: str) -> str:
    plain = " ".join(text.split())
    for letter in "\\|<>*_`[]":
        plain = plain.replace(letter, f"\\{letter}")
    return plain


def _plain(text: str) -> str:
    """No spreadsheet takes a name for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text


_TEX = {
    "\\": "\\textbackslash{}",
    "{": "\\{",
    "}": "\\}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
} | {letter: f"\\{letter}" for letter in "$&%#_"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in " ".join(text.split()))
