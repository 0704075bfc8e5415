"""Comparisons: methods on networks of their own, and the demo that has them all."""

from pathlib import Path

import pytest

import perfed
from perfed import comparison, demo
from perfed.core import registry
from perfed.errors import ConfigError

FEW = {"data": "digits", "clients": 5, "rounds": 1, "net": {"name": "mlp", "hidden": [8]}}
OWN = {"pse": {"name": "conv3attn", "width": 0.0625, "heads": 1, "hidden": 4}}


def test_a_method_may_have_a_network_of_its_own(tmp_path: Path) -> None:
    made = perfed.compare(["fedavg", "pse"], nets=OWN, out=tmp_path, **FEW)
    assert {row["method"]: row.get("net") for row in made.rows} == {"fedavg": None, "pse": "conv3attn"}
    assert "pse (conv3attn)" in made.table()
    assert made.runs["pse"][0].config.net["width"] == 0.0625
    again = comparison.resume_comparison(tmp_path)
    assert [run.state_sha256 for run in again.runs["pse"]] == [run.state_sha256 for run in made.runs["pse"]]


def test_a_comparison_grows_by_a_method_with_its_own_network_and_is_resumed_with_it(tmp_path: Path) -> None:
    perfed.compare(["pse"], nets=OWN, out=tmp_path, **FEW)
    perfed.compare(["fedavg"], out=tmp_path, **FEW)
    (tmp_path / "pse" / "0" / "result.json").unlink()
    made = comparison.resume_comparison(tmp_path)
    assert {name: runs[0].config.net["name"] for name, runs in made.runs.items()} == {
        "pse": "conv3attn",
        "fedavg": "mlp",
    }


def test_a_network_for_a_method_that_is_not_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is a network for 'pse', which is not compared"):
        perfed.compare(["fedavg"], nets=OWN, out=tmp_path, **FEW)


def test_an_option_of_the_same_network_is_told(tmp_path: Path) -> None:
    made = perfed.compare(
        ["fedavg", "fedper", "fedbn"],
        nets={"fedbn": {"name": "mlp", "hidden": [8], "batchnorm": True}},
        out=tmp_path,
        **FEW,
    )
    assert {row["method"]: row.get("net") for row in made.rows}["fedbn"] == "batchnorm"


def test_the_demo_has_every_method() -> None:
    assert {name.removesuffix("+ft") for name in demo.names()} == set(registry.methods())
