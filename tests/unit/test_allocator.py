"""What is freed is kept, in perfed's programs and nowhere else, and no result depends on it."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys

import pytest

from perfed import allocator

FAULTS = """
import ctypes, resource
from perfed import allocator
if {kept}:
    allocator.keep()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
library.prctl(41, 1, 0, 0, 0)  # small pages for this process: it counts them
def step():
    held = [library.malloc(4 << 20) for _ in range(8)]
    for place in held:
        ctypes.memset(place, 1, 4 << 20)
    while held:
        library.free(held.pop())
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * (32 << 20) // mmap.PAGESIZE


def of_a_program(code: str, **environment: str) -> str:
    given = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")
    cleared = {name: text for name, text in os.environ.items() if not name.startswith(given)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=cleared | environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's")
def test_memory_that_is_freed_is_not_cleared_anew() -> None:
    assert int(of_a_program(FAULTS.format(kept=True))) < PAGES / 100
    said = {"MALLOC_TRIM_THRESHOLD_": "1000000", "THP_MEM_ALLOC_ENABLE": "0"}
    assert int(of_a_program(FAULTS.format(kept=True), **said)) > PAGES / 2, "what the environment says stays"
    allocator.keep(given := dict(said))
    assert given == said


def test_programs_keep_memory_before_torch_is_loaded() -> None:
    code = "import sys; from perfed import allocator; allocator.keep = lambda: sys.exit('torch' in sys.modules or 7)\n"
    for program in ("perfed.cli", "perfed.gridrun"):
        command = [sys.executable, "-c", f"{code}import {program} as program; program.main()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # gridrun ends with its standard input
            assert process.wait(60) == 7, program


def test_results_do_not_depend_on_it() -> None:
    code = """
from perfed import allocator
allocator.keep()
import perfed
print(perfed.run("fedavg", net="cifarnet", rounds=1, clients=5).state_sha256)
"""
    plain = of_a_program(code, THP_MEM_ALLOC_ENABLE="0", MALLOC_TRIM_THRESHOLD_="0")
    assert len(plain) > 64
    assert of_a_program(code) == plain
