"""Recipes: a table or figure of a paper each, as a file, with the published figures beside what to run.

    [run]            the words of every run, as in a configuration
    [method]         hyper-parameters of all methods
    [methods.LABEL]  a method: `method` (default: the label), hyper-parameters, `published`, and if it differs `run`
    [settings.NAME]  a further column group: what is different in `run`, in `method`, or in `methods.LABEL`
    [tune]           learning rates to choose from on validation data; [tuned] has what was chosen
    [quick_run]      words of every run in the quick budget, beside its share of the rounds
    [smoke]          what is different in `run` (a smaller network), or in `methods.LABEL`, in the smoke budget

A published key is `SETTING/METRIC@ROUND`; without a setting it belongs to [run] as it stands, without a metric to the
recipe's `metric`, without a round to the end. Its value is a number, or [number, deviation] where the paper has ±.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from perfed import config as configuration
from perfed.errors import ConfigError, unknown
from perfed.recipes.budget import SMOKE_METHOD, Budget, quick_method, quick_words, smoke_words
from perfed.recipes.column import Column
from perfed.recipes.reading import Reading

__all__ = ["Budget", "Cell", "Column", "Entry", "Recipe", "Setting", "Tune", "load", "names", "parse"]

METRIC = "local.mean"
KNOWN = {
    "title", "paper", "table", "own", "quick", "quick_run", "notes", "get", "run", "method", "methods", "settings",
    "smoke", "dry", "metric", "columns", "within", "tune", "tuned", "reading",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method of the table: its hyper-parameters and its published figures, mostly in per cent."""

    method: str
    hyper: dict[str, Any]
    published: dict[str, float]
    deviation: dict[str, float] = field(default_factory=dict)
    """what the paper has after ±"""
    run: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] | None = None
    """the settings it is run in; None: all"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A group of columns: what is different from [run], for all methods and for single ones."""

    run: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tune:
    """The grid of learning rates, the same for every method, and how one is chosen: on validation data, with seed 0."""

    lr: tuple[float, ...]
    rounds: float = 0.2
    """the share of the rounds that each rate is tried for"""
    val_fraction: float = 0.1
    """the share of the training data that judges; it is trained on again afterwards"""


