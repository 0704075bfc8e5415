"""Running a recipe: skipped, continued, side by side, tuned; and what is written about it."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import perfed
from perfed import config as configuration
from perfed import grid, ran, recipes, rundir
from perfed.cli import app, gridwatch
from perfed.errors import ConfigError, StoreError
from perfed.grid import Job, time_left
from perfed.recipes import Cell
from perfed.recipes.column import Column
from perfed.report.reproduction import page_text
from perfed.reproduce import Plan, best_rate, counted, reproduce, tune, write
from perfed.standing import close, first_of_all, in_order, rank
from perfed.weigh import weigh
from tests.recipe import RECIPE, without_timing


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_facts_have_means_ranks_hashes_and_all_that_was_run(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[str, Any]] = []
    found = reproduce(replace(plan, only=("local",)), range(2), keep=kept.append)
    assert [len(facts["rows"]) for facts in kept] == [1, 1, 1, 1]
    assert found["missing"] == ["fedper", "iid/fedper"]
    assert "rank_published" not in found["rows"]["local"]["cells"]["local.mean"], "no place where there is but one"
    assert first_of_all(found) == (0, 0), "not while methods are missing"
    cell = found["rows"]["local"]["cells"]["local.mean"]
    assert len(cell["values"]) == 2
    assert cell["difference"] == pytest.approx(sum(cell["values"]) / 2 - 90)
    assert cell["spread"] > 0
    assert set(found["settings"]["iid"]["partition_sha256"]) == {"0", "1"}
    assert found["settings"]["iid"]["partition_sha256"] != found["settings"][""]["partition_sha256"]
    with monkeypatch.context() as patched:
        patched.setattr(grid, "finish", lambda *_: pytest.fail("what is done is not run again"))
        assert reproduce(replace(plan, only=("local",)), range(2)) == found
    whole = reproduce(plan, range(1), top=1, top_seeds=range(3))
    assert whole["missing"] == []
    best = max(("local", "fedper"), key=lambda label: whole["rows"][label]["cells"]["local.mean"]["values"][0])
    assert len(whole["rows"][best]["cells"]["local.mean"]["values"]) == 3
    ranks = [row["cells"]["local.mean"]["rank_measured"] for row in whole["rows"].values()]
    assert sorted(ranks) == [1, 2]
    assert first_of_all(whole)[1] == 3
    page = page_text(plan.recipe, whole)
    assert "Budget full, 1 to 3 seeds; accuracy" in page
    assert "`perfed reproduce mine.toml --budget full --seeds 1`, up to 3 seeds for some methods or settings;" in page
    assert "ranks and pairs are by those that all of the column have" in page
    assert "| local | 90.00 ± 1.50 |" in page
    assert " (3 seeds) |" in page


def test_runs_of_another_recipe_are_not_mixed_in(plan: Plan) -> None:
    """Also those of methods that this call does not run: they would stand under settings that they never had."""
    reproduce(replace(plan, only=("local",), within=("iid",)))
    other = recipes.parse("mine", RECIPE.replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(StoreError, match="Give another --runs"):
        reproduce(replace(plan, recipe=other, only=("fedper",), within=("iid",)))
    assert not list(plan.out.rglob("fedper")), "it is said before anything is computed"


def test_refused_updates_are_told(
    plan: Plan, tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs and of what results files tell of them; nothing is said where none was refused."""
    assert "refused" not in page_text(plan.recipe, whole)
    loaded = perfed.Result.load
    monkeypatch.setattr(perfed.Result, "load", lambda place: replace(loaded(place), faults=[{}] * 3))
    held = write(reproduce(replace(plan, only=("local",))), tmp_path)
    facts = replace(plan, out=tmp_path / "elsewhere").join([held]).facts()
    assert facts["rows"]["local"]["faults"] == {"run": [3], "iid": [3]}
    assert "not finite or not as declared: 6 of local." in page_text(plan.recipe, facts)
    older = write(whole, tmp_path / "older")  # tells of the same runs, and of no refusal
    assert plan.join([older]).facts()["rows"]["local"]["faults"] == {"run": [3], "iid": [3]}


