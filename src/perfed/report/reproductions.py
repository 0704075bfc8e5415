"""All reproduced tables in one: the index of the recipes, and what the README shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfed import recipes as kept
from perfed.recipes import Recipe
from perfed.report.reproduction import compute, results_of, seeds_note
from perfed.report.tables import duration
from perfed.standing import first_of_all, in_order

LEGEND = (
    "As published: figures within 2 points, or as close as the page says. Pairs in order: of two methods in a column,"
    " the one that is ahead in the paper is ahead here; FedAvg against a personalised method is an easy pair, and rows"
    " that share their runs make none. Own method first: of the columns in which every method was run, those with the"
    " paper's method in front or level; in the paper: the same of its published figures, where it ranks its method by"
    " them. `quick` is a share of the rounds, named on the page. Where a protocol had to depart from the paper's, as in"
    " pFedC's tables, the page says how."
)


def index(results: Path) -> str:
    """docs/reproductions/README.md: every recipe and how far it is."""
    lines = [
        "# Reproductions",
        "",
        "Every table of results in the five papers is a recipe, and so are most figures with numbers: `perfed reproduce"
        " NAME --budget full --data-dir DIR`. Its page has published and measured figures, the protocol, and what"
        " follows from them.",
        "",
        "| recipe | table | state | as published | pairs in order | own method first | in the paper | time |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    spent: dict[tuple[str, float], float] = {}
    for name in kept.names():
        recipe, found = kept.load(name), results_of(results, name)
        title = f"{recipe.paper}, {recipe.table}"
        if found is None:
            lines.append(f"| `{name}` | {title} | not yet | – | – | – | – | – |")
            continue
        seconds = compute(found)
        spent |= seconds
        cells = [*standings(recipe, found), duration(sum(seconds.values())) if seconds else "–"]
        lines.append(f"| [`{name}`]({name}.md) | {title} | {' | '.join(cells)} |")
    lines += ["", f"{totals(results)} Single runs sum to {sum(spent.values()) / 3600:.1f} hours. {LEGEND}", ""]
    return "\n".join(lines)


def overview(results: Path, pages: str) -> str:
    """The papers' tables that are measured, in full or in part."""
    lines = [
        "| table | state | as published | pairs in order | own method first | in the paper |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in kept.names():
        recipe, found = kept.load(name), results_of(results, name)
        if found and _published(recipe):
            title = f"[{recipe.paper}, {recipe.table}]({pages}/{name}.md)"
            lines.append(f"| {title} | {' | '.join(standings(recipe, found))} |")
    return "\n".join([*lines, "", f"{totals(results)} {LEGEND}"])


def standings(recipe: Recipe, found: Mapping[str, Any]) -> list[str]:
    """How far a table is, and how it stands to its paper."""
    part = f", {len(found['missing'])} of {len(recipe.cells)} not run" if found["missing"] else ""
    state = "counted" if recipe.dry else f"{found['budget']}, {seeds_note(found)}{part}"
    counts = (found["within_2_points"], in_order(found), first_of_all(found), first_of_all(found, "published"))
    return [state, *(f"{number} of {of}" if of else "–" for number, of in counts)]


def totals(results: Path) -> str:
    """How many of the papers' tables are measured."""
    found = {name: results_of(results, name) for name in kept.names()}
    of_papers = {name: held for name, held in found.items() if _published(kept.load(name))}
    begun = {name: held for name, held in of_papers.items() if held is not None}
    counted = sum(bool(kept.load(name).dry) for name in begun)
    whole = sum(held["budget"] == "full" and not held["missing"] for held in begun.values()) - counted
    return (
        f"Of {len(of_papers)} recipes with published figures, each a table, a figure or a part of one, {whole} are"
        f" measured in full, {len(begun) - whole - counted} in part or for a share of the rounds, {counted} counted."
    )


def _published(recipe: Recipe) -> bool:
    return any(entry.published for entry in recipe.entries.values())
