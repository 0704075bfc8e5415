"""The server as its method sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from perfed.core import rng
from perfed.core.plan import Plan, Round
from perfed.core.state import State


@dataclass(frozen=True)
class Peer:
    """A client as the server knows it: its number, and the last round it took part in (0: none)."""

    id: int
    since: int = 0
    learns: bool = True
    """whether it is about to train or to join; otherwise it is only scored, and needs what it predicts with"""


class Slots:
    """What the server remembers about single clients, read one at a time from wherever it is stored."""

    def __init__(
        self, read: Callable[[int], State] | None = None, known: Callable[[], list[int]] | None = None
    ) -> None:
        self._read = read or (lambda _: {})
        self._known = known or (lambda: [])
        self.written: dict[int, State] = {}

    def __getitem__(self, client: int) -> State:
        return self.written[client] if client in self.written else self._read(client)

    def __setitem__(self, client: int, state: State) -> None:
        self.written[client] = dict(state)

    def known(self) -> list[int]:
        """The clients about which something is remembered, in client order."""
        return sorted(set(self._known()) | set(self.written))


@dataclass
class Server:
    """The server's named tensors, its memory of single clients, and the method's plan."""

    state: State
    plan: Plan
    num_clients: int
    seed: int = 0
    slots: Slots = field(default_factory=Slots)
    unseen: int = 0
    """how many of the clients never take part"""

    @property
    def participants(self) -> int:
        """How many clients may be asked to take part."""
        return self.num_clients - self.unseen

    def generator(self, purpose: str, round: Round) -> torch.Generator:
        """Random numbers for one purpose of the server in a round."""
        return rng.generator(self.seed, f"server/{purpose}", round.t)
