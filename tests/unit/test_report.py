"""What the report and the tables say, compared with the runs themselves."""

from __future__ import annotations

import csv
import io
import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

import perfed
from perfed.cli import app
from perfed.errors import ConfigError, StoreError
from perfed.leaderboard import Comparison
from perfed.report import command, facts, papers
from perfed.report.collect import collect
from perfed.report.html import embedded
from perfed.report.page import render

METHODS = ["local", "fedavg", "cd2pfed", "vanilla", "fedavg+ft"]
WORDS = {"net": {"name": "mlp", "hidden": [16, 8]}, "clients": 6, "split": "classes:2", "rounds": 4, "eval_every": 1}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    place = tmp_path_factory.mktemp("compared") / "runs"
    settings = {"vanilla": {"unfreeze": [0, 2]}, "fedavg+ft": {"finetune_epochs": 2}}
    return perfed.compare(METHODS, [0, 1], out=place, settings=settings, method={"lr": 0.05}, fraction=0.7, **WORDS)


@pytest.fixture(scope="module")
def shown(compared: Comparison) -> dict[str, dict[str, object]]:
    (setting,) = collect([compared.directory])
    return {method["name"]: method for method in facts.of(setting)["methods"]}


def test_the_series_are_those_of_the_runs(compared: Comparison, shown: dict) -> None:
    for name, results in compared.runs.items():
        line = shown[name]
        assert line["t"] == [1, 2, 3, 4]
        for seed, result in enumerate(results):
            own = [entry["local.mean"] for entry in result.history]
            if line["after"]:
                own[-1] = result.history[-1]["local.before.mean"]
                assert line["after"]["accuracy"][seed] == pytest.approx(result.metrics["local.mean"], abs=1e-5)
            assert line["accuracy"][seed] == pytest.approx(own, abs=1e-5)
        spent = [r.cost["bytes_up"] + r.cost["bytes_down"] for r in results]
        assert line["bytes"][-1] == pytest.approx(sum(spent) / 2, abs=1)
        assert line["flops"][-1] == pytest.approx(sum(r.cost["flops"] for r in results) / 2, abs=1)
        assert all(a <= b for a, b in pairwise(line["bytes"]))
    assert shown["fedavg+ft"]["after"]
    assert shown["fedavg+ft"]["adapt_flops"] > shown["fedavg"]["adapt_flops"] == 0
    assert not shown["fedavg"]["after"]


def test_gains_count_clients_of_the_same_seed(compared: Comparison, shown: dict) -> None:
    for name, results in compared.runs.items():
        for base in ("local", "fedavg"):
            pairs = [
                (result.accuracy[i], other.accuracy[i])
                for result, other in zip(results, compared.runs[base], strict=True)
                for i in result.accuracy
            ]
            gains = shown[name]["gains"][base]
            assert gains["better"] == sum(a > b for a, b in pairs)
            assert gains["worse"] == sum(a < b for a, b in pairs)
            assert gains["better"] + gains["same"] + gains["worse"] == len(pairs) == 12
            assert gains["mean"] == pytest.approx(sum(a - b for a, b in pairs) / 12, abs=1e-5)


def test_layers_tell_what_was_private_and_what_travelled(compared: Comparison, shown: dict) -> None:
    def stages(name: str) -> list[list]:
        return shown[name]["layers"]["stages"]

    sizes = shown["fedavg"]["layers"]["sizes"]
    assert next((kept, sent) for _, kept, sent, *_ in stages("fedavg")) == ([0, 0, 0], sizes)
    assert all(kept == sizes and sent == [0, 0, 0] and up == [0] * 4 for _, kept, sent, up, *_ in stages("local"))
    grows = [kept for _, kept, *_ in stages("cd2pfed")]
    assert all(a <= b for first, second in pairwise(grows) for a, b in zip(first, second, strict=True))
    assert sum(grows[-1]) > sum(grows[0]) > 0
    schedule = {t: sent for t, _, sent, *_ in stages("vanilla")}
    assert schedule[1] == [sizes[0], 0, 0]
    assert schedule[3] == [sizes[0], sizes[1], 0]
    for name in METHODS:
        up = 0
        for t, stage in enumerate(_every(stages(name), 4), start=1):
            record = next(r for r in facts.rundir.records(compared.runs[name][0].directory) if r["t"] == t)
            up += sum(stage[3]) * len(record["clients"])
        real = sum(v for k, v in compared.runs[name][0].cost["layers"].items() if k.startswith("up/"))
        assert up == pytest.approx(real, rel=1e-3)


def _every(stages: list[list], rounds: int) -> list[list]:
    return [[stage for stage in stages if stage[0] <= t][-1] for t in range(1, rounds + 1)]


def test_the_command_makes_the_same_bits_again(compared: Comparison, tmp_path: Path) -> None:
    (setting,) = collect([compared.directory])
    (text,) = command.commands(setting)
    words = shlex.split(text)
    assert words[:2] == ["perfed", "compare"]
    made = CliRunner().invoke(app, [*words[1:], "--out", str(tmp_path / "again"), "--json"])
    assert made.exit_code == 0, made.output
    again = Comparison.load(tmp_path / "again")
    assert {n: [r.state_sha256 for r in rs] for n, rs in again.runs.items()} == {
        n: [r.state_sha256 for r in rs] for n, rs in compared.runs.items()
    }
    (single,) = collect([compared.directory / "vanilla" / "1"])
    (text,) = command.commands(single)
    made = CliRunner().invoke(app, [*shlex.split(text)[1:], "--out", str(tmp_path / "one"), "--json"])
    assert json.loads(made.stdout)["state_sha256"] == compared.runs["vanilla"][1].state_sha256


