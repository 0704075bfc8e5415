"""What the reproductions' pages say is what results/ holds, and what they conclude from it is true."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perfed import recipes
from perfed.measured import columns
from perfed.report.reproduction import results_of
from perfed.reproduce import Plan

FIELDS = ("measured", "published", "difference", "spread", "rank_measured", "rank_published")
ROOT = Path(__file__).parents[2]


def test_pages_are_made_from_results() -> None:
    done = subprocess.run(
        [sys.executable, "docs/tables.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [n for n in recipes.names() if results_of(ROOT / "results", n) is not None])
def test_every_claim_of_a_page_holds(name: str) -> None:
    recipe, found = recipes.load(name), results_of(ROOT / "results", name)
    assert found is not None
    for reading in recipe.reading:
        if reading.budget in (None, found["budget"]) and replace(reading, seeds=None).known(found["rows"]):
            assert reading.known(found["rows"]), f"{name}: now of other seeds: {reading.claim}"
        meant = reading.budget in (None, found["budget"]) and reading.known(found["rows"])
        assert not meant or reading.holds(found["rows"]), f"{name}: {reading.claim} ({reading.check})"
    for label, row in found["rows"].items():
        entry = recipe.entries[label]
        for key, cell in row["cells"].items():
            assert cell.get("published") == entry.published.get(key), f"{name}, {label}, {key}"
            assert cell.get("published_spread") == entry.deviation.get(key), f"{name}, {label}, {key}"
    if "tuning" in found and recipe.tuned:
        assert recipe.tuned == found["tuning"]["chosen"]


@pytest.mark.parametrize("name", [n for n in recipes.names() if results_of(ROOT / "results", n) is not None])
def test_results_are_of_the_recipe_as_it_is(name: str, tmp_path: Path) -> None:
    """What is in results/ was run as its recipe says now, and every mean, rank and count follows from its values."""
    recipe = recipes.load(name)
    for budget in ("quick", "full"):
        path = ROOT / "results" / f"{name}{'' if budget == 'full' else '.quick'}.json"
        if recipe.dry or not path.exists():
            continue
        again = Plan(recipe=recipe, budget=budget, out=tmp_path).join([path]).facts()
        held = json.loads(path.read_text(encoding="utf-8"))
        held.pop("tuning", None)
        assert json.loads(json.dumps(again)) == held


@pytest.mark.parametrize("name", recipes.names())
def test_claims_are_about_figures_of_their_recipe(name: str) -> None:
    recipe = recipes.load(name)
    for reading in recipe.reading:
        cell = dict.fromkeys(FIELDS, 1.0) | {"values": [1.0] * (reading.seeds or 3)}
        rows = {label: {"cells": {c.key: cell for c in columns(recipe)}} for label in recipe.entries}
        assert reading.known(rows)
        reading.holds(rows)


def test_results_are_strict_json_without_absolute_paths() -> None:
    for path in (ROOT / "results").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        json.loads(text, parse_constant=lambda word, path=path: pytest.fail(f"{path.name} has {word}"))
        assert '"/' not in text
