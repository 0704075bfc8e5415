"""On Flower's simulated nodes every method ends with the bits of a run in one process.

Ray listens on every interface of the machine, so it is started in a network namespace that has none but loopback.
`PERFED_FLOWER=all` tries every method; otherwise a few of different kinds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.contract.rows import ROWS
from tests.e2e.namespace import in_a_namespace

ROOT = Path(__file__).parents[2]
FEW = ["fedrep", "cd2pfed", "fedfomo", "scaffold", "fedavg+ft"]


def test_simulated_nodes_end_with_the_same_bits() -> None:
    names = list(ROWS) if os.environ.get("PERFED_FLOWER") == "all" else FEW
    command = in_a_namespace(sys.executable, "-m", "tests.e2e.simulated", *names)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == names
    for name, sums in found.items():
        assert sums["faults"] == [], name
        assert sums["flower"] == sums["local"], name
        assert sums["metrics"], name