@dataclass(frozen=True)
class Cell:
    """One run of the grid, apart from its seed."""

    setting: str
    label: str

    @property
    def name(self) -> str:
        """How results name it: LABEL or SETTING/LABEL."""
        return f"{self.setting}/{self.label}".strip("/")


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
    settings: dict[str, Setting]
    """by name; the one called '' is [run] as it stands"""
    metric: str = METRIC
    """what a setting shows if nothing is published for it"""
    more: tuple[str, ...] = ()
    """columns that are shown although nothing is published"""
    quick: float = 0.2
    """the share of the rounds in the quick budget"""
    quick_run: dict[str, Any] = field(default_factory=dict)
    """words of the quick budget"""
    notes: str = ""
    get: str = ""
    """where the data is had, if perfed cannot fetch it"""
    within: float = 2.0
    """points within which a figure counts as reproduced"""
    smoke: Setting = field(default_factory=Setting)
    dry: dict[str, int] = field(default_factory=dict)
    """clients and samples of a table that is counted instead of run"""
    tune: Tune | None = None
    tuned: dict[str, float] = field(default_factory=dict)
    """the rates that tuning chose, by label"""
    reading: tuple[Reading, ...] = ()

    @property
    def columns(self) -> list[Column]:
        """Every column, in the order of the settings and of the file."""
        keys = dict.fromkeys(key for entry in self.entries.values() for key in entry.published) | dict.fromkeys(
            self.more
        )
        held, order = {Column(key).setting for key in keys}, list(self.settings)
        keys |= {f"{name}/{self.metric}".lstrip("/"): None for name in order if name not in held}
        return sorted((Column(key) for key in keys), key=lambda column: order.index(column.setting))

    @property
    def cells(self) -> list[Cell]:
        """Every method in every setting that it belongs to."""
        return [
            Cell(setting, label)
            for setting in self.settings
            for label, entry in self.entries.items()
            if entry.settings is None or setting in entry.settings
        ]

    def chosen(self, budget: Budget, only: list[str], within: list[str]) -> list[Cell]:
        """The cells to run. The smoke budget runs every method and every setting, but not all combinations."""
        for kind, wanted, known in (("method", only, self.entries), ("setting", within, self.settings)):
            if missing := [name for name in wanted if name not in known]:
                raise unknown(f"{kind} in the recipe {self.name} named", missing[0], [name or "base" for name in known])
        cells = [
            cell for cell in self.cells if (not only or cell.label in only) and (not within or cell.setting in within)
        ]
        if not cells:
            there = [cell.setting or "base" for cell in self.cells if cell.label in only]
            raise ConfigError(
                f"{', '.join(only)} is not run in {', '.join(name or 'base' for name in within)}.",
                f"It is in {', '.join(dict.fromkeys(there))}.",
            )
        return _sample(cells) if budget == "smoke" else cells

    def run_words(self, budget: Budget, cell: Cell, own_data: bool = False) -> dict[str, Any]:
        """The words of a run without its method. `own_data`: smoke reads the recipe's data, not digits."""
        quick = self.quick_run if budget == "quick" else {}
        words = self.words | self.settings[cell.setting].run | quick | self.entries[cell.label].run
        if budget == "quick":
            between = any(column.round is not None for column in self.columns)
            return quick_words(words, self.quick, read_between=between)
        return smoke_words(words, own_data) | self.smoke.run if budget == "smoke" else words

    def hyper(self, budget: Budget, cell: Cell) -> dict[str, Any]:
        """A method's name and hyper-parameters."""
        entry, setting = self.entries[cell.label], self.settings[cell.setting]
        values = entry.hyper | setting.method | setting.methods.get(cell.label, {})
        if cell.label in self.tuned:
            values = values | {"lr": self.tuned[cell.label]}
        if budget == "quick":
            values = quick_method(values, self.quick)
        if budget == "smoke":
            values = values | SMOKE_METHOD | self.smoke.method | self.smoke.methods.get(cell.label, {})
        return {"name": entry.method} | values


def _sample(cells: list[Cell]) -> list[Cell]:
    """A few of the cells, with every method and every setting among them."""
    settings, labels = (list(dict.fromkeys(getattr(cell, key) for cell in cells)) for key in ("setting", "label"))
    turn = {label: settings[number % len(settings)] for number, label in enumerate(labels)}
    picked = [cell for cell in cells if turn[cell.label] == cell.setting]
    for kind, names in (("label", labels), ("setting", settings)):
        for name in names:
            if not any(getattr(cell, kind) == name for cell in picked):
                picked.append(next(cell for cell in cells if getattr(cell, kind) == name))
    return picked


def names() -> list[str]:
    """The recipes of the package."""
    return sorted(path.name.removesuffix(".toml") for path in files(__name__).iterdir() if path.name.endswith(".toml"))