def test_words_of_single_methods_are_not_those_of_all(plan: Plan, tmp_path: Path) -> None:
    """A part that only has methods with a network of their own still tells the common one, and is held to it."""
    text = RECIPE.replace("[methods.local]", '[methods.local]\nrun = { net = { name = "mlp", hidden = [4] } }')
    part = replace(plan, recipe=recipes.parse("mine", text), only=("local",), within=("iid",))
    held = write(reproduce(part), tmp_path)
    config = json.loads(held.read_text())["settings"]["iid"]["config"]
    assert config["net"]["hidden"] == [8]
    with pytest.raises(StoreError, match="settings iid config net hidden"):
        replace(plan, recipe=recipes.parse("mine", text.replace("[8]", "[9]"))).join([held])


def test_a_page_says_what_was_published_and_could_not_be_read(plan: Plan) -> None:
    text = RECIPE.replace('"iid" = 50.0', '"local.meen" = 50.0')
    page = page_text(recipe := recipes.parse("mine", text), reproduce(replace(plan, recipe=recipe, only=("local",))))
    assert "Published, but not measured by the runs that were made: local local.meen." in page
    assert "`perfed reproduce mine.toml --budget full --seeds 1`" in page


def test_sentences_about_a_share_of_the_rounds_are_not_said_of_all(plan: Plan, whole: dict[str, Any]) -> None:
    text = RECIPE.replace(
        'check = "[local local.mean] > 0 and', 'budget = "quick"\ncheck = "[local local.mean] > 0 and'
    )
    assert "Both were run" not in page_text(recipes.parse("mine", text), whole)


def test_less_loss_is_better(plan: Plan) -> None:
    found = reproduce(replace(plan, recipe=replace(plan.recipe, more=("local.loss",)), within=("",)))
    cells = sorted((row["cells"]["local.loss"] for row in found["rows"].values()), key=lambda cell: cell["measured"])
    assert [cell["rank_measured"] for cell in cells] == [1, 2]
    assert cells[0]["measured"] < 5, "not in per cent"


def test_settings_and_single_methods_are_shown_with_what_they_change(plan: Plan) -> None:
    text = RECIPE.replace('run = { split = "iid" }', 'run = { split = "iid" }\nmethod = { epochs = 2 }')
    text = text.replace("[methods.fedper]", "[methods.fedper]\nrun = { rounds = 2 }")
    recipe = recipes.parse("mine", text)
    page = page_text(recipe, reproduce(replace(plan, recipe=recipe)))
    assert "| setting `iid` | `split = iid`; methods: `epochs = 2` |" in page
    assert "run with `rounds = 2` |" in page


def test_how_figures_stand_to_those_of_the_paper() -> None:
    cells = {"a": (3.0, 2.0), "b": (2.0, 3.0), "c": (1.0, 1.0), "d": (1.0, 0.5)}
    rows = {
        label: {"cells": {"s/x": {"published": said, "measured": seen, "difference": seen - said}}}
        for label, (said, seen) in cells.items()
    } | {"e": {"cells": {"s/x": {"published": 9.0}}}}
    rank(rows, [Column("s/x")])
    assert [rows[label]["cells"]["s/x"].get("rank_published") for label in rows] == [1, 2, 3, 3, None]
    assert [rows[label]["cells"]["s/x"].get("rank_measured") for label in rows] == [2, 1, 3, 4, None]
    assert close(rows, 0.5) == [2, 4]
    level = {
        name: {"cells": {"x": {"measured": value}}} for name, value in (("a", 86.41000000000001), ("b", 86.41 - 2e-14))
    }
    rank(level, [Column("x")])
    assert [row["cells"]["x"]["rank_measured"] for row in level.values()] == [1, 1], "rounding is no lead"
    assert in_order({"rows": rows}) == (4, 5)  # a and b are turned round, c and d are level in the paper
    assert first_of_all({"rows": rows, "own": ["b"], "missing": []}) == (1, 1)
    assert first_of_all({"rows": rows, "own": ["a"], "missing": ["t/e"]}) == (0, 1)
    assert first_of_all({"rows": rows, "own": ["b"], "missing": ["s/e"]}) == (0, 0)
    assert first_of_all({"rows": rows, "own": ["b"], "missing": []}, "published") == (0, 1)
    assert first_of_all({"rows": rows, "own": ["a"], "missing": []}, "published") == (1, 1)
    for number, row in enumerate(rows.values()):
        row["cells"] |= {key: {"measured": float(number)} for key in ("s/more", "drawn/x")}
    rank(rows, [Column("s/more"), Column("drawn/x")])
    assert first_of_all({"rows": rows, "own": ["b"], "missing": []}) == (1, 2), (
        "what is drawn counts, what is added not"
    )
    assert first_of_all({"rows": rows, "own": ["a"], "missing": []}, "published") == (1, 1), "a drawing has no ranks"
    bare = {label: {"cells": {"drawn/x": row["cells"]["drawn/x"]}} for label, row in rows.items()}
    assert first_of_all({"rows": bare, "own": ["b"], "missing": []}) == (0, 0), "no paper"


