"""Tables for the terminal, for text and for Markdown."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from perfed.result import Result

METRICS = {
    "local.mean": "accuracy, mean over clients",
    "local.weighted": "  weighted by samples",
    "local.std": "  spread over clients",
    "local.worst10": "  worst tenth of clients",
    "local.macro_f1": "macro-F1",
    "local.loss": "loss",
    "local.before.mean": "accuracy before adaptation",
    "local.last": "accuracy, mean of the last rounds",
    "local.best_val": "accuracy at the best validation round",
    "new": "New: all clients' vote on pooled test data",
    "external": "External: their vote on another source",
    "unseen.mean": "unseen clients, mean accuracy",
}


def result_table(result: Result) -> Table:
    """The metrics and costs of one run."""
    config, cost = result.config, result.cost
    table = _table(f"{config.method['name']} on {config.data['name']}, seed {config.seed}")
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, title in METRICS.items():
        value = result.metrics.get(key)
        if value is None or (key == "local.last" and config.last_k == 1):
            continue
        table.add_row(title, f"{value:.4f}" if key.endswith("loss") else percent(value))
    table.add_section()
    table.add_row("bytes up / down", f"{size(cost['bytes_up'])} / {size(cost['bytes_down'])}")
    if cost.get("bytes_scored"):
        table.add_row("bytes down only to score", size(cost["bytes_scored"]))
    table.add_row("FLOPs of training", count(cost["flops"]))
    table.add_row("samples", count(cost["samples"]))
    table.add_row("time", duration(cost["seconds"]))
    if result.faults:
        table.add_row("updates refused", str(len(result.faults)))
    return table


COLUMNS = ("method", "accuracy %", "std", "worst 10 %", "New", "up", "down", "FLOPs", "time")
NARROW = 104
"""Terminals narrower than this are shown fewer columns."""
DISPENSABLE = ("std", "New", "time")


def leaderboard_table(rows: Sequence[dict[str, Any]], title: str, width: int = NARROW) -> Table:
    """Methods ranked by accuracy; accuracies in per cent, with the spread over seeds."""
    table = _table(title)
    shown = [name for name in COLUMNS if width >= NARROW or name not in DISPENSABLE]
    for name in shown:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for place, row in enumerate(rows):
        texts = dict(zip(COLUMNS, cells(row), strict=True))
        table.add_row(*[texts[name] for name in shown], style="" if place else "bold")
    return table


def cells(row: dict[str, Any]) -> list[str]:
    """A leaderboard's row as text."""
    spread = f" ± {100 * row['spread']:.2f}" if row["spread"] is not None else ""
    shares = [percent(row[key], "") for key in ("mean", "std", "worst10", "new")]
    return [
        f"{row['method']} ({row['net']})" if "net" in row else row["method"],
        shares[0] + spread,
        *shares[1:],
        size(row["bytes_up"]),
        size(row["bytes_down"]),
        count(row["flops"]),
        duration(row["seconds"]),
    ]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The leaderboard as a Markdown table."""
    head = "| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS)
    return head + "".join("\n| " + " | ".join(cells(row)) + " |" for row in rows) + "\n"


def plain_text(renderable: Any, width: int = 120) -> str:
    """A table without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def percent(value: float | None, sign: str = " %") -> str:
    """A fraction in per cent."""
    return "–" if value is None else f"{100 * value:.2f}{sign}"


def size(number: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def count(number: float) -> str:
    """A large number with an SI letter."""
    for letter in ("", "k", "M", "G", "T", "P"):
        if number < 1000:
            return f"{number:.0f}" if not letter else f"{number:.1f} {letter}"
        number /= 1000
    return f"{number:.1f} E"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
