"""What the README shows works as it stands there, and the pages' numbers are those of results/."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_ten_line_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three clients with photographs of two kinds, in folders, and the README's network."""
    chance = np.random.default_rng(0)
    for client in ("anna", "ben", "cleo"):
        for number, kind in enumerate(("dark", "light")):
            folder = tmp_path / "photos" / client / kind
            folder.mkdir(parents=True)
            for k in range(12):
                pixels = chance.integers(0, 90, (24, 24, 3)) + 150 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{k}.png")
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    space: dict[str, object] = {}
    exec(code, space)
    printed = capsys.readouterr().out
    result = space["result"]
    assert "accuracy" in printed.lower()
    assert result.metrics["local.mean"] > 0.9  # type: ignore[attr-defined]
    assert result.config.clients == 3  # type: ignore[attr-defined]


def test_every_command_in_the_readme_is_understood() -> None:
    text = README.replace("\\\n", " ")
    commands = [line.split("#")[0].strip() for line in text.splitlines() if line.startswith("    perfed ")]
    assert len(commands) > 6
    for command in commands:
        words = shlex.split(command)[1:]
        name = words[:2] if words[0] == "data" else words[:1]
        listed = subprocess.run(
            [sys.executable, "-m", "perfed.cli", *name, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for word in words:
            if word.startswith("--"):
                assert word in listed, f"{word} of {command!r} is not an option"


def test_the_pages_are_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