def test_runs_of_different_settings_are_not_mixed(compared: Comparison, tmp_path: Path) -> None:
    for rate in (0.01, 0.02):
        perfed.run({"name": "local", "lr": rate}, out=tmp_path / str(rate), **WORDS | {"rounds": 1})
    settings = collect([compared.directory, tmp_path / "0.01", tmp_path / "0.02"])
    assert [len(setting.runs) for setting in settings] == [5, 2]
    assert set(settings[1].runs) == {"local (lr=0.01)", "local (lr=0.02)"}
    assert len(command.commands(settings[1])) == 2


def test_unfinished_runs_are_named_and_nothing_is_not_a_report(compared: Comparison, tmp_path: Path) -> None:
    place = compared.runs["vanilla"][1].directory
    hidden = place / facts.rundir.RESULT
    hidden.rename(tmp_path / "kept.json")
    try:
        (setting,) = collect([compared.directory])
        assert setting.unfinished == ["vanilla, seed 1"]
        with pytest.raises(StoreError, match="not finished"):
            collect([place])
    finally:
        (tmp_path / "kept.json").rename(hidden)
    with pytest.raises(StoreError, match="no run"):
        collect([tmp_path])


def test_the_page_is_the_same_for_the_same_runs_and_holds_no_path(compared: Comparison) -> None:
    text = render([compared.directory])
    assert text == render([compared.directory])
    assert str(compared.directory) not in text


def test_data_cannot_end_its_element() -> None:
    hostile = {"</script>": "<!--<script>\u2028\u2029&", "nan": float("nan"), "lone": "\ud800"}
    text = str(embedded(hostile))
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"</script>": "<!--<script>\u2028\u2029&", "nan": None, "lone": "?"}


# Tables for papers


def test_a_table_has_mean_spread_and_marks(compared: Comparison) -> None:
    values = {name: [100 * r.metrics["local.mean"] for r in rs] for name, rs in compared.runs.items()}
    rows = {
        row["method"]: row
        for row in csv.DictReader(io.StringIO(papers.table([compared.directory], "csv", ["local.mean"])))
    }
    head = "accuracy, mean over clients (%)"
    for name, (a, b) in values.items():
        assert float(rows[name][f"{head} mean"]) == pytest.approx((a + b) / 2)
        assert float(rows[name][f"{head} spread"]) == pytest.approx(abs(a - b) / 2**0.5)
        assert rows[name][f"{head} seeds"] == "2"
    best, second = sorted({round(sum(v) / 2, 2) for v in values.values()}, reverse=True)[:2]
    text = papers.table([compared.directory], "md", ["local.mean"])
    assert f"| **{best:.2f} ± " in text
    assert f"| <u>{second:.2f} ± " in text
    latex = papers.table([compared.directory], "latex", ["local.mean"])
    assert f"$\\mathbf{{{best:.2f} \\pm " in latex
    assert f"\\underline{{${second:.2f} \\pm " in latex
    assert latex.count("\\\\") == 1 + len(METHODS)


def test_less_is_better_where_it_is_and_equals_share_a_place() -> None:
    column = {"a": papers.Cell(2.0, None, 1), "b": papers.Cell(1.0, None, 1), "c": papers.Cell(1.004, None, 1)}
    assert papers.places(column, "local.std") == {"b": 1, "c": 1, "a": 2}
    assert papers.places(column, "local.mean") == {"a": 1, "b": 2, "c": 2}
    assert papers.places({"a": papers.Cell(2.0, None, 1)}, "local.mean") == {}


def test_names_are_safe_in_every_format() -> None:
    assert papers._tex("a_b & 50% {x} \\y") == "a\\_b \\& 50\\% \\{x\\} \\textbackslash{}y"
    assert papers._md("a|b<u>") == "a\\|b\\<u\\>"
    assert papers._plain("=1+1") == "'=1+1"


def test_unknown_formats_and_metrics_are_refused(compared: Comparison) -> None:
    with pytest.raises(ConfigError, match="format"):
        papers.table([compared.directory], "docx", ["local.mean"])
    with pytest.raises(ConfigError, match=r"local\.men"):
        papers.table([compared.directory], "md", ["local.men"])


def test_the_commands_write_their_files(compared: Comparison, tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["report", str(compared.directory), "-o", str(tmp_path / "deep" / "page.html")])
    assert made.exit_code == 0
    assert "<!doctype html>" in (tmp_path / "deep" / "page.html").read_text()
    made = CliRunner().invoke(app, ["table", str(compared.directory), "--format", "csv"])
    assert len(made.stdout.splitlines()) == 1 + len(METHODS)
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 2


def test_layers_are_in_the_network_s_order_not_the_alphabet_s(tmp_path: Path) -> None:
    run = perfed.run(
        "fedper", net={"name": "conv3attn", "width": 0.0625, "heads": 1}, clients=5, rounds=1, out=tmp_path
    )
    found = facts.layers(run)
    assert found is not None
    assert found["names"] == ["conv1", "conv2", "conv3", "classifier"]
    assert found["stages"][0][1][:3] == [0, 0, 0]
    assert found["stages"][0][1][3] == found["sizes"][3]
