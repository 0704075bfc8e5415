"""A small recipe and its runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfed import recipes
from perfed.reproduce import Plan, reproduce
from tests.recipe import RECIPE


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(recipe=recipes.parse("mine", RECIPE), budget="full", out=tmp_path / "runs")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a whole results file holds."""
    plan = Plan(recipe=recipes.parse("mine", RECIPE), budget="full", out=tmp_path_factory.mktemp("runs"))
    return reproduce(replace(plan, only=("local",)))
