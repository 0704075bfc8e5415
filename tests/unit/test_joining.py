"""Runs that are taken over from results files, or shared by rows and tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfed import grid, recipes
from perfed.errors import ConfigError, StoreError
from perfed.joining import _read_as, joined_rates
from perfed.ran import Ran
from perfed.recipes import Cell
from perfed.reproduce import Plan, best_cells, rates_in, reproduce, write
from perfed.standing import in_order
from tests.recipe import RECIPE, without_timing


def test_runs_of_several_machines_are_joined(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid done in parts, whose runs stay where they were made, gives the results file of the whole."""
    whole = write(reproduce(plan, range(2)), tmp_path / "whole")
    parts = {"a": ({"only": ("local",), "within": ("iid",)}, 2), "b": ({"only": ("fedper",)}, 1)}
    files = tuple(
        write(reproduce(replace(plan, out=tmp_path / name, **some), range(seeds)), tmp_path / f"results-{name}")
        for name, (some, seeds) in parts.items()
    )
    last = replace(plan, out=tmp_path / "c").join(files[::-1])
    joined = write(reproduce(last, range(2)), tmp_path / "results-c")
    assert without_timing(joined) == without_timing(whole)
    assert not list(last.out.rglob("@iid/local")), "not run again"
    assert (last.place(Cell("iid", "fedper"), 1)).is_dir()
    monkeypatch.setattr(grid, "finish", lambda *_: pytest.fail("nothing is left to run"))
    alone = replace(plan, out=tmp_path / "d").join([joined])
    assert (
        write(reproduce(alone, range(2), top=1, top_seeds=range(2)), tmp_path / "d").read_bytes() == joined.read_bytes()
    )


ALONE = """
[methods.alone]
method = "local"
published = { "local.mean" = 80.0 }
"""


def test_rows_with_the_same_configuration_share_their_runs(plan: Plan, tmp_path: Path) -> None:
    """As FedBN's and FedAvg's on a network without BatchNorm; in any order of the calls."""
    plan = replace(plan, recipe=recipes.parse("mine", RECIPE + ALONE))
    assert plan.place(Cell("", "alone"), 1) == plan.place(Cell("", "local"), 1)
    assert plan.place(Cell("iid", "alone"), 1) != plan.place(Cell("", "local"), 1)
    reproduce(replace(plan, only=("alone",), within=("",)), range(2))
    rows = reproduce(replace(plan, within=("",)), range(2))["rows"]
    assert len(list(tmp_path.rglob("config.toml"))) == 4, "two methods, two seeds"
    assert rows["alone"]["state_sha256"] == rows["local"]["state_sha256"]
    measured = [{key: row["cells"]["local.mean"][key] for key in ("values", "difference")} for row in rows.values()]
    assert measured[0]["values"] == measured[2]["values"]
    assert measured[0]["difference"] + 10 == pytest.approx(measured[2]["difference"])
    assert in_order({"rows": rows})[1] == in_order({"rows": {k: rows[k] for k in ("local", "fedper")}})[1] + 1, (
        "level with local by nature, which says nothing"
    )
    values = rows["alone"]["cells"]["local.mean"] | {"values": [1.0, 2.0]}
    tuned = rows["alone"] | {"cells": {"local.mean": values}}
    assert in_order({"rows": rows | {"alone": tuned}})[1] == in_order({"rows": rows})[1] + 1, "the state is not all"
    best = [cell.label for cell in best_cells(replace(plan, within=("",)), 2)]
    assert sorted(best) == ["alone", "fedper"], "two methods, not two names of one"


def test_a_file_with_one_of_two_rows_that_share_their_runs_serves_both(plan: Plan, tmp_path: Path) -> None:
    plan = replace(plan, recipe=recipes.parse("mine", RECIPE + ALONE))
    alone = reproduce(replace(plan, only=("alone",), within=("",)))
    alone["rows"].pop("local")
    alone["timing"].pop("local")
    held = write(alone, tmp_path / "results")
    elsewhere = replace(plan, out=tmp_path / "elsewhere")
    assert [cell.label for cell in elsewhere.join([held]).finished()] == ["local", "alone"]
    replace(elsewhere, only=("local",)).keep_all(range(1), held)  # it would be made again under the other name


