"""Every recipe of the package: its words are accepted at every budget, and at smoke it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from perfed import recipes
from perfed.errors import ConfigError, UnknownNameError
from perfed.measured import markdown
from perfed.recipes import Cell
from perfed.recipes.budget import BUDGETS
from perfed.recipes.column import Column
from perfed.recipes.reading import Reading
from perfed.report import dots
from perfed.report.dots import draw
from perfed.report.reproduction import page_text
from perfed.reproduce import Plan, reproduce
from tests import layouts

NAMES = recipes.names()
MADE: dict[str, tuple[Callable[[Path], Any], ...]] = {
    "cd2-table3": (layouts.flickr_aes,),
    "cd2-table4": (layouts.histology,),
    "fedbsd-figure3-digits": (layouts.house_numbers, layouts.mnist_m, layouts.mnist, layouts.usps),
    "fedbsd-figure3-domainnet": (layouts.domain_net,),
    "fedbsd-table1-femnist": (layouts.femnist,),
    "pfedc-table1-emnist": (layouts.emnist,),
    "pse-table1-femnist": (layouts.femnist, layouts.photographs),
    "scheduling-unfreeze-tinyimagenet": (layouts.tiny_imagenet,),
}


def test_the_issue_s_tables_are_there() -> None:
    wanted = [f"cd2-table{n}" for n in range(1, 6)] + [
        "cd2-figure5",
        "pse-ablation",
        "pse-fairness",
        "scheduling-table4",
    ]
    wanted += [f"pse-table2-{d}" for d in ("cifar10", "cifar100", "fashionmnist")]
    wanted += [f"pse-table1-{d}" for d in ("femnist", "fashionmnist-gray-colour", "fashionmnist-colour-edge")]
    wanted += [f"fedbsd-figure4-{x}{d}" for x in "set" for d in ("", "-cifar100")]
    wanted += [f"pfedc-table{n}-{d}" for n in (1, 2) for d in ("mnist", "emnist", "cifar10", "cifar100")]
    wanted += [f"pfedc-table{n}" for n in range(3, 7)]
    wanted += [f"scheduling-table2-{d}" for d in ("mnist", "cifar10", "cifar100", "tinyimagenet")]
    wanted += [f"scheduling-unfreeze-{d}" for d in ("cifar100", "tinyimagenet")]
    assert set(wanted) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_run_of_a_recipe_has_an_accepted_configuration(name: str) -> None:
    recipe = recipes.load(name)
    if recipe.dry:
        return
    for budget in BUDGETS:
        plan = Plan(recipe=recipe, budget=budget, out=Path("nowhere"))
        seen = [plan.config(cell, 0) for cell in plan.cells]
        assert {cell.label for cell in plan.cells} == set(recipe.entries)
        assert {cell.setting for cell in plan.cells} == set(recipe.settings)
        own = [recipe.entries[cell.label].run for cell in plan.cells]
        alike = {
            str({k: v for k, v in c.identity().items() if k != "method"})
            for c, differs in zip(seen, own, strict=True)
            if not differs
        }
        assert len(alike) <= len(recipe.settings)  # the same partition and rounds for every method of a setting
    for entry in recipe.entries.values():
        assert all(0 <= value <= 100 or Column(key).whole for key, value in entry.published.items())


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name: str, tmp_path: Path) -> None:
    recipe = recipes.load(name)
    found = reproduce(Plan(recipe=recipe, budget="smoke", out=tmp_path))
    assert set(found["rows"]) == set(recipe.entries)
    shown = {key for row in found["rows"].values() for key, cell in row["cells"].items() if "measured" in cell}
    late = {c.key for c in recipe.columns if c.round is not None}
    other = {c.key for c in recipe.columns if c.metric.startswith("client.") or c.metric == "external"}
    tasks = {c.key for c in recipe.columns if ".task." in c.metric}  # pFedC's own, which smoke runs in one setting
    assert not tasks or shown & tasks
    other |= tasks
    assert shown >= {c.key for c in recipe.columns} - late - other
    assert markdown(found).count("|") > 10
    assert recipe.title in page_text(recipe, found)
    draw(found, tmp_path / "a.svg")
    draw(found, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_line_joins_figures_of_one_metric_only() -> None:
    keys = ["m@1", "m@2", "m@3", "n"]
    figure = Figure()
    dots._lines(figure, {"a": {"cells": {key: {"measured": 50.0} for key in keys}}}, keys)
    joined = [len(line.get_xdata()) for line in figure.axes[0].lines]
    assert sorted(joined) == [0, 0, 1, 3]  # the name in the legend, no rings, n, m
    assert figure.axes[0].get_title() == "dots: measured", "nothing is said of rings that are not there"


def test_few_settings_have_a_panel_for_every_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(dots, "_panels", lambda *_: drawn.append("panels"))
    monkeypatch.setattr(dots, "_lines", lambda *_: drawn.append("lines"))
    for settings, metrics in (("s", "mn"), ("st", "mn"), ("stu", "mn"), ("stuv", "mn"), ("stuv", "m")):
        cells = {f"{setting}/{metric}": {"measured": 50.0} for setting in settings for metric in metrics}
        draw({"rows": {"a": {"cells": cells}}}, tmp_path / "a.svg")
    assert drawn == ["panels", "panels", "panels", "lines", "lines"]


def test_panels_stand_in_lines_of_three_a_metric_in_each() -> None:
    keys = [f"{setting}/{metric}" for setting in "stu" for metric in "mn"]
    figure = Figure()
    dots._panels(figure, {"a": {"cells": {key: {"measured": 50.0} for key in keys}}}, keys)
    places = [(axes.get_title(), axes.get_subplotspec().rowspan.start) for axes in figure.axes]
    assert places == [("s/m", 0), ("t/m", 0), ("u/m", 0), ("s/n", 1), ("t/n", 1), ("u/n", 1)]
    dots._panels(figure := Figure(), {"a": {"cells": {key: {"measured": 50.0} for key in keys[:5]}}}, keys[:5])
    assert [axes.get_visible() for axes in figure.axes] == [True] * 5 + [False]
    dots._panels(figure := Figure(), {"a": {"cells": {key: {"measured": 50.0} for key in keys[:4]}}}, keys[:4])
    assert {axes.get_subplotspec().rowspan.start for axes in figure.axes} == {0}, "four fit in one line"


@pytest.mark.parametrize("name", MADE)
def test_smoke_on_made_data_in_the_publisher_s_layout(name: str, tmp_path: Path) -> None:
    for make in MADE[name]:
        make(tmp_path / "data")
    recipe = recipes.load(name)
    label = next(iter(recipe.entries))  # the data is the point here; test_smoke has all methods
    plan = Plan(recipe=recipe, budget="smoke", out=tmp_path / "runs", data_dir=str(tmp_path / "data"), only=(label,))
    found = reproduce(plan)
    assert found["config"]["data"] == recipe.words["data"]
    assert any("measured" in cell for cell in found["rows"][label]["cells"].values())


RECIPE = """
title = "t"
paper = "p"
table = "Table 1"
own = ["b"]
[run]
rounds = 10
clients = 50
split = "classes:7"
[method]
lr = 0.1
[settings.x]
run = { split = "iid" }
methods.b = { epochs = 3 }
[methods.a]
method = "fedavg"
published = { "local.mean" = 5, x = 6 }
[methods.b]
method = "fedrep"
in = ["x"]
published = { "x/new@4" = 7 }
"""


def test_settings_columns_and_budgets() -> None:
    recipe = recipes.parse("mine", RECIPE)
    assert [c.key for c in recipe.columns] == ["local.mean", "x/local.mean", "x/new@4"]
    assert [(c.setting, c.metric, c.round) for c in recipe.columns][-1] == ("x", "new", 4)
    assert [(c.setting, c.label) for c in recipe.cells] == [("", "a"), ("x", "a"), ("x", "b")]
    b = recipe.cells[-1]
    assert recipe.hyper("full", b) == {"name": "fedrep", "lr": 0.1, "epochs": 3}
    assert recipe.run_words("quick", b)["rounds"] == 2
    assert recipe.run_words("full", b)["split"] == "iid"
    small = recipe.run_words("smoke", recipe.cells[0])
    assert (small["clients"], small["split"]) == (4, "classes:5:some")
    assert recipe.run_words("smoke", recipe.cells[0], own_data=True)["split"] == "classes:7:some"
    assert [c.label for c in recipe.chosen("full", ["b"], [])] == ["b"]
    with pytest.raises(UnknownNameError, match="no method in the recipe mine named 'c'"):
        recipe.chosen("full", ["c"], [])
    with pytest.raises(UnknownNameError, match="no setting in the recipe mine named 'y'"):
        recipe.chosen("full", [], ["y"])


def test_the_quick_budget_has_words_of_its_own_and_a_method_s_own_go_before_them() -> None:
    own = RECIPE.replace("[methods.b]", "[methods.b]\nrun = { adapt = 'never' }")
    recipe = recipes.parse("mine", own + "[quick_run]\nadapt = 'always'\nprecision = 'bfloat16'\n")
    a, b = Cell("x", "a"), Cell("x", "b")
    assert [recipe.run_words("quick", cell)["adapt"] for cell in (a, b)] == ["always", "never"]
    assert recipe.run_words("quick", b)["precision"] == "bfloat16"
    assert not {"adapt", "precision"} & recipe.run_words("full", a).keys()


def test_a_share_of_the_rounds_has_its_readings_and_schedules_at_the_same_share() -> None:
    recipe = recipes.load("scheduling-table2-mnist")
    anti = Cell("", "anti")
    words, hyper = recipe.run_words("quick", anti), recipe.hyper("quick", anti)
    assert (words["rounds"], words["eval_every"], hyper["unfreeze"]) == (30, 10, [0, 10, 20])
    full, given = recipe.run_words("full", anti), recipe.hyper("full", anti)
    assert (full["rounds"], full["eval_every"], given["unfreeze"]) == (300, 100, [0, 100, 200])
    assert recipes.load("pse-table2-fashionmnist").run_words("quick", Cell("3", "pse"))["eval_every"] == 10


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("title", "titel"),
        ('own = ["b"]', 'own = ["z"]'),
        ('in = ["x"]', 'in = ["y"]'),
        ('"x/new@4"', '"y/new@4"'),
        ("methods.b =", "methods.z ="),
        ("= 5", '= "five"'),
        ("settings.x", "settings.base"),
    ],
)
def test_a_wrong_recipe_is_refused(old: str, new: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError)):
        recipes.parse("mine", RECIPE.replace(old, new, 1))


ROWS = {"a": {"cells": {"m": {"measured": 3.0, "published": 9.0}}}, "b": {"cells": {"m": {"measured": 5.0}}}}


@pytest.mark.parametrize(
    ("check", "want"),
    [
        ("[a m] < [b m]", True),
        ("[a m] < [b m] - 2", False),
        ("[a m] <= [b m] - 2", True),
        ("[a m published] - [a m] > 5.5 and [b m] == 5", True),
        ("[a m] > 1 and [b m] < 1", False),
        ("[a m] > 1 and\n[b m] < 1", False),
        ("[a m] > 1 and\n[b m] > 1\n", True),
    ],
)
def test_a_reading_is_checked(check: str, want: bool) -> None:
    assert Reading(claim="", check=check).holds(ROWS) is want


def test_methods_of_a_recipe_have_the_same_data() -> None:
    head = 'title = ""\npaper = ""\ntable = ""\n[run]\nrounds = 1\n'
    with pytest.raises(ConfigError, match=r"local .* has split = 'iid' of its own.*make it a setting"):
        recipes.parse("mine", head + '[methods.local]\nrun = { split = "iid" }')
    with pytest.raises(ConfigError, match="named 'a/b'"):
        recipes.parse("mine", head + '[methods."a/b"]\nmethod = "local"')
    for name in ("two classes", "s[2]"):
        with pytest.raises(ConfigError, match=f"named '{re.escape(name)}', which a reading cannot name"):
            recipes.parse("mine", head + f'[methods.local]\n[settings."{name}"]\n')


def test_a_sentence_about_one_seed_is_about_one_seed() -> None:
    reading = Reading(claim="", check="[a x] > 1", seeds=1)
    for values, known in (([2.0], True), ([2.0, None], True), ([2.0, 3.0], False)):
        assert reading.known({"a": {"cells": {"x": {"measured": 2.0, "values": values}}}}) is known


@pytest.mark.parametrize("odd", [{"seeds": 0}, {"seeds": "1"}, {"budget": "quik"}])
def test_a_sentence_about_nothing_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"A reading has {next(iter(odd))} = "):
        Reading(claim="", check="[a x] > 1", **odd)


@pytest.mark.parametrize("name", recipes.names())
def test_sentences_say_of_how_many_seeds_they_are(name: str) -> None:
    for reading in recipes.load(name).reading:
        assert ("one seed" in reading.claim.lower()) <= (reading.seeds == 1)
        assert reading.budget in (None, "quick", "full")


def test_a_deviation_is_known_with_several_seeds_only() -> None:
    reading = Reading(claim="", check="[a x spread] > 1")
    for spread, known in ((None, False), (2.0, True)):
        assert reading.known({"a": {"cells": {"x": {"measured": 1.0, "spread": spread}}}}) is known


@pytest.mark.parametrize(
    "check",
    [
        "[a m]",
        "[a m] <",
        "[a m] < 2 < 3",
        "[a m] [b m] < 2",
        "__import__('os') < 2",
        "[z m] < 2",
        "[b m published] < 1",
        "",
    ],
)
def test_a_check_that_is_no_comparison_is_refused(check: str) -> None:
    with pytest.raises(ConfigError):
        Reading(claim="", check=check).holds(ROWS)
