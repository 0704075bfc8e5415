"""The pages say what the code does: every word, name and default is in them, and their programs run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfed import data, errors, hyperparameters, nets
from perfed.config import Config
from perfed.core import registry
from perfed.core.method import Method
from perfed.data import shift, split
from perfed.data.download import CATALOGUE
from perfed.nets.registry import _NETS

DOCS = Path(__file__).parents[2] / "docs"
METHODS = DOCS / "methods"
PAGES = sorted([*DOCS.glob("*.md"), *METHODS.glob("*.md")])
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EMPTY = ("", "none", "empty")


def rows(page: Path, *head: str) -> Iterator[list[str]]:
    """The rows of a page's tables whose first columns have these titles (empty: any), marks of code left out."""
    wanted = inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]
        if not inside:
            inside = True
            wanted = all(not title or title == cell for title, cell in zip(head, cells, strict=False))
        elif wanted and not set(line) <= set("|-: "):
            yield cells


def same(text: str, value: Any) -> bool:
    """Whether a cell shows a value, as TOML or Python writes it; texts may go without quotation marks."""
    value = hyperparameters.plain(value)
    if value in (None, "", []):
        return text.strip("\"'[]()").lower() in EMPTY
    if isinstance(value, str):
        return text.strip("\"'") == value
    try:
        shown = json.loads(text.lower().replace("(", "[").replace(",)", "]").replace(")", "]"))
    except ValueError:
        return False
    return bool(shown == value) and isinstance(shown, bool) == isinstance(value, bool)


def own_fields(cls: type[Method]) -> set[str]:
    """The hyper-parameters that a method adds or gives another default."""
    shared = {f.name: f.default for f in dataclasses.fields(Method)}
    named = {
        key for owner in cls.__mro__[: cls.__mro__.index(Method)] for key in vars(owner).get("__annotations__", ())
    }
    return {f.name for f in dataclasses.fields(cls) if f.name not in shared or f.name in named}


@pytest.mark.parametrize("name", registry.methods())
def test_every_method_has_a_page_with_its_true_defaults(name: str) -> None:
    page = METHODS / f"{name}.md"
    assert page.exists(), f"{name} has no page"
    defaults = {field.name: field.default for field in hyperparameters.listing(registry.method_class(name))}
    shown = {cells[0]: cells[1] for cells in rows(page, "", "default")}
    for key, text in shown.items():
        assert key in defaults, f"{page.name} has {key}, which {name} has not"
        assert same(text, defaults[key]), f"{page.name} says {key} = {text}, the code {defaults[key]!r}"
    missing = own_fields(registry.method_class(name)) - shown.keys()
    assert not missing, f"{page.name} does not show {sorted(missing)}"
    assert f"--method {name}" in page.read_text(encoding="utf-8") or f'"{name}"' in page.read_text(encoding="utf-8")


def test_a_wrong_default_is_noticed() -> None:
    assert same("10", 10)
    assert same("0.01", 0.01)
    assert same('"all"', "all")
    assert same("[0, 100, 200]", (0, 100, 200))
    assert same("true", True)
    assert not same("9", 10)
    assert not same("true", 1)
    assert not same("head", "all")
    assert not same("[0, 100]", (0, 100, 200))


def test_the_index_lists_every_method_once_under_its_family() -> None:
    known = registry.methods()
    found = re.findall(r"^## (.+)$|^\| \[`(\w+)`\]\((\w+)\.md\)", (METHODS / "README.md").read_text(), re.MULTILINE)
    family, listed = "", {}
    for title, name, link in found:
        family = title.lower() or family
        if name:
            assert name == link
            assert name not in listed
            listed[name] = family
    assert listed == {name: cls.family for name, cls in known.items()}
    kept = {
        cells[0].split("]")[0].strip("["): tuple(cells[3:5]) for cells in rows(METHODS / "README.md", "name", "method")
    }
    assert kept == {name: (cls.keeps, cls.sends) for name, cls in known.items()}


def test_every_word_of_the_configuration_is_explained() -> None:
    shown = {cells[0]: cells[1] for cells in rows(DOCS / "runs.md", "word", "default")}
    assert list(shown) == list(Config.model_fields)
    for key, field in Config.model_fields.items():
        default = field.default["name"] if isinstance(field.default, dict) else field.default
        assert same(shown[key], default), f"runs.md says {key} = {shown[key]}"


def test_every_data_set_split_and_shift_is_explained() -> None:
    page = DOCS / "data.md"
    assert sorted(cells[0] for cells in rows(page, "name", "what it is")) == sorted(data.names())
    assert {cells[0].partition(":")[0] for cells in rows(page, "split")} == set(split.WORDS)
    assert {cells[0].partition(":")[0] for cells in rows(page, "shift")} == set(shift.WORDS)


def test_every_network_is_listed_with_its_sizes_and_options() -> None:
    page = DOCS / "networks.md"
    listed = {cells[0]: cells for cells in rows(page, "name", "layers")}
    assert sorted(listed) == sorted(nets.names())
    for name, (_, _, parameters, least, suits, options) in listed.items():
        assert (int(least), int(suits)) == (_NETS[name].possible, nets.min_size(name))
        assert set(re.findall(r"(\w+) \(", options)) == set(nets.options(name))
        if name in ("mlp", "cnn", "cifarnet", "lenet5", "conv3", "conv3attn", "resnet32"):  # the large ones take time
            count, _, shape = parameters.partition(" on ")
            net = nets.build(name, tuple(map(int, shape.split("x"))), 10)
            assert sum(p.numel() for p in net.module.parameters()) == int(count.replace(",", ""))


def test_every_error_has_its_line() -> None:
    listed = {cells[0] for cells in rows(DOCS / "errors.md", "code")}
    coded = {cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.PerfedError)}
    assert coded - {errors.PerfedError.code} <= listed
    assert len(listed) == len(list(rows(DOCS / "errors.md", "code")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page, one after another as one program, in an empty directory.

    A block that needs a data set to be fetched is only compiled.
    """
    programs = PROGRAM.findall(page.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "page"}
    for program in programs:
        code = compile(program, str(page), "exec")
        if not re.search(rf"[\"'+]({'|'.join(CATALOGUE)})[\"'+]", program):
            exec(code, space)
