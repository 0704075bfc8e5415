"""The page of a reproduced table, and its plot: made from results/ and the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfed import recipes, rundir
from perfed.hyperparameters import NONE
from perfed.measured import markdown, results_file
from perfed.recipes import Recipe
from perfed.recipes.budget import shared
from perfed.recipes.column import Column
from perfed.report.tables import duration
from perfed.standing import first_of_all, in_order

HIDDEN = ("data_dir", "out", "workers", "seed")
ROW_WORDS = {"defaults": "by default", "run": "run with"}
"""What a row holds beside the hyper-parameters that the recipe gives, and how the page says it."""


def write_page(recipe: Recipe, found: Mapping[str, Any], pages: Path) -> list[Path]:
    """Write NAME.md and its plot NAME.svg."""
    from perfed.report.dots import draw

    pages.mkdir(parents=True, exist_ok=True)
    page, picture = pages / f"{recipe.name}.md", pages / f"{recipe.name}.svg"
    draw(found, picture)
    rundir.write(page, page_text(recipe, found).encode())
    return [page, picture]


def page_text(recipe: Recipe, found: Mapping[str, Any]) -> str:
    """The page: figures, plot, protocol, reading, origin."""
    parts = [
        f"# {recipe.title}",
        f"{recipe.paper}, {recipe.table}. {_state(recipe, found)}",
        markdown(found).strip(),
        f"![{'published and ' if found['within_2_points'][1] else ''}measured figures as a plot]({recipe.name}.svg)",
        _summary(recipe, found),
    ]
    if said := _readings(recipe, found):
        parts += ["## Reading", said]
    parts += ["## Protocol", _protocol(recipe, found)]
    if "tuning" in found:
        parts += ["## Learning rates", _tuning(found["tuning"])]
    parts += ["## Origin", _origin(recipe, found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _state(recipe: Recipe, found: Mapping[str, Any]) -> str:
    if recipe.dry:
        return "Counted, not run. In units of 10^9."
    said = f"Budget {found['budget']}{budget_note(recipe, found)}, {seeds_note(found)}; accuracy in per cent."
    cells = [cell for row in found["rows"].values() for cell in row["cells"].values()]
    if any(cell.get("spread") is not None for cell in cells):
        said += (
            " ± beside a measured figure is the sample deviation over seeds; every seed divides the data anew, the same"
            " for all methods."
        )
    if any("published_spread" in cell for cell in cells):
        said += " ± beside a published figure is the paper's."
    return said


def budget_note(recipe: Recipe, found: Mapping[str, Any]) -> str:
    """How many of the rounds were run, if not all, and in what precision, if not in full."""
    if found["budget"] == "full":
        return ""
    rounds, precision = int(recipe.words["rounds"]), recipe.quick_run.get("precision")
    return f" ({shared(rounds, recipe.quick)} of {rounds} rounds{f', in {precision}' if precision else ''})"


def seeds_note(found: Mapping[str, Any]) -> str:
    """How many seeds there are; the figures say which has more where some have."""
    least, most = min(_counts(found), default=1), max(_counts(found), default=1)
    text = f"{least} seed{'s' if least > 1 else ''}"
    return text if least == most else f"{least} to {most} seeds"


def _counts(found: Mapping[str, Any]) -> list[int]:
    """The seeds of every run of the table."""
    return [len(hashes) for row in found["rows"].values() for hashes in row.get("state_sha256", {}).values()]


def _summary(recipe: Recipe, found: Mapping[str, Any]) -> str:
    close, compared = found["within_2_points"]
    lines = []
    if compared:
        lines = [f"{close} of {compared} measured figures are within {recipe.within:g} of the published ones."]
    same, pairs = in_order(found)
    if pairs:
        lines.append(f"Pairs of methods in the published order: {same} of {pairs}.")
    first, of = first_of_all(found)
    said, ranked = first_of_all(found, "published")
    if of:
        lines.append(
            f"The paper's own method ranks first in {first} of {of} columns of the paper in which every method was run"
            + (f"; of the {ranked} with published ranks, the paper has it first in {said}." if ranked else ".")
        )
    if len({tuple(seeds) for row in found["rows"].values() for seeds in row.get("seeds", {}).values()}) > 1:
        lines.append("Where methods have different seeds, ranks and pairs are by those that all of the column have.")
    refused = {label: sum(map(sum, row["faults"].values())) for label, row in found["rows"].items() if "faults" in row}
    if refused:
        each = ", ".join(f"{count} of {label}" for label, count in refused.items())
        lines.append(f"Updates that were refused, as their values were not finite or not as declared: {each}.")
    if unread := _unread(found):
        lines.append(f"Published, but not measured by the runs that were made: {', '.join(unread)}.")
    if found["missing"]:
        lines.append(f"Not run yet: {_missing(recipe, found)}. Ranks are among what was run.")
    return " ".join(lines)


def _unread(found: Mapping[str, Any]) -> list[str]:
    """Published figures without a measured one although the method was run."""
    return [
        f"{label} {key}"
        for label, row in found["rows"].items()
        for key, cell in row["cells"].items()
        if "published" in cell and "measured" not in cell and (Column(key).setting or "run") in row.get("seeds", {})
    ]


def _missing(recipe: Recipe, found: Mapping[str, Any]) -> str:
    """What was not run, by setting."""
    groups: dict[str, list[str]] = {}
    for name in found["missing"]:
        setting, _, label = name.rpartition("/")
        groups.setdefault(setting, []).append(label)
    texts = []
    for setting, labels in groups.items():
        all_of_it = sum(cell.setting == setting for cell in recipe.cells) == len(labels)
        what = "all methods" if all_of_it else ", ".join(labels)
        texts.append(f"{what} in the setting {setting}" if setting else what)
    return "; ".join(texts)


def _readings(recipe: Recipe, found: Mapping[str, Any]) -> str:
    """The claims that hold on these figures. A claim that does not is kept out; a test reports it."""
    rows = found["rows"]
    said = [reading for reading in recipe.reading if reading.budget in (None, found["budget"])]
    return "\n".join(f"- {reading.claim}" for reading in said if reading.known(rows) and reading.holds(rows))


def _protocol(recipe: Recipe, found: Mapping[str, Any]) -> str:
    words = {key: value for key, value in found["config"].items() if key not in HIDDEN}
    if words.get("test") == "published":
        words.pop("test_fraction", None)  # nothing is set apart
    lines = ["| word | value |", "|---|---|"]
    lines += [f"| `{key}` | `{_toml(value)}` |" for key, value in words.items()]
    for name, held in found.get("settings", {}).items():
        other = {k: v for k, v in held["config"].items() if found["config"].get(k) != v and k not in HIDDEN}
        parts = [_words(other), *([f"methods: {_words(held['method'])}"] if "method" in held else [])]
        parts += [f"{label}: {_words(values)}" for label, values in held.get("methods", {}).items()]
        if name and any(parts):
            lines.append(f"| setting `{name}` | {'; '.join(part for part in parts if part)} |")
    for label, row in found["rows"].items():
        parts = [_words(row["hyper"])]
        parts += [f"{said} {_words(row[kind])}" for kind, said in ROW_WORDS.items() if row.get(kind)]
        lines.append(f"| method `{label}` | {'; '.join(part for part in parts if part)} |")
    text = "\n".join(lines)
    return "\n\n".join(part for part in (recipe.notes, recipe.get, text) if part)


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key} = {_toml(value)}`" for key, value in values.items())


def _tuning(tuning: Mapping[str, Any]) -> str:
    rates = list(next(iter(tuning["scores"].values())))
    lines = [
        f"Chosen by the accuracy on clients' own validation data ({tuning['val_fraction']:.0%} of the training data)"
        f" in a run of {tuning['rounds']} rounds with seed {tuning['seed']}; the same rates for every method.",
        "",
        "| method | " + " | ".join(rates) + " | chosen |",
        "|---|" + "---:|" * (len(rates) + 1),
    ]
    for label, scores in tuning["scores"].items():
        shown = " | ".join("–" if scores[lr] is None else f"{scores[lr]:.2f}" for lr in rates)
        lines.append(f"| {label} | {shown} | {tuning['chosen'][label]:g} |")
    return "\n".join(lines)


def _origin(recipe: Recipe, found: Mapping[str, Any]) -> str:
    budget = found["budget"]
    counts = _counts(found)
    uneven = len(set(counts)) > 1
    more = f", up to {max(counts)} seeds for some methods or settings" if uneven else ""
    text = (
        f"`{command(found)}`{more}; {results_file(recipe.name, budget, Path('results'))},"
        f" perfed {found['versions']['perfed']}, torch {found['versions']['torch']}. "
    )
    hashes = {
        name: ", ".join(value[:12] for value in held["partition_sha256"].values())
        for name, held in found.get("settings", {}).items()
    }
    if hashes:
        shown = "; ".join(f"{name}: {value}" if name else value for name, value in hashes.items())
        text += f"Partitions (the first digits of their SHA-256): {shown}. "
    spent = sum(compute(found).values())
    return (text + (f"The runs took {duration(spent)} one after another." if spent else "")).rstrip()


def command(found: Mapping[str, Any]) -> str:
    """What makes these results, apart from seeds that only some of the methods have."""
    counts = _counts(found)
    name = found["recipe"] if found["recipe"] in recipes.names() else f"{found['recipe']}.toml"
    text = f"perfed reproduce {name} --budget {found['budget']}"
    return f"{text} --seeds {min(counts)}" if counts else text


def compute(found: Mapping[str, Any]) -> dict[tuple[str, float], float]:
    """Seconds of every run. A run that two tables share has the same last state and the same seconds in both."""
    spent: dict[tuple[str, float], float] = {}
    for name, seconds in found.get("timing", {}).items():
        setting, _, label = name.rpartition("/")
        hashes = found["rows"][label]["state_sha256"][setting or "run"]
        spent |= {(state, took): took for state, took in zip(hashes, seconds, strict=True)}
    return spent


def _toml(value: Any) -> str:
    if value is None:
        return NONE
    return value if value and isinstance(value, str) else json.dumps(value)


def results_of(results: Path, name: str) -> dict[str, Any] | None:
    """What is measured of a recipe: at full budget, else at quick, else nothing."""
    for budget in ("full", "quick"):
        path = results_file(name, budget, results)
        if path.exists():
            return dict(rundir.read_json(path))
    return None