def test_methods_with_more_seeds_are_compared_by_those_of_all() -> None:
    """The second seed is kind to everybody, so who has it must not win by it."""
    held: dict[str, tuple[list[int], list[float | None]]] = {
        "a": ([0, 1, 2], [80.0, 95.0, None]), "b": ([0], [81.0]), "c": ([0, 1], [79.0, 96.0]),
    }  # fmt: skip
    rows: dict[str, Any] = {
        label: {"seeds": {"s": seeds}, "cells": {"s/x": {"published": 1.0 + len(seeds), "values": values,
                "measured": statistics.fmean(v for v in values if v is not None), "difference": 0.0}}}
        for label, (seeds, values) in held.items()
    }  # fmt: skip
    rank(rows, [Column("s/x")])
    assert [rows[label]["cells"]["s/x"]["rank_measured"] for label in "abc"] == [2, 1, 3]
    assert in_order({"rows": rows}) == (1, 3)
    rows["d"] = {"seeds": {"s": [5]}, "cells": {"s/x": {"values": [90.0], "measured": 90.0}}}
    rank(rows, [Column("s/x")])
    assert [rows[label]["cells"]["s/x"]["rank_measured"] for label in "abcd"] == [2, 4, 2, 1], "no seed in common"


def test_side_by_side_is_the_same_as_in_turn(plan: Plan, tmp_path: Path) -> None:
    plan = replace(plan, only=("local",))
    turn = reproduce(plan)
    looks: list[int] = []
    beside = replace(plan, out=tmp_path / "two", cores=2, look=lambda jobs: looks.append(sum(j.rounds for j in jobs)))
    both = reproduce(beside)
    assert turn | {"timing": 0} == both | {"timing": 0}
    assert looks == sorted(looks)
    assert looks[-1] == 2 * 3


