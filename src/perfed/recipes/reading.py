"""What a result says about its paper, as sentences with a comparison each that must hold.

    [pfedc local.mean] < [fedrep local.mean] - 2 and [pfedc local.task.mean published] > 99

A figure is [LABEL COLUMN] or [LABEL COLUMN FIELD] with the fields of a cell: measured (the default), published,
difference, spread, rank_measured, rank_published, and seedN for the measured value number N, from 0.

With `seeds = N` a sentence is about figures that are each of N seeds, with `budget` about results of that budget.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfed.errors import ConfigError
from perfed.recipes.budget import BUDGETS

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
TOKEN = re.compile(r"\s*(?:\[([^\]]+)\]|(\d+(?:\.\d+)?)|(<=|>=|==|<|>)|([+-]))")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A sentence about a result and what makes it true."""

    claim: str
    check: str
    seeds: int | None = None
    budget: str | None = None

    def __post_init__(self) -> None:
        if self.seeds is not None and (not isinstance(self.seeds, int) or self.seeds < 1):
            raise ConfigError(f"A reading has seeds = {self.seeds!r}.", "It must be a whole number above 0.")
        if self.budget not in (None, *BUDGETS):
            raise ConfigError(f"A reading has budget = {self.budget!r}.", f"It must be one of {', '.join(BUDGETS)}.")

    def known(self, rows: Mapping[str, Any]) -> bool:
        """Whether all its figures are measured, with its seeds; a deviation over seeds needs more than one of them."""
        cells = [_named(text, rows) for text in re.findall(r"\[([^\]]+)\]", self.check)]
        return all(
            "measured" in cell
            and _field(cell, kind) is not None
            and self.seeds in (None, sum(value is not None for value in cell.get("values", ())))
            for cell, kind in cells
        )

    def holds(self, rows: Mapping[str, Any]) -> bool:
        """Whether the rows of a results file make the comparison true; every figure in it must be there."""
        found = [_compared(part, rows) for part in re.split(r"\sand\s", self.check)]  # all of it is read
        return all(found)


def _compared(text: str, rows: Mapping[str, Any]) -> bool:
    sides: list[float] = []
    value, sign, how, at = 0.0, 1.0, "", 0
    due = True
    while at < len(text.rstrip()):
        found = TOKEN.match(text, at)
        if not found:
            raise _wrong(text, text[at:].strip())
        at = found.end()
        figure, number, comparison, plus = found.groups()
        if figure is not None or number is not None:
            if not due:
                raise _wrong(text, found[0].strip())
            value += sign * (_figure(figure, rows, text) if figure is not None else float(number))
            due = False
        elif due or (comparison and how):
            raise _wrong(text, found[0].strip())
        elif comparison:
            sides.append(value)
            value, sign, how, due = 0.0, 1.0, comparison, True
        else:
            sign, due = (1.0 if plus == "+" else -1.0), True
    if due or not how:
        raise _wrong(text, "its end")
    return bool(COMPARE[how](sides[0], value))


def _named(text: str, rows: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The cell that a figure names, and the field of it."""
    label, column, *rest = text.split()
    return rows.get(label, {}).get("cells", {}).get(column, {}), rest[0] if rest else "measured"


def _field(cell: Mapping[str, Any], kind: str) -> Any:
    """A field of a cell; None if it is not there."""
    if seed := re.fullmatch(r"seed(\d+)", kind):
        values = cell.get("values", [])
        return values[int(seed[1])] if int(seed[1]) < len(values) else None
    return cell.get(kind)


def _figure(text: str, rows: Mapping[str, Any], whole: str) -> float:
    cell, kind = _named(text, rows)
    value = _field(cell, kind)
    if not isinstance(value, int | float):
        raise ConfigError(f"The results have no [{text}], which is in {whole!r}.", "Name a label and a column of it.")
    return float(value)


def _wrong(text: str, where: str) -> ConfigError:
    return ConfigError(f"The check {text!r} is not understood at {where!r}.", "Write [LABEL COLUMN] < [LABEL COLUMN].")
