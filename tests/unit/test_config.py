"""The words of a run: round trip, precedence, and refusals that name the key, the value and the cure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed import config, hyperparameters
from perfed.core.method import Method
from perfed.core.registry import method_class, methods
from perfed.errors import ConfigError, PerfedError, UnknownNameError


@pytest.mark.parametrize("name", [*methods(), "fedavg+ft"])
def test_resolved_file_gives_the_identical_configuration(name: str) -> None:
    made = config.resolve({"method": {"name": name, "lr": 0.02}, "data-dir": "x", "new": False, "shift": "rotation"})
    assert config.resolve(tomllib.loads(made.toml())) == made
    assert made.method.keys() >= {"name", "lr", "epochs", "batch_size"}


def test_a_string_is_short_for_a_table_and_hyphens_are_underscores() -> None:
    short = config.resolve({"method": "fedrep", "net": "mlp", "val-fraction": 0.2})
    table = config.resolve({"method": {"name": "fedrep"}, "net": {"name": "mlp"}, "val_fraction": 0.2})
    assert short == table
    with pytest.raises(ConfigError, match="given twice"):
        config.resolve({"val-fraction": 0.2, "val_fraction": 0.2})


def test_finetuning_is_written_out() -> None:
    assert config.resolve({"method": "fedavg+ft"}).method["finetune_epochs"] == 10
    assert config.resolve({"method": "fedavg"}).method["finetune_epochs"] == 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ({"metod": "fedavg"}, ["'metod'", "Did you mean 'method'"]),
        ({"method": {"name": "fedrep", "head-epoch": 3}}, ["fedrep", "'head_epoch'", "Did you mean 'head_epochs'"]),
        ({"method": "fedrap"}, ["'fedrap'", "Did you mean 'fedrep'"]),
        ({"method": {"lr": "abc"}}, ["method.lr", "'abc'", "a number"]),
        ({"method": {"lr": -0.1}}, ["method.lr", "-0.1", "above 0"]),
        ({"method": {"lr": float("inf")}}, ["method.lr", "inf"]),
        ({"method": {"lr": True}}, ["method.lr", "True"]),
        ({"method": {"epochs": 1.5}}, ["method.epochs", "1.5", "a whole number"]),
        ({"method": {"nesterov": 1}}, ["method.nesterov", "true or false"]),
        ({"method": {"finetune": "tail"}}, ["method.finetune", "'tail'", "'all', 'head', 'body'"]),
        ({"method": {"batch_size": 0}}, ["method.batch_size", "at least 1"]),
        ({"method": 3}, ["method", "3", "a name"]),
        ({"net": {"name": 7}}, ["net", "a name"]),
        ({"rounds": 0}, ["rounds", "0", "at least 1"]),
        ({"rounds": "5"}, ["rounds", "'5'", "a whole number"]),
        ({"fraction": 0.0}, ["fraction", "above 0"]),
        ({"fraction": 1.1}, ["fraction", "at most 1"]),
        ({"clients": 0}, ["clients", "at least 1"]),
        ({"seed": -1}, ["seed", "at least 0"]),
        ({"test": "later"}, ["test", "'later'", "'pooled', 'published'"]),
        ({"adapt": "soon"}, ["adapt", "'final'"]),
    ],
)
def test_refusals_name_key_value_and_cure(words: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.resolve(words)
    for part in parts:
        assert part in str(caught.value)


def test_whole_numbers_pass_for_numbers() -> None:
    made = config.resolve({"method": {"lr": 1}, "fraction": 1})
    assert made.method["lr"] == 1.0
    assert isinstance(made.fraction, float)


def test_precedence_is_defaults_file_flags_set(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('rounds = 7\nclients = 9\nseed = 3\n[method]\nname = "fedrep"\nlr = 0.5\nepochs = 4\n')
    words = config.merged(config.read(file), {"clients": 11, "seed": 4, "method": "fedper"})
    made = config.resolve(config.override(words, ["seed=5", "method.lr=0.25"]))
    assert (made.test_fraction, made.rounds, made.clients, made.seed) == (0.25, 7, 11, 5)
    assert (made.method["name"], made.method["lr"], made.method["epochs"]) == ("fedper", 0.25, 4)


def test_override_values_are_toml_and_bare_words_are_text() -> None:
    words = config.override({}, ["net=mlp", "net.hidden=[3, 4]", "new=true", "shift=none", "split=dirichlet:0.1"])
    assert words == {
        "net": {"name": "mlp", "hidden": [3, 4]},
        "new": True,
        "shift": "none",
        "split": "dirichlet:0.1",
    }
    assert config.resolve(words).shift is None


@pytest.mark.parametrize("setting", ["lr", "=3", "a.b.c=1", "metod.lr=1", "rounds.x=1", ".=1"])
def test_impossible_settings_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError):
        config.resolve(config.override({}, [setting]))


def test_identity_leaves_out_what_changes_no_result() -> None:
    one = config.resolve({"workers": 1, "out": "a", "data_dir": "b"})
    two = config.resolve({"workers": 3, "out": "c"})
    assert one.identity() == two.identity()
    assert "out" not in tomllib.loads(one.toml())


def test_paths_do_not_depend_on_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    assert config.resolve({"data": "images"}).data["name"] == f"folder:{tmp_path / 'images'}"
    assert config.resolve({"data": "digits", "split": "file:a.csv"}).split == f"file:{tmp_path / 'a.csv'}"
    (tmp_path / "digits").mkdir()
    assert config.resolve({"data": "digits"}).data["name"] == "digits"


@dataclass(frozen=True, kw_only=True)
class Odd(Method):
    sizes: tuple[int, ...] = (1, 2)
    """layer
    sizes"""
    limit: float | None = 0.5
    mode: Literal["a", "b"] = "a"


def test_types_of_a_users_own_hyper_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfed.core.registry._registered", {"odd": Odd, **methods()})
    made = config.resolve({"method": {"name": "odd", "sizes": [3], "limit": "none", "mode": "b"}})
    assert hyperparameters.check("odd", {k: v for k, v in made.method.items() if k != "name"}) == Odd(
        sizes=(3,), limit=None, mode="b"
    )
    assert config.resolve(tomllib.loads(made.toml())) == made
    with pytest.raises(UnknownNameError, match="'sizes'"):
        config.resolve({"method": {"name": "odd", "size": [3]}})
    with pytest.raises(ConfigError, match="a list, each a whole number"):
        config.resolve({"method": {"name": "odd", "sizes": ["x"]}})
    listed = {field.name: field for field in hyperparameters.listing(Odd)}
    assert listed["sizes"].meaning == "layer sizes"
    assert listed["lr"].meaning == "learning rate of the local SGD"
    assert next(iter(listed)) == "sizes"
    assert listed["lr"].type == "a number above 0"
    assert listed["momentum"].type == "a number of at least 0 and below 1"
    cd2 = {field.name: field.type for field in hyperparameters.listing(method_class("cd2pfed"))}
    assert cd2["p"] == "a number from 0 to 1"


VALID = config.resolve({"method": "fedrep", "net": {"name": "mlp", "hidden": [3]}, "shift": "rotation"}).toml()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(VALID.encode())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(raw)))
        junk = data.draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"\n[x]\n", b"=", b"1e999", b"'''", b"nan"]))
        )
        raw[place : place + data.draw(st.integers(0, 5))] = junk
    file = tmp_path_factory.getbasetemp() / "mutated.toml"
    file.write_bytes(bytes(raw))
    try:
        made = config.load(file)
    except PerfedError:
        return
    assert config.resolve(tomllib.loads(made.toml())) == made
