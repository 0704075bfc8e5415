"""Sums under encryption: clients seal values, the server adds what it cannot read, clients open the sum.

The scheme is CKKS (Cheon, Kim, Kim, Song: Homomorphic Encryption for Arithmetic of Approximate Numbers. ASIACRYPT 2017)
as TenSEAL has it: polynomials of degree 8192 and a modulus of 120 bits, 60 of them for values, which is well within
128 bits of security (218 bits of modulus at this degree).

- `Keyring` is the clients' side. Its file holds the secret key; who has the file can open every sum.
- `check` and `add` are the server's side. They know the scheme's parameters and no key, neither secret nor public.

CKKS is approximate and its ciphertexts are random. Values are rounded to a grid before they are sealed and after they
are opened, much coarser than the noise, so a sum is exact on the grid and the same in every run. A sealed tensor has
one row per ciphertext, each filled up to the same length: its shape says how many values there are and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfed.errors import ExtraError, StoreError, UpdateError

DEGREE = 8192
MODULUS = (60, 60)
SCALE = 2.0**44
SLOTS = DEGREE // 2
"""values in one ciphertext"""
GRID = 2.0**-24
"""the step that values are rounded to; the noise in a sum of a hundred ciphertexts is below a quarter of it"""
RANGE = 2.0**14
"""sums stay below this: half of what the modulus leaves above the scale"""
FRAME = 2 * DEGREE * 8 + 1024
"""bytes of one ciphertext: two polynomials of 64-bit coefficients and what surrounds them, if nothing is compressed"""
LENGTH = 8


def tenseal() -> Any:
    """The TenSEAL package, which is not installed with this one unless it is asked for."""
    try:
        import tenseal
    except ImportError:
        raise ExtraError(
            "Encryption needs the package tenseal, which is not installed.", "pip install 'perfed[privacy]'"
        ) from None
    return tenseal


def rows(count: int) -> int:
    """How many ciphertexts hold so many values."""
    return -(-count // SLOTS)


def on_grid(values: Tensor) -> Tensor:
    """The nearest multiples of the grid's step, in double precision."""
    return (values.double() / GRID).round() * GRID


# The clients' side


class Keyring:
    """The clients' common secret key, from its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._context = tenseal().context_from(path.read_bytes())
            known = self._context.is_private() and self._context.global_scale == SCALE
        except (OSError, ValueError, RuntimeError, TypeError) as error:
            raise StoreError(f"The key file {path} cannot be read: {error}.", "Restore it from a copy.") from None
        if not known:
            raise StoreError(f"{path} is not a key file of these clients.", "Give one that `Keyring.make` wrote.")

    @staticmethod
    def make(path: Path) -> None:
        """Write a new key, for the owner's eyes only, unless the file is there; the first of several writers wins."""
        context = _fresh_context()
        content = context.serialize(
            save_public_key=True, save_secret_key=True, save_galois_keys=False, save_relin_keys=False
        )
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink(missing_ok=True)

    def seal(self, values: Tensor, summands: int) -> Tensor:
        """Ciphertexts of values that are to be added up with those of at most `summands` - 1 others."""
        flat = on_grid(values.flatten())
        limit = RANGE / summands
        if not bool((flat.abs() <= limit).all()):
            raise UpdateError(f"Values above {limit:g} cannot be sealed for a sum of {summands}.", "Train more gently.")
        full = torch.zeros(rows(len(flat)), SLOTS, dtype=torch.float64)
        full.view(-1)[: len(flat)] = flat
        seal = tenseal().ckks_vector
        return torch.stack([_framed(seal(self._context, row).serialize()) for row in full.numpy()])

    def open(self, sealed: Tensor, count: int) -> Tensor:
        """The first `count` values of a sum."""
        read = tenseal().ckks_vector_from
        try:
            opened = [read(self._context, _bytes(row)).decrypt() for row in sealed]
        except (ValueError, RuntimeError) as error:
            raise UpdateError(f"What was received is not a sum of ciphertexts: {error}.") from None
        return on_grid(torch.from_numpy(np.asarray(opened, dtype=np.float64)).flatten()[:count])


def keyring(path: str) -> Keyring:
    """The keys in this file, made on first use; without a path, those of this user."""
    place = Path(path).expanduser() if path else _home() / "perfed" / "clients.ckks"
    # A process that was forked loads its own copy: the library's threads do not survive a fork.
    return _keyring(place, os.getpid())


@cache
def _keyring(path: Path, process: int) -> Keyring:
    if not path.exists():
        Keyring.make(path)
    return Keyring(path)


def _home() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")


# The server's side


def add(sealed: Sequence[Tensor]) -> Tensor:
    """The sum of sealed tensors, itself sealed."""
    read, context = tenseal().ckks_vector_from, _server_context(os.getpid())
    totals = []
    for row in range(len(sealed[0])):
        total = read(context, _bytes(sealed[0][row]))
        for other in sealed[1:]:
            total += read(context, _bytes(other[row]))
        totals.append(_framed(total.serialize()))
    return torch.stack(totals)


def check(sealed: Tensor, sender: str) -> None:
    """Refuse bytes that are not ciphertexts of this scheme; what is in them nobody here can see."""
    read, context = tenseal().ckks_vector_from, _server_context(os.getpid())
    for row in sealed:
        try:
            size = read(context, _bytes(row)).size()
        except (ValueError, RuntimeError) as error:
            raise UpdateError(f"{sender} sent bytes that are no ciphertext: {error}.") from None
        if size != SLOTS:
            raise UpdateError(f"{sender} sent a ciphertext of {size} values, not of {SLOTS}.")


@cache
def _server_context(process: int) -> Any:
    """The parameters of the scheme. Keys of its own that it comes with are of no use, and the secret one is dropped."""
    context = _fresh_context()
    context.make_context_public()
    return context


def _fresh_context() -> Any:
    ts = tenseal()
    context = ts.context(ts.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(MODULUS), n_threads=1)
    context.global_scale = SCALE
    return context


# Ciphertexts as tensors


def _framed(data: bytes) -> Tensor:
    if len(data) > FRAME - LENGTH:
        raise UpdateError(f"A ciphertext of {len(data)} bytes is longer than {FRAME - LENGTH}.")
    framed = len(data).to_bytes(LENGTH, "little") + data
    return torch.frombuffer(bytearray(framed.ljust(FRAME, b"\0")), dtype=torch.uint8)


def _bytes(frame: Tensor) -> bytes:
    data = frame.numpy().tobytes()
    length = int.from_bytes(data[:LENGTH], "little")
    if length > len(data) - LENGTH:
        raise ValueError(f"its length is given as {length}")
    return data[LENGTH : LENGTH + length]
