"""Recipes: a table of a paper each, as a file, with the published figures beside what to run."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from perfed.errors import ConfigError, unknown

Budget = Literal["smoke", "quick", "full"]
SMOKE: dict[str, Any] = {
    "data": "digits",
    "rounds": 2,
    "eval_every": 0,
    "last_k": 1,
    "shift": None,
    "external": None,
}
SMOKE_CLIENTS = 6


@dataclass(frozen=True)
class Column:
    """One published column: a metric of the result, read at the end or after a round, as in `local.mean@100`."""

    key: str

    @property
    def metric(self) -> str:
        """The metric's name in a result."""
        return self.key.partition("@")[0]

    @property
    def round(self) -> int | None:
        """The round it is read at; None is the end."""
        after = self.key.partition("@")[2]
        return int(after) if after else None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method of the table: its hyper-parameters and its published figures in per cent."""

    method: str
    hyper: dict[str, Any]
    published: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A table: what is run for every method, and what the paper says came out."""

    name: str
    title: str
    paper: str
    table: str
    own: tuple[str, ...]
    """the paper's own methods, whose rank is in question"""
    words: dict[str, Any]
    entries: dict[str, Entry]
    quick: float = 0.2
    notes: str = ""
    common: dict[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> list[Column]:
        """Every published column, in the order of the file."""
        keys = dict.fromkeys(key for entry in self.entries.values() for key in entry.published)
        return [Column(key) for key in keys]

    def run_words(self, budget: Budget) -> dict[str, Any]:
        """The words of the comparison for a budget."""
        if budget == "full":
            return dict(self.words)
        if budget == "quick":
            return self.words | {"rounds": max(1, round(self.words["rounds"] * self.quick))}
        return self.words | SMOKE | {"clients": min(SMOKE_CLIENTS, self.words.get("clients", SMOKE_CLIENTS))}


def names() -> list[str]:
    """The recipes of the package."""
    return sorted(path.name.removesuffix(".toml") for path in files(__name__).iterdir() if path.name.endswith(".toml"))


def load(name: str) -> Recipe:
    """A recipe by name, or from a file of one's own."""
    path = Path(name)
    if name.endswith(".toml") and path.exists():
        return parse(path.stem, path.read_text(encoding="utf-8"))
    if name not in names():
        raise unknown("recipe", name, names())
    return parse(name, files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def parse(name: str, text: str) -> Recipe:
    """A recipe from the text of its file."""
    try:
        table = tomllib.loads(text)
        common = table.get("method", {})
        entries = {
            label: Entry(
                method=values.get("method", label),
                hyper=common | {k: v for k, v in values.items() if k not in ("method", "published")},
                published=dict(values.get("published", {})),
            )
            for label, values in table["methods"].items()
        }
        return Recipe(
            name=name,
            title=table["title"],
            paper=table["paper"],
            table=table["table"],
            own=tuple(table.get("own", ())),
            words=dict(table["run"]),
            entries=entries,
            quick=float(table.get("quick", 0.2)),
            notes=table.get("notes", "").strip(),
            common=common,
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"The recipe {name} cannot be read: {error!r}.", "Compare it with one of perfed's own."
        ) from None
