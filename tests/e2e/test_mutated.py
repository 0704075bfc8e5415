"""Damaged run directories: each is refused in a sentence or resumes to the same bits, nothing in between.

PERFED_MUTATIONS sets how many are tried.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from perfed.cli import app
from perfed.config import load
from perfed.engine.store import FILE
from perfed.prepare import prepare

WORDS = [
    "--net",
    "mlp",
    "--set",
    "net.hidden=[6]",
    "--clients",
    "3",
    "--split",
    "iid",
    "--rounds",
    "2",
    "--set",
    "method.head_epochs=1",
]
EACH = 25
PARTS = int(os.environ.get("PERFED_MUTATIONS", "150")) // EACH


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A run that stopped after its first round, and what it gives when it is finished."""
    place = tmp_path_factory.mktemp("half") / "run"
    done = CliRunner().invoke(app, ["run", "--method", "fedrep", *WORDS, "--out", str(place)])
    assert done.exit_code == 0, done.output
    facts = json.loads((place / "result.json").read_text())
    config = load(place / "config.toml")
    for name in (FILE, f"{FILE}-wal", f"{FILE}-shm", "result.json", "curves.png"):
        (place / name).unlink(missing_ok=True)
    prepare(config, directory=place).simulation(place).run(stop_after=1)
    return place, {"state": facts["state_sha256"], "partition": facts["partition_sha256"]}


def mutate(data: bytes, chance: Random) -> bytes:
    changed = bytearray(data)
    match chance.randrange(5):
        case 0:
            for _ in range(chance.choice([1, 2, 20])):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        case 1:
            del changed[chance.randrange(len(changed)) :]
        case 2:
            at = chance.randrange(len(changed))
            changed[at:at] = chance.randbytes(chance.choice([1, 40, 5000]))
        case 3:
            at = chance.randrange(len(changed))
            del changed[at : at + chance.choice([1, 10, 400])]
        case _:
            digits = [i for i, byte in enumerate(changed) if chr(byte).isdigit()]
            for _ in range(min(len(digits), 3)):
                changed[chance.choice(digits)] = ord(chance.choice("0123456789.-e"))
    return bytes(changed)


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_is_refused_or_harmless(part: int, half: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    place, expected = half
    chance, run = Random(part), tmp_path / "run"
    refused = 0
    for number in range(EACH):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(place, run)
        name = chance.choice([FILE, "config.toml"])
        (run / name).write_bytes(mutate((run / name).read_bytes(), chance))
        result = CliRunner().invoke(app, ["resume", str(run), "--json"])
        said = result.output + (result.stderr if result.stderr_bytes else "")
        about = f"mutation {number} of {name}: {said[-600:]}"
        assert result.exit_code in (0, 2), about
        assert "Traceback" not in said, about
        if result.exit_code == 2:
            refused += 1
            assert "error [E" in said, about
            continue
        facts = json.loads((run / "result.json").read_text())
        config = json.loads(result.stdout)["config"]
        same = {"state": facts["state_sha256"], "partition": facts["partition_sha256"]} == expected
        assert same, f"{about}\n{config}"
    assert refused > EACH // 5
