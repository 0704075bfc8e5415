"""CONTRIBUTING.md, followed to the letter in a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+) (file|row|run)=?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_a_method_is_added_in_five_minutes(tmp_path: Path) -> None:
    for part in ("src", "tests", "pyproject.toml", "docs"):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / part)
    commands: list[str] = []
    for _, kind, where, text in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()):
        if kind == "file":
            assert not (tmp_path / where).exists()
            (tmp_path / where).write_text(text)
        elif kind == "row":
            rows = (tmp_path / where).read_text()
            (tmp_path / where).write_text(
                rows.replace("ROWS: dict[str, Row] = {\n", f"ROWS: dict[str, Row] = {{\n{text}")
            )
        else:
            commands += text.splitlines()
    assert len(commands) == 3
    for command in commands:
        tool, *rest = command.split()
        module = {"perfed": "perfed.cli", "pytest": "pytest"}[tool]
        done = subprocess.run(
            [sys.executable, "-m", module, *rest],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "firstlayer" in done.stdout.lower() or " passed" in done.stdout


def test_a_method_in_another_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "from dataclasses import dataclass\nfrom perfed import Method\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Method):\n    title = 'Mine'\n"
    )
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[perfed.methods]\nmine = elsewhere:Mine\n")
    done = subprocess.run(
        [sys.executable, "-m", "perfed.cli", "methods", "--json"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"mine"' in done.stdout