def test_runs_that_two_tables_share_are_made_once(tmp_path: Path) -> None:
    """Figure 5 of CD2-pFed has the runs of its Table 1 at s = 2, and Table 5 the one with all parts."""
    results = Path(__file__).parents[2] / "results"
    figure = Plan(recipe=recipes.load("cd2-figure5"), budget="full", out=tmp_path, data_dir="data")
    ended = json.loads((results / "cd2-table1.json").read_text())["rows"]
    taken = figure.join([results / "cd2-table1.json"]).finished()
    assert list(taken) == [Cell("s=2", label) for label in ("lgfedavg", "fedper", "cd2pfed")]
    for cell, some in taken.items():
        assert [one.seed for one in some] == [0, 1, 2]
        assert [one.state_sha256 for one in some] == ended[cell.label]["state_sha256"]["run"]
        assert [one.values["s=2/local.mean"] for one in some] == ended[cell.label]["cells"]["local.mean"]["values"]
    both = figure.join([results / "cd2-table1.json", results / "cd2-figure5.json"]).finished()
    assert len(both) == 18, "where both have a run, it ended in the same state"
    parts = replace(figure, recipe=recipes.load("cd2-table5")).join([results / "cd2-table1.json"]).finished()
    assert [(cell.label, len(some)) for cell, some in parts.items()] == [("LI-TA-CD", 3)]
    assert set(parts[Cell("", "LI-TA-CD")][0].values) == {"local.mean", "new"}
    more = replace(figure, recipe=replace(figure.recipe, more=("s=2/local.std",)))
    with pytest.raises(StoreError, match="has no run that cd2-figure5 would make too, with a figure for each"):
        more.join([results / "cd2-table1.json"])
    assert rates_in(results / "cd2-table1.json", "cd2-table1")
    assert rates_in(results / "cd2-table1.json", "cd2-figure5") is None, "chosen for another table"


def test_settings_with_the_same_runs_keep_each_their_columns(plan: Plan, tmp_path: Path) -> None:
    text = RECIPE.replace('split = "iid"', 'split = "classes:2"').replace('"iid" = 50.0', '"iid/local.std" = 5.0')
    plan = replace(plan, recipe=recipes.parse("mine", text), only=("local",))
    held = write(whole := reproduce(plan), tmp_path / "results")
    assert len(list(tmp_path.rglob("config.toml"))) == 1
    part = replace(plan, out=tmp_path / "elsewhere", within=("iid",))
    assert part.join([held]).facts()["rows"] == whole["rows"]
    part.keep_all(range(1), held)  # the other setting's figures come of the same run
    assert part.lost(held) == ["local, seed 0", "iid/local, seed 0"]


def test_a_figure_of_another_round_is_not_taken_over(plan: Plan) -> None:
    """At a share of the rounds both read `local.mean@2`, one of them after the first round and one after the second."""
    plan = replace(plan, budget="quick")
    half, whole = (replace(plan, recipe=replace(plan.recipe, quick=share)) for share in (0.5, 1.0))
    ran = Ran(
        seed=0, values={"local.mean": 1.0, "local.mean@2": 2.0}, cost={}, seconds=1.0, state_sha256="", made_with={},
        partition_sha256="",
    )  # fmt: skip
    here = Cell("", "local")
    assert _read_as(whole, here, whole, here, ran) == ran.values
    assert _read_as(half, here, whole, here, ran) is None
    assert _read_as(half, Cell("iid", "local"), whole, here, ran) == {"iid/local.mean": 1.0}


