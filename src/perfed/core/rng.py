"""Randomness that depends on who asks for it and on nothing else.

Every random number of a run comes from (seed, purpose, round, client), so the order in which clients are
computed, the number of workers and an interruption cannot change it.
"""

from __future__ import annotations

from hashlib import blake2b

import torch


def derive(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A 63-bit integer seed for one purpose, round and client."""
    key = f"{seed}\x1f{purpose}\x1f{round}\x1f{client}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """A torch generator for one purpose, round and client."""
    return torch.Generator().manual_seed(derive(seed, purpose, round, client))


def seed_torch(seed: int) -> None:
    """Seed torch's own generator, as `torch.manual_seed` does on a machine without accelerators, but faster.

    The latter writes down the caller's stack for every kind of device that might be used later.
    """
    torch.default_generator.manual_seed(seed)


def sample(seed: int, round: int, population: range | tuple[int, ...], fraction: float) -> list[int]:
    """The clients that take part in a round, in client order; at least one."""
    count = min(len(population), max(1, round_half_up(fraction * len(population))))
    if count == len(population):
        return sorted(population)
    drawn = torch.empty(0, dtype=torch.int64)
    source = generator(seed, "cohort", round)
    while len(drawn) < count:  # cost follows the participants: no permutation of all clients
        more = torch.randint(len(population), (2 * count,), generator=source)
        drawn = torch.cat([drawn, more])
        _, first = _unique_in_order(drawn)
        drawn = drawn[first]
    return sorted(population[int(i)] for i in drawn[:count])


def round_half_up(value: float) -> int:
    """The nearest integer; a half goes up, so that 0.5 of 5 clients is 3 on every platform."""
    return int(value + 0.5)


def _unique_in_order(values: torch.Tensor) -> tuple[list[int], list[int]]:
    seen: dict[int, int] = {}
    for position, value in enumerate(values.tolist()):
        seen.setdefault(value, position)
    return list(seen), list(seen.values())
