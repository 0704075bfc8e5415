"""Whether torch can compute in bfloat16 on this machine without being killed by the processor.

Some virtual machines tell of Intel's matrix unit (AMX) and hide how its tiles are laid out. torch's products then set
up no tile, and the first instruction on one ends the process (SIGILL): there is no exception to catch. So a process of
its own tries it first.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from perfed.errors import ConfigError

LIMIT = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
"""what keeps torch from the matrix unit, set before Python starts"""
TRIAL = """
import torch
torch.set_num_threads(1)
a = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(a, a) @ a
"""
CPUINFO = Path("/proc/cpuinfo")


def demand() -> None:
    """Refuse bfloat16 where it would end the process."""
    if not works():
        raise ConfigError(
            "precision = 'bfloat16': this machine tells of a matrix unit (AMX) that torch's products cannot use, and"
            " would end the process.",
            f"Set {LIMIT} in the environment, or leave precision out.",
        )


@cache
def works(trial: str = TRIAL) -> bool:
    """Whether the processor lets products in bfloat16 pass; only where there is a matrix unit is a process started."""
    if not (CPUINFO.exists() and "amx_bf16" in CPUINFO.read_text()):
        return True
    return subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode != -signal.SIGILL