def test_results_that_do_not_belong_together_are_not_joined(plan: Plan, tmp_path: Path) -> None:
    """Another recipe, division or end is refused before anything is computed."""
    found = reproduce(replace(plan, only=("local",)))
    held = write(found, tmp_path / "results")
    state, division = found["rows"]["local"]["state_sha256"]["run"][0], found["partition_sha256"][0]
    wrong = {
        "has methods local hyper lr = 0.2, not 0.1 as": ('"lr": 0.1', '"lr": 0.2'),
        "config rounds = 4, not 3 as": ('"rounds": 3', '"rounds": 4'),
        "has recipe = 'yours', not 'mine'": ('"mine"', '"yours"'),
        "Give --budget quick": ('"full"', '"quick"'),
        "has no column local.mean@2": ('"local.mean@2"', '"local.mean@1"'),
        "has locally, which the recipe has not": ('local"', 'locally"'),
        "ended in another state": (state, "0" * 64),
        "another division": (division, "0" * 64),
        "has other figures of local, seed 0": (
            str(found["rows"]["local"]["cells"]["local.mean"]["values"][0]),
            "77.25",
        ),
        "not a whole results file": ('"seeds": {', '"tries": {'),
        "cannot be read": ("{", "["),
        "is not a results file. Give a results file": ('"rows"', '"lines"'),
    }
    for message, (old, new) in wrong.items():
        other = tmp_path / "other.json"
        other.write_text(held.read_text().replace(old, new))
        with pytest.raises(StoreError, match=message):
            plan.join([other])
    assert not list(plan.out.rglob("fedper"))
    counted = Path(__file__).parents[2] / "results" / "scheduling-table4.json"
    with pytest.raises(StoreError, match="scheduling-table4, which is counted"):
        plan.join([counted])
    with pytest.raises(ConfigError, match="counted as a whole"):
        Plan(recipe=recipes.load("scheduling-table4"), budget="full", out=tmp_path).join([held])


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["rows"]["local"]["seeds"].update(run=["0"]),
        lambda facts: facts["rows"]["local"].update(seeds={}),
        lambda facts: facts["rows"]["local"]["seeds"].update(run=[], iid=[]),
        lambda facts: facts["rows"]["local"]["seeds"].update(run=[0, 1]),
        lambda facts: facts["rows"]["local"]["cells"]["local.mean"].update(values=["good"]),
        lambda facts: facts["rows"]["local"].update(cost={"run": 3}),
        lambda facts: facts.update(versions=None),
        lambda facts: facts.update(timing={}),
        lambda facts: facts.update(rows={}),
        lambda facts: facts.update(rows=[1]),
    ],
)
def test_odd_results_files_are_refused_in_words(plan: Plan, tmp_path: Path, change: Any, whole: dict[str, Any]) -> None:
    facts = json.loads(json.dumps(whole))
    change(facts)
    (tmp_path / "odd.json").write_text(json.dumps(facts))
    with pytest.raises(StoreError, match="Give a results file"):
        plan.join([tmp_path / "odd.json"])


def test_a_results_file_is_not_replaced_by_one_with_less(plan: Plan, tmp_path: Path, whole: dict[str, Any]) -> None:
    held = write(whole, tmp_path)
    fedper = replace(plan, only=("fedper",))
    with pytest.raises(StoreError, match=r"2 runs \(first of all local, seed 0\).*Keep what it tells with --join"):
        fedper.keep_all(range(1), held)
    fedper.join([held]).keep_all(range(1), held)
    plan.keep_all(range(1), held)  # all of it is run again
    with pytest.raises(StoreError, match="2 runs"):
        plan.keep_all(range(1, 2), held)
    assert plan.lost(held) == ["local, seed 0", "iid/local, seed 0"], "nothing of it is made yet"
    changed = replace(fedper, recipe=replace(plan.recipe, more=("local.std",)))
    with pytest.raises(StoreError, match=r"cannot be kept: .* has no column local.std.*Move it elsewhere"):
        changed.keep_all(range(1), held)
    held.write_text("{")
    fedper.keep_all(range(1), held)  # nothing to keep
    plan.keep_all(range(1), tmp_path / "none.json")


def test_choices_of_learning_rates_are_kept_together() -> None:
    def tuning(rounds: int, **chosen: float) -> dict[str, Any]:
        scores = {label: {f"{lr:g}": 50.0} for label, lr in chosen.items()}
        return {"setting": "", "rounds": rounds, "val_fraction": 0.1, "seed": 0, "scores": scores, "chosen": chosen}

    assert joined_rates(tuning(5, a=0.1, b=0.1), tuning(5, b=0.3)) == tuning(5, a=0.1, b=0.3)
    assert joined_rates(tuning(4, a=0.1), tuning(5, b=0.3)) == tuning(5, b=0.3), "tried otherwise"