def load(name: str) -> Recipe:
    """A recipe by name, or from a file of one's own."""
    path = Path(name)
    if name.endswith(".toml"):
        if not path.exists():
            raise ConfigError(
                f"There is no file {name}.", "Name a recipe file of yours, or a recipe of `perfed recipes`."
            )
        return _made(path.stem, configuration.read(path))
    if name not in names():
        raise unknown("recipe", name, names(), listed="`perfed recipes` lists them all.")
    return parse(name, files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def of_paper(method: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The recipes of a method's own paper: the table that each is, and the hyper-parameters that it trains with."""
    found = {}
    for recipe in map(load, names()):
        own = [recipe.entries[label] for label in recipe.own]
        for entry in [entry for entry in own if entry.method == method and entry.published][:1]:
            found[recipe.name] = (recipe.table, entry.hyper)
    return found


def parse(name: str, text: str) -> Recipe:
    """A recipe from the text of its file."""
    return _made(name, configuration.parse(text, f"The recipe {name}"))


def _made(name: str, table: dict[str, Any]) -> Recipe:
    try:
        return _recipe(name, table)
    except KeyError as error:
        raise ConfigError(f"The recipe {name} lacks {error}.", "Compare it with one of perfed's own.") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"The recipe {name} cannot be read: {error}.", "Compare it with one of perfed's own."
        ) from None


def _recipe(name: str, table: dict[str, Any]) -> Recipe:
    if strange := sorted(set(table) - KNOWN):
        raise unknown(f"key of the recipe {name}", strange[0], KNOWN)
    common, metric = table.get("method", {}), table.get("metric", METRIC)
    settings = {key: _setting(values) for key, values in table.get("settings", {}).items()}
    entries = {label: _entry(label, values, common, metric, settings) for label, values in table["methods"].items()}
    if not settings or any("/" not in key for entry in entries.values() for key in entry.published):
        settings = {"": Setting()} | settings
    tune = table.get("tune")
    recipe = Recipe(
        name=name,
        title=table["title"],
        paper=table["paper"],
        table=table["table"],
        own=tuple(table.get("own", ())),
        words=dict(table["run"]),
        entries=entries,
        settings=settings,
        metric=metric,
        more=tuple(table.get("columns", ())),
        quick=float(table.get("quick", 0.2)),
        quick_run=dict(table.get("quick_run", {})),
        notes=table.get("notes", "").strip(),
        get=table.get("get", "").strip(),
        within=float(table.get("within", 2.0)),
        smoke=_setting(table.get("smoke", {})),
        dry=dict(table.get("dry", {})),
        tune=Tune(**tune | {"lr": tuple(tune["lr"])}) if tune else None,
        tuned=dict(table.get("tuned", {})),
        reading=tuple(Reading(**entry) for entry in table.get("reading", [])),
    )
    _check(recipe)
    return recipe


def _entry(
    label: str, values: Mapping[str, Any], common: Mapping[str, Any], metric: str, settings: Mapping[str, Setting]
) -> Entry:
    own = {key: value for key, value in values.items() if key not in ("method", "published", "run", "in")}
    whole = {
        key if key not in settings else f"{key}/{metric}": value for key, value in values.get("published", {}).items()
    }
    pairs = {key: value if isinstance(value, list) else [value] for key, value in whole.items()}
    return Entry(
        method=values.get("method", label),
        hyper=dict(common) | own,
        published={key: float(pair[0]) for key, pair in pairs.items()},
        deviation={key: float(pair[1]) for key, pair in pairs.items() if len(pair) > 1},
        run=dict(values.get("run", {})),
        settings=tuple(values["in"]) if "in" in values else None,
    )


def _setting(values: Mapping[str, Any]) -> Setting:
    return Setting(**{key: dict(value) for key, value in values.items()})


def _check(recipe: Recipe) -> None:
    """Refuse names that belong to nothing."""
    named = {column.setting: "settings" for column in recipe.columns}
    named |= {setting: "settings" for entry in recipe.entries.values() for setting in entry.settings or ()}
    if strange := [name for name in named if name not in recipe.settings]:
        raise unknown(f"setting of the recipe {recipe.name}", strange[0], recipe.settings)
    if taken := [name for name in recipe.settings if name in ("base", "run")]:
        raise ConfigError(f"A setting of the recipe {recipe.name} is named {taken[0]!r}.", "Give it another name.")
    if odd := [label for label in recipe.entries if "/" in label]:
        raise ConfigError(f"A method of the recipe {recipe.name} is named {odd[0]!r}.", "Give it a name without '/'.")
    if nameless := [name for name in (*recipe.settings, *recipe.entries) if "]" in name or len(name.split()) > 1]:
        raise ConfigError(
            f"A setting or method of the recipe {recipe.name} is named {nameless[0]!r}, which a reading cannot name.",
            "Give it a name without blanks and ']'.",
        )
    for label, entry in recipe.entries.items():
        if dividing := [
            f"{word} = {value!r}" for word, value in entry.run.items() if word in ("data", *configuration.DIVISION)
        ]:
            raise ConfigError(
                f"The method {label} of the recipe {recipe.name} has {dividing[0]} of its own.",
                "Methods are compared on the same data: make it a setting.",
            )
    labels = [label for setting in (*recipe.settings.values(), recipe.smoke) for label in setting.methods]
    for label in [*recipe.own, *recipe.tuned, *labels]:
        if label not in recipe.entries:
            raise unknown(f"method of the recipe {recipe.name}", label, recipe.entries)
