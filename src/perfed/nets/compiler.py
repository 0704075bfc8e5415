"""C code that is compiled on the machine where it runs, for its very processor, and kept for the next time."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from perfed.errors import ConfigError

REVISION = 6
"""of the arithmetic of all that is compiled: a run that began with another one is not continued"""
FLAGS = ("-xc", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
CURE = "Install a C compiler (on Debian: apt-get install gcc) or name one in CC; a new run may leave kernels out."


def load(source: Path, **constants: int) -> ctypes.CDLL:
    """The library that this source makes with these constants."""
    found = compiler()
    command = [*found, *FLAGS, *(f"-D{name}={value}" for name, value in constants.items())]
    texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    key = sha256("\0".join([*texts, *command, _version(*found), _processor()]).encode())
    library = _cache() / f"{source.stem}-{key.hexdigest()[:24]}.so"
    if library.exists():
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # damaged: it is made again
            library.unlink(missing_ok=True)
    try:
        _compile(command, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        what = f"kernels = 'compiled': no library could be made in {library.parent}: {error}."
        raise ConfigError(what, "Name a directory for it in XDG_CACHE_HOME; a new run may leave kernels out.") from None


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Where a tensor's numbers begin; the tensor must be held by a name for as long as the address is used."""
    return ctypes.c_void_p(tensor.data_ptr())


def single(*tensors: Tensor) -> bool:
    """Whether all are plain single floats on a processor, as they stand in memory, and products of them stay so."""
    return not (torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active()) and all(
        type(tensor) in (Tensor, Parameter)
        and (tensor.dtype, tensor.device.type, tensor.layout) == (torch.float32, "cpu", torch.strided)
        and not tensor.is_neg()
        for tensor in tensors
    )


def once() -> None:
    """Refuse, in a backward pass, to be part of one that is differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Compiled kernels have no second derivative; kernels = 'compiled' has to be left out for it."
        )


class Kept:
    """What a step keeps for going back, where there is no graph to keep it."""

    needs_input_grad: Sequence[bool]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Take the place of autograd's."""
        self.saved_tensors = tensors


def compiler(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The command of a C compiler: CC if it is set, or the first that is there."""
    try:
        given = shlex.split(environment.get("CC", ""))
    except ValueError as error:
        raise ConfigError(f"kernels = 'compiled': CC = {environment['CC']!r} is no command: {error}.", CURE) from None
    for command in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    raise ConfigError(f"kernels = 'compiled' needs a C compiler, and there is no {given[0] if given else 'cc'}.", CURE)


def _compile(command: list[str], source: Path, library: Path) -> None:
    """Write the library whole or not at all: several processes may want it at once."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory, library.name)
        done = subprocess.run(
            [*command, "-o", str(made), str(source), "-lm"],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode or not made.exists():
            lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode} and made nothing"]
            said = next((line for line in lines if "error: " in line and not line.startswith("collect2")), lines[0])
            raise ConfigError(f"kernels = 'compiled': {command[0]} failed: {said}.", CURE)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(library)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perfed"


@cache
def _version(*command: str) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout


@cache
def _processor() -> str:
    """What the processor can do: a cache in a shared home may serve several kinds."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.system()} {platform.machine()} {flags}"
