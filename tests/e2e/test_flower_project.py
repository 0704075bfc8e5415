"""A Flower project of a user's own under `flwr run`: two lines in its pyproject, or perfed's Strategy in its ServerApp.

`PERFED_FLOWER=all` tries both; otherwise the two lines. What is run is what docs/flower.md shows.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import perfed
from perfed.flower.deployment import environment, program
from perfed.result import Result
from tests.e2e.namespace import in_a_namespace

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flower.md").read_text()
KINDS = ["lines", "strategy"] if os.environ.get("PERFED_FLOWER") == "all" else ["lines"]
HEAD = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "mine"
version = "1.0.0"
description = "A project"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "me"
"""


def block(kind: str, having: str) -> str:
    found = [text for text in re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if having in text]
    assert len(found) == 1
    return str(found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_of_ones_own_ends_with_the_bits_of_one_process(kind: str, tmp_path: Path) -> None:
    project, out = tmp_path / "project", tmp_path / "run"
    (project / "mine").mkdir(parents=True)
    (project / "mine" / "__init__.py").touch()
    (project / "mine" / "server.py").write_text(block("python", "Strategy(context.run_config)"))
    lines = block("toml", "clientapp").replace("/srv/runs/first", str(out)).replace("rounds = 10", "rounds = 2")
    lines = lines.replace("clients = 10", "clients = 5").replace("[200]", "[16]")
    if kind == "strategy":
        lines = lines.replace("perfed.flower.server_app:app", "mine.server:app")
    (project / "pyproject.toml").write_text(HEAD + "\n" + lines)
    federation = "num-supernodes=5 client-resources-num-cpus=1 init-args-num-cpus=1"
    words = ["run", str(project), "local", "--federation-config", federation, "--stream"]
    for _ in range(3):
        done = subprocess.run(
            in_a_namespace(program("flwr"), *words, processes=True),
            env=environment(tmp_path / "flower"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if "Failed to start local SuperLink" not in done.stdout + done.stderr:  # Flower gives it 15 s
            break
    assert (out / "result.json").is_file(), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    expected = perfed.run({"name": "fedrep", "lr": 0.05}, net={"name": "mlp", "hidden": [16]}, clients=5, rounds=2)
    assert Result.load(out).state_sha256 == expected.state_sha256
