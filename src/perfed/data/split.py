"""The words that name a split, such as `classes:2`, and the partition that each stands for."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perfed.data import partition
from perfed.data.draw import generator
from perfed.data.partition import Ints
from perfed.errors import SplitError, unknown

WORDS = {
    "iid": "iid: equal numbers of samples drawn at random",
    "classes": "classes:S: S classes per client, the holders of a class share it equally",
    "dirichlet": "dirichlet:ALPHA: each class divided by Dirichlet proportions",
    "lognormal": "lognormal:SIGMA: samples at random, sizes log-normal",
    "domain": "domain: one domain, folder or source per client",
    "file": "file:PATH: your own CSV file with the columns index, client and optionally part",
}


@dataclass(frozen=True)
class SplitRule:
    """A split string taken apart and checked."""

    word: str
    value: float = 0.0
    some: bool = False
    path: Path | None = None

    def owners(self, y: Ints, clients: int, seed: int, least: int) -> Ints:
        """The owner of each sample; for splits that look at nothing but labels."""
        rng = generator(seed, "split", self.word)
        if self.word == "iid":
            return partition.iid(y, clients, rng, least)
        if self.word == "lognormal":
            return partition.lognormal(y, clients, self.value, rng, least)
        if self.word == "dirichlet":
            return partition.dirichlet(y, clients, self.value, rng, least)
        return partition.classes_per_client(y, clients, int(self.value), rng, self.some)


def parse(split: str) -> SplitRule:
    """Take a split string apart, or refuse it with what would be accepted."""
    word, colon, rest = split.partition(":")
    if word not in WORDS:
        raise unknown("split", split, WORDS)
    if word == "file":
        if not rest:
            raise SplitError("The split 'file' names no file.", "Write file:PATH.")
        return SplitRule(word, path=Path(rest))
    if word in ("iid", "domain"):
        if colon:
            raise SplitError(f"The split {split!r} has a value, and {word} takes none.", f"Write {word}.")
        return SplitRule(word)
    number, _, extra = rest.partition(":")
    some = word == "classes" and extra == "some"
    try:
        value = float(int(number)) if word == "classes" else float(number)
    except ValueError:
        value = float("nan")
    if np.isnan(value) or (extra and not some) or rest.endswith(":"):
        raise SplitError(f"The split {split!r} is not understood.", f"Write {WORDS[word]}.")
    return SplitRule(word, value, some)


@dataclass(frozen=True)
class Assignment:
    """A user's own division: sample numbers, their clients, and their parts if the file says so."""

    index: Ints
    client: Ints
    part: list[str] | None
    names: tuple[str, ...] | None

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return int(self.client.max()) + 1

    def parts(self, samples: int) -> dict[str, Ints]:
        """The owners in each part, when the file names the parts."""
        words = np.array(self.part)
        out = {}
        for part in ("train", "val", "test"):
            out[part] = np.full(samples, -1, np.int64)
            out[part][self.index[words == part]] = self.client[words == part]
        return out


def read_assignment(path: Path, samples: int) -> Assignment:
    """A CSV file with the columns index, client and optionally part (train, val or test), a line per sample.

    The index counts the samples from 0, training set first, then the published test set. Clients are numbers
    from 0 or names. Samples that the file does not list belong to nobody.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise SplitError(f"The assignment file {path} cannot be read: {e}.", "Give a CSV file.") from e
    head = [h.strip() for h in table[0]] if table else []
    if head not in (["index", "client"], ["index", "client", "part"]):
        raise SplitError(
            f"The assignment file {path} begins with {','.join(head)[:80]!r}.",
            "Its first line must be index,client or index,client,part.",
        )
    index, client, part = [], [], []
    seen = np.zeros(samples, bool)
    for line, row in enumerate(table[1:], 2):
        if not row:
            continue
        at = row[0].strip()
        if len(row) != len(head) or not at.isascii() or not at.isdigit() or int(at) >= samples:
            raise SplitError(
                f"Line {line} of {path} is {','.join(row)[:80]!r}.",
                f"It needs {', '.join(head)}, with an index from 0 to {samples - 1}.",
            )
        if seen[int(at)]:
            raise SplitError(f"Line {line} of {path} assigns sample {at} again.", "A sample has one client.")
        seen[int(at)] = True
        index.append(int(at))
        client.append(row[1].strip())
        if len(head) == 3:
            if (word := row[2].strip()) not in ("train", "val", "test"):
                raise SplitError(f"Line {line} of {path} has the part {word[:40]!r}.", "Write train, val or test.")
            part.append(word)
    if not index:
        raise SplitError(f"The assignment file {path} assigns nothing.", "Give one line per sample.")
    numbered = all(c.isascii() and c.isdigit() for c in client)
    names = None if numbered else tuple(sorted(set(client)))
    lookup = {} if names is None else {n: i for i, n in enumerate(names)}
    numbers = [int(c) if names is None else lookup[c] for c in client]
    if max(numbers) >= samples:
        raise SplitError(f"{path} has a client {max(numbers)}.", "Number the clients from 0 without gaps.")
    return Assignment(np.array(index, np.int64), np.array(numbers, np.int64), part if len(head) == 3 else None, names)