@pytest.mark.parametrize("cores", [1, 2])
def test_progress_tells_of_updates_that_are_refused(
    plan: Plan, cores: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the run goes on: whoever sees that every update is lost need not wait for its end."""
    monkeypatch.setattr(gridwatch, "SELDOM", -1.0)
    jobs = [plan.job(Cell(setting, "local"), 0) for setting in ("", "iid")]
    jobs[0].config = jobs[0].config.changed(method=jobs[0].config.method | {"lr": 1e30})
    with gridwatch.GridWatch("again", cores) as look:
        grid.run(jobs, cores=cores, look=look)
    assert jobs[0].result is not None
    assert jobs[0].refused == len(jobs[0].result.faults) > 3
    assert jobs[1].refused == 0
    if cores == 1:  # every round is told
        said = capsys.readouterr().err
        assert ", local 2/3 (updates refused: 10), " in said
        assert ", local (iid) 2/3, " in said
    again = plan.job(Cell("", "local"), 0)
    again.config = jobs[0].config
    grid.run([again])
    assert again.refused == jobs[0].refused, "those of an earlier call too"


def test_progress_ends_with_the_accuracy_of_the_rounds_that_count(plan: Plan, tmp_path: Path) -> None:
    job = plan.job(Cell("", "local"), 0)
    job.config = job.config.changed(last_k=3, eval_every=1)
    grid.run([job])
    assert job.result is not None
    each = [entry["local.mean"] for entry in job.result.history]
    assert job.accuracy == pytest.approx(sum(each) / 3)
    assert job.accuracy != each[-1]


def test_a_run_that_fails_beside_others_is_named(plan: Plan) -> None:
    job = plan.job(Cell("", "local"), 0)
    rundir.claim(job.place, job.config.toml().replace("classes:2", "classes:99"))
    other = plan.job(Cell("iid", "local"), 0)
    with pytest.raises(Exception, match=r"classes:99"):
        grid.run([job, other], cores=2)


def test_a_run_that_says_much_before_it_fails_is_named_too(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds, so that nobody waits for a reader."""
    noisy = "import sys; sys.stderr.write('x\\n' * 200_000 + 'It broke.'); sys.exit(3)"

    def start(job: Job, workers: int, said: Any) -> Any:
        return subprocess.Popen([sys.executable, "-c", noisy], stdin=subprocess.PIPE, stderr=said)

    monkeypatch.setattr(grid, "_start", start)
    with pytest.raises(StoreError, match=r"failed: It broke\. .*--only"):
        grid.run([plan.job(Cell(setting, "local"), 0) for setting in ("", "iid")], cores=2)


def test_a_killed_recipe_ends_with_the_same_results_file(tmp_path: Path) -> None:
    """SIGKILL in the middle, of the parent alone: nothing that it started stays, and the same command goes on."""
    (tmp_path / "mine.toml").write_text(RECIPE.replace("rounds = 3", "rounds = 30").replace(', "iid" = 50.0', ""))

    def command(place: str) -> list[str]:
        words = f"reproduce {tmp_path}/mine.toml --budget full --settings base --workers 2"
        places = [f"--{kind}={place}/{kind}" for kind in ("runs", "results", "pages")]
        return [sys.executable, "-m", "perfed.cli", *words.split(), *places]

    undisturbed = subprocess.run(command("whole"), cwd=tmp_path, check=False, capture_output=True, text=True)
    assert undisturbed.returncode == 0, undisturbed.stderr
    runs, killed = tmp_path / "cut" / "runs", False
    with subprocess.Popen(
        command("cut"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not killed:
            time.sleep(0.05)
            rounds = [rundir.committed(path.parent) for path in runs.glob("**/run.db")]
            if any(0 < t < 30 for t in rounds):
                os.kill(process.pid, signal.SIGKILL)
                killed = True
    assert killed
    assert (
        not (tmp_path / "cut" / "results" / "mine.json").exists()
        or json.loads((tmp_path / "cut" / "results" / "mine.json").read_text())["missing"]
    )
    for _ in range(50):  # what it started ends by itself
        again = subprocess.run(command("cut"), cwd=tmp_path, check=False, capture_output=True, text=True)
        if again.returncode == 0:
            break
    assert again.returncode == 0, again.stderr
    file = Path("results") / "mine.json"
    assert without_timing(tmp_path / "cut" / file) == without_timing(tmp_path / "whole" / file)
    page = (tmp_path / "cut" / "pages" / "mine.md").read_text()
    assert "- Both were run." in page
    assert "This is false" not in page
    assert (tmp_path / "cut" / "pages" / "mine.svg").exists()


def test_tuning_looks_at_validation_data_only(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tune(plan)
    assert found["rounds"] == 2
    assert found["chosen"] == {"local": 0.1, "fedper": 0.1}
    jobs = sorted((plan.out / "tune").rglob("config.toml"))
    assert len(jobs) == 4
    assert all("val_fraction = 0.1" in job.read_text() for job in jobs)
    assert best_rate({"0.1": 50.0, "0.01": 50.0, "1": None}) == 0.01
    with pytest.raises(ConfigError, match="larger val_fraction"):
        best_rate({"0.1": None})
    with pytest.raises(ConfigError, match="nothing to tune"):
        tune(replace(plan, recipe=replace(plan.recipe, tune=None)))


def test_the_command_prints_the_table_and_keeps_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(RECIPE)
    answer = call(
        "reproduce", "mine.toml", "--budget", "full", "--in-turn", "--workers", "1", "--tune", "--settings", "iid"
    )
    assert answer.exit_code == 0, answer.output
    assert "rank published" in " ".join(answer.stdout.split())
    assert "[tuned]" in answer.stderr
    held = json.loads((tmp_path / "results" / "mine.json").read_text())
    assert held["tuning"]["chosen"]["fedper"] == 0.1
    assert "## Learning rates" in (tmp_path / "docs" / "reproductions" / "mine.md").read_text()
    for budget in ("full", "quick"):
        again = call("reproduce", "mine.toml", "--budget", budget, "--in-turn", "--workers", "1", "--settings", "iid")
        assert again.exit_code == 0, again.output
        page = (tmp_path / "docs" / "reproductions" / "mine.md").read_text()
        assert "## Learning rates" in page, "they stay"
        assert "Budget full" in page, "the page is of the largest budget"
    assert json.loads((tmp_path / "results" / "mine.json").read_text())["tuning"] == held["tuning"]
    (tmp_path / "mine.toml").write_text(RECIPE.replace("lr = 0.1\n", "lr = 0.2\n"))
    words = ("--budget", "full", "--settings", "iid", "--runs", "other", "--results", "other", "--in-turn")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.json").write_text(json.dumps({"recipe": "mine", "tuning": held["tuning"]}))
    assert call("reproduce", "mine.toml", *words).exit_code == 0
    assert "tuning" not in json.loads((tmp_path / "other" / "mine.json").read_text()), "other rates were taken"
    (tmp_path / "mine.toml").write_text(RECIPE)
    assert "is a file" in call("reproduce", "mine.toml", "--results", "mine.toml").stderr
    words = ("--budget", "full", "--settings", "iid", "--join", "results/mine.json", "--runs", "elsewhere")
    joined = call("reproduce", "mine.toml", *words)
    assert joined.exit_code == 0, joined.output
    assert "rank published" in " ".join(joined.stdout.split())
    assert not list(tmp_path.glob("elsewhere/**/config.toml")), "all is done"
    refused = call("reproduce", "mine.toml", "--budget", "full", "--only", "local", "--runs", "elsewhere")
    assert "Keep what it tells with --join results/mine.json" in " ".join(refused.stderr.split())
    listed = call("recipes").stdout
    assert "scheduling-table4" in listed
    assert call("reproduce", "mine.toml", "--budget", "some").exit_code == 2
    assert "`perfed recipes` lists them" in " ".join(call("reproduce", "cd2-table9").stderr.split())
    missed = call("reproduce", "leaderboard", "--only", "fedem-3lr", "--settings", "cifar10")
    assert "It is in mnist" in " ".join(missed.stderr.split())
    (tmp_path / "folder.toml").mkdir()
    assert "Give a TOML file" in " ".join(call("reproduce", "folder.toml").stderr.split())
    assert "There is no file other.toml" in call("reproduce", "other.toml").stderr
    assert "Known: base, iid" in " ".join(call("reproduce", "mine.toml", "--settings", "some").stderr.split())
    for _ in range(2):  # there is nothing to lose in what is counted
        assert call("reproduce", "scheduling-table4", "--budget", "full").exit_code == 0
    assert "Leave --only out" in " ".join(call("reproduce", "scheduling-table4", "--only", "anti").stderr.split())


def test_table_4_of_scheduling_is_exact() -> None:
    recipe = recipes.load("scheduling-table4")
    exact = {"fedavg": 873.039, "fedbabu": 865.344, "vanilla": 314.912, "anti": 838.880}
    one = replace(recipe, words=recipe.words | {"rounds": 300}, dry=recipe.dry | {"clients": 1})
    found = counted(one)
    for label, value in exact.items():
        assert 100 * found[label]["param_batches"] == pytest.approx(value, abs=5e-4)


def test_columns_read_rounds_clients_and_settling() -> None:
    history = [{"t": t, "local.mean": v} for t, v in ((1, 0.5), (2, 0.895), (3, 0.7), (4, 0.9), (5, 0.905))]
    result: Any = SimpleNamespace(
        metrics={"local.mean": 0.905},
        history=history,
        clients={"accuracy": [0.25, None]},
        config=SimpleNamespace(rounds=5),
    )
    got = [ran.read(result, Column(key)) for key in ("local.mean", "x/local.mean@2", "local.mean@9", "client.0")]
    assert got == [90.5, 89.5, None, 25.0]
    assert ran.read(result, Column("local.mean@20"), share=0.1) == 89.5
    assert ran.read(result, Column("client.1")) is None
    assert ran.read(result, Column("settled.local.mean")) == 4


def test_the_mean_of_those_who_took_part(tmp_path: Path) -> None:
    result = perfed.run(
        method="local", data="digits", clients=5, split="classes:2", fraction=0.2, rounds=2,
        net={"name": "mlp", "hidden": [8]}, out=tmp_path / "run",
    )  # fmt: skip
    seen = {client for record in rundir.records(result.directory) for client in record["cohort"]}
    assert 1 <= len(seen) <= 2
    own = [result.clients["accuracy"][client] for client in seen]
    assert ran.read(result, Column("local.took_part")) == pytest.approx(100 * sum(own) / len(own))
    assert ran.read(result, Column("local.took_part.std")) == pytest.approx(100 * statistics.pstdev(own))


def test_adaptation_behind_the_last_round_is_part_of_the_time_left(tmp_path: Path) -> None:
    """Fine-tuning all clients for ten epochs is as much work as ten rounds of one epoch with all of them."""
    words: dict[str, Any] = {"data": "digits", "clients": 10, "rounds": 10, "net": {"name": "mlp", "hidden": [8]}}
    plain, tuned = (
        Job(name, configuration.resolve(words | {"method": {"name": name, "epochs": 1}}), tmp_path)
        for name in ("fedavg", "fedavg+ft")
    )
    weigh([plain, tuned])
    assert tuned.weight == pytest.approx(2 * plain.weight, rel=0.01)
    tuned.rounds, tuned.seconds = 9, 9.0
    assert time_left([tuned], 1) == pytest.approx(11, rel=0.02)


def test_adaptation_at_every_reading_is_part_of_the_time_left(tmp_path: Path) -> None:
    """Five readings of ten rounds, each with an adaptation that is as much work as the ten rounds."""
    words: dict[str, Any] = {"data": "digits", "clients": 10, "rounds": 10, "net": {"name": "mlp", "hidden": [8]}}
    words |= {"method": {"name": "fedavg+ft", "epochs": 1}, "eval_every": 2, "adapt": "always"}
    job = Job("always", configuration.resolve(words), tmp_path)
    weigh([job])
    job.rounds, job.seconds = 1, 1.0
    assert time_left([job], 1) == pytest.approx(59, rel=0.02)
    job.rounds, job.seconds = 2, 12.0
    assert time_left([job], 1) == pytest.approx(48, rel=0.02)


def test_the_last_run_gets_the_cores_that_nobody_needs(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from a committed round with more workers, to the same bits."""
    monkeypatch.setattr(grid, "LONG", 0.0)
    started: list[tuple[str, int, int]] = []
    start = grid._start

    def noted(job: Job, workers: int, said: Any) -> Any:
        started.append((job.name, workers, job.rounds))
        return start(job, workers, said)

    monkeypatch.setattr(grid, "_start", noted)
    short = plan.job(Cell("", "local"), 0)
    middle = replace(short, name="middle", config=short.config.changed(rounds=100), place=tmp_path / "middle")
    long = replace(short, name="long", config=short.config.changed(rounds=300), place=tmp_path / "long")
    alone = replace(long, place=tmp_path / "alone")
    grid.run([short, middle, long], cores=4)
    workers = [count for name, count, _ in started if name == "long"]
    assert workers == sorted(set(workers))
    assert workers[0] == 1
    assert workers[-1] == 4  # a run with workers of its own is taken over too
    assert 0 < started[-1][2] < 300
    grid.run([alone])
    assert long.result is not None
    assert alone.result is not None
    assert long.result.state_sha256 == alone.result.state_sha256


def test_time_left_is_told_from_what_is_done() -> None:
    config: Any = SimpleNamespace(rounds=10)
    jobs = [Job(name, config, Path(), weight) for name, weight in (("a", 1.0), ("a", 1.0), ("b", 3.0))]
    assert time_left(jobs, 1) is None
    jobs[0].rounds, jobs[0].seconds = 5, 10.0
    assert time_left(jobs, 1) == pytest.approx(10 + 20 + 60)
    assert time_left(jobs, 2) == pytest.approx(60)  # the longest cannot be halved
    jobs[2].rounds, jobs[2].seconds = 1, 3.0
    assert time_left(jobs, 1) == pytest.approx(10 + 20 + 27)
