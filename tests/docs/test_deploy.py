"""docs/deploy.md, followed to the letter on one machine: only the port is another, and there are fewer rounds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from perfed.flower.deployment import free_port
from tests.e2e.cluster import descendants

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_three_sites_get_a_personal_model_each(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "deploy.md").read_text())
    images = [text for kind, text in blocks if kind == "python"]
    script = "".join(text for kind, text in blocks if kind == "sh")
    assert len(images) == 1
    assert script.count("--rounds 10") == 1
    script = script.replace("8100", str(free_port())).replace("--rounds 10", "--rounds 2")
    subprocess.run([sys.executable, "-c", images[0]], cwd=tmp_path, check=True)
    (tmp_path / "bin").mkdir()
    perfed = tmp_path / "bin" / "perfed"
    perfed.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m perfed.cli "$@"\n')
    perfed.chmod(0o755)
    path = os.pathsep.join([str(perfed.parent), os.environ.get("PATH", os.defpath)])
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            ["bash", "-e", "-x", "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(1500)
    finally:
        for pid in [*descendants(process.pid), process.pid] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
    told = (tmp_path / "said").read_text()
    logs = "\n".join(log.read_text()[-1500:] for log in sorted(tmp_path.glob("*.log")))
    assert code == 0, f"{told[-3000:]}\n{logs}"
    for name, digit in (("anna", "0"), ("berta", "3"), ("carla", "7")):
        lines = re.findall(rf"^images/{name}/{digit}/\d+\.png\t(\d)\t[01]\.\d+$", told, re.MULTILINE)
        assert len(lines) == len(list((tmp_path / "images" / name / digit).iterdir())), told[-3000:]
