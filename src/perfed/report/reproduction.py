"""The page of a reproduced table, its plot, and the index of all of them: made from results/ and the recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfed import recipes as kept
from perfed import rundir
from perfed.hyperparameters import NONE
from perfed.measured import first_of_all, markdown
from perfed.recipes import Recipe
from perfed.report.tables import duration

HIDDEN = ("data_dir", "out", "workers", "seed")


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
        f"![published and measured]({recipe.name}.svg)",
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
    seeds = len(found["seeds"])
    many = f"{seeds} seed{'s' if seeds > 1 else ''}"
    quick = "" if found["budget"] == "full" else f" at {recipe.quick:.0%} of the rounds"
    return f"Budget {found['budget']}{quick}, {many}; accuracy in per cent, ± is the sample deviation over seeds."


def _summary(recipe: Recipe, found: Mapping[str, Any]) -> str:
    close, compared = found["within_2_points"]
    lines = []
    if compared:
        lines = [f"{close} of {compared} measured figures are within {recipe.within:g} of the published ones."]
    first, of = first_of_all(found)
    if compared and of:
        lines.append(f"The paper's own method ranks first in {first} of {of} measured columns.")
    if found["missing"]:
        lines.append(f"Not run yet: {', '.join(found['missing'])}.")
    return " ".join(lines)


def _readings(recipe: Recipe, found: Mapping[str, Any]) -> str:
    """The claims that hold on these figures. A claim that does not is kept out; a test reports it."""
    rows = found["rows"]
    return "\n".join(f"- {reading.claim}" for reading in recipe.reading if reading.known(rows) and reading.holds(rows))


def _protocol(recipe: Recipe, found: Mapping[str, Any]) -> str:
    words = {key: value for key, value in found["config"].items() if key not in HIDDEN}
    lines = ["| word | value |", "|---|---|"]
    lines += [f"| `{key}` | `{_toml(value)}` |" for key, value in words.items()]
    for name, held in found.get("settings", {}).items():
        other = {k: v for k, v in held["config"].items() if words.get(k) != v and k not in HIDDEN}
        if name and other:
            lines.append(f"| setting `{name}` | {', '.join(f'`{k} = {_toml(v)}`' for k, v in other.items())} |")
    for label, row in found["rows"].items():
        given, own = (
            ", ".join(f"`{k} = {_toml(v)}`" for k, v in row.get(kind, {}).items()) for kind in ("hyper", "defaults")
        )
        lines.append(f"| method `{label}` | {given}{f'; by default {own}' if own else ''} |")
    text = "\n".join(lines)
    return "\n\n".join(part for part in (recipe.notes, recipe.get, text) if part)


def _tuning(tuning: Mapping[str, Any]) -> str:
    rates = list(next(iter(tuning["scores"].values())))
    lines = [
        f"Chosen by the accuracy on validation data ({tuning['val_fraction']:.0%} of the training data) after"
        f" {tuning['rounds']} rounds with seed {tuning['seed']}; the same rates for every method.",
        "",
        "| method | " + " | ".join(rates) + " | chosen |",
        "|---|" + "---:|" * (len(rates) + 1),
    ]
    for label, scores in tuning["scores"].items():
        shown = " | ".join("–" if scores[lr] is None else f"{scores[lr]:.2f}" for lr in rates)
        lines.append(f"| {label} | {shown} | {tuning['chosen'][label]:g} |")
    return "\n".join(lines)


def _origin(recipe: Recipe, found: Mapping[str, Any]) -> str:
    budget, seeds = found["budget"], max(1, len(found["seeds"]))
    suffix = "" if budget == "full" else f".{budget}"
    hashes = [h[:12] for h in found.get("partition_sha256", [])]
    text = (
        f"`perfed reproduce {recipe.name} --budget {budget} --seeds {seeds}`; results/{recipe.name}{suffix}.json,"
        f" perfed {found['versions']['perfed']}, torch {found['versions']['torch']}"
    )
    text += f", partition {', '.join(hashes)}" if hashes else ""
    spent = compute(found)
    return text + (f". Computed in {duration(spent)}." if spent else ".")


def compute(found: Mapping[str, Any]) -> float:
    """Seconds that the runs took, one after the other."""
    return float(sum(sum(values) for values in found.get("timing", {}).values()))


def _toml(value: Any) -> str:
    return str(NONE if value is None else value) if isinstance(value, str | None) else json.dumps(value)


def results_of(results: Path, name: str) -> dict[str, Any] | None:
    """What is measured of a recipe: at full budget, else at quick, else nothing."""
    for suffix in ("", ".quick"):
        path = results / f"{name}{suffix}.json"
        if path.exists():
            return dict(json.loads(path.read_text(encoding="utf-8")))
    return None


def index(results: Path) -> str:
    """docs/reproductions/README.md: every recipe and how far it is."""
    lines = [
        "# Reproductions",
        "",
        "Every table and figure with numbers of the five papers is a recipe: `perfed reproduce NAME --budget full"
        " --data-dir DIR`. Its page has published and measured figures, the protocol, and what follows from them.",
        "",
        "| recipe | table | state | as published | own method first | compute |",
        "|---|---|---|---:|---:|---:|",
    ]
    total, measured_count = 0.0, 0
    names = kept.names()
    for name in names:
        recipe, found = kept.load(name), results_of(results, name)
        if found is None:
            lines.append(f"| `{name}` | {recipe.paper}, {recipe.table} | not yet | – | – | – |")
            continue
        close, compared = found["within_2_points"]
        first, of = first_of_all(found)
        spent = compute(found)
        total, measured_count = total + spent, measured_count + 1
        part = f", {len(found['missing'])} of {len(recipe.cells)} runs missing" if found["missing"] else ""
        seeds = f", {len(found['seeds'])} seed{'s' if len(found['seeds']) > 1 else ''}" if found["seeds"] else ""
        state = "counted" if recipe.dry else f"{found['budget']}{seeds}{part}"
        lines.append(
            f"| [`{name}`]({name}.md) | {recipe.paper}, {recipe.table} | {state} | {close} of {compared} |"
            f" {f'{first} of {of}' if of else '–'} | {duration(spent) if spent else '–'} |"
        )
    lines += [
        "",
        f"{measured_count} of {len(names)} recipes are measured, in {total / 3600:.1f} hours of computing. As"
        " published: within 2 points (Table 4 of scheduling: within 0.01). Own method first: columns in which the"
        " paper's method is the best that was measured. `quick` is a share of the rounds, named on the page.",
        "",
    ]
    return "\n".join(lines)
