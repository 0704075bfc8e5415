"""From a data set to a federation: partition, parts, shifts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perfed.data import images, partition
from perfed.data.draw import generator
from perfed.data.federation import PARTS, Federation
from perfed.data.partition import Ints
from perfed.data.parts import set_apart
from perfed.data.shift import parse as parse_shift
from perfed.data.source import Source
from perfed.data.sources import load
from perfed.data.split import SplitRule, read_assignment
from perfed.data.split import parse as parse_split
from perfed.errors import ConfigError, SplitError

DEFAULT_CLIENTS = 20


def federate(
    source: Source | str,
    *,
    data_dir: Path | str | None = None,
    clients: int | None = None,
    split: str = "classes:2",
    test: str = "pooled",
    test_fraction: float = 0.25,
    val_fraction: float = 0.1,
    seed: int = 0,
    shift: str | None = None,
    unseen: int = 0,
    external: Source | str | None = None,
    min_size: int | None = None,
    assignment: Path | str | None = None,
) -> Federation:
    """Divide a data set among clients.

    source: a `Source`, or the name of one, read from `data_dir`.
    clients: how many; by default 20, or with the splits `domain` and `file` as many as there are.
    split: `iid`, `classes:S`, `dirichlet:ALPHA`, `lognormal:SIGMA`, `domain` or `file:PATH`.
    test: `pooled` pools training and published test set, partitions both together and sets `test_fraction` of
        every client's samples apart; `published` partitions the training set and deals the published test set
        out by what each client trains on.
    val_fraction: the share of every client's training part that becomes its validation part; 0 for none.
    shift: what sets the clients' images or labels apart, see `perfed.data.shift`.
    unseen: so many clients, the last ones, never train; they join afterwards by adaptation.
    external: another data set to score on; its published test set, or all of it.
    min_size: scale smaller images up to this side.
    assignment: a CSV file, the same as `split="file:PATH"`.
    """
    _check(test, test_fraction, val_fraction, min_size, seed)
    rule = parse_split(f"file:{assignment}" if assignment is not None else split)
    variant = parse_shift(shift)
    held = load(source, data_dir) if isinstance(source, str) else source
    if min_size:
        held = _scaled(held, min_size)
    plan = _Plan(held, rule, test, test_fraction, val_fraction)
    owners, count, names = plan.copied(clients, variant.copies, seed)
    x, y = held.x, plan.y
    if held.x_test is not None:
        x = torch.cat([x, held.x_test])
    if variant.copies > 1:
        x, y = x.repeat(variant.copies, 1, 1, 1), y.repeat(variant.copies)
    if not 0 <= unseen < count:
        raise SplitError(f"{unseen} of {count} clients cannot be unseen.", f"Give a number from 0 to {count - 1}.")
    everyone = np.maximum(np.maximum(owners["train"], owners["val"]), owners["test"])
    x, y = variant.apply(x, y, everyone, classes=held.num_classes, seed=seed, data_dir=data_dir)
    other = None
    if external is not None:
        another = load(external, data_dir) if isinstance(external, str) else external
        other = _fitting(another, held, (x.shape[1], x.shape[2], x.shape[3]))
    return Federation(x, y, owners, count, held.classes, client_names=names, unseen=unseen, external=other)


def _check(test: str, test_fraction: float, val_fraction: float, min_size: int | None, seed: int) -> None:
    if test not in ("pooled", "published"):
        raise ConfigError(f"test = {test!r} is unknown.", "Give 'pooled' or 'published'.")
    if not 0 < test_fraction < 1:
        raise ConfigError(f"test_fraction = {test_fraction} is not a share.", "Give a number between 0 and 1.")
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction = {val_fraction} is not a share.", "Give 0 or a number below 1.")
    if min_size is not None and not 1 <= min_size <= 4096:
        raise ConfigError(f"min_size = {min_size} is no side of an image.", "Give a number of pixels.")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed} is out of range.", "Give a whole number from 0 up.")


def _scaled(source: Source, side: int) -> Source:
    channels, height, width = source.x.shape[1:]
    factor = side / min(height, width)
    if factor <= 1:
        return source
    return source.fitted((channels, max(side, round(height * factor)), max(side, round(width * factor))))


def _fitting(other: Source, own: Source, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    if strange := [name for name in other.classes if name not in own.classes]:
        raise SplitError(
            f"The external data set {other.name!r} has a class {strange[0]!r}, which {own.name!r} has not.",
            f"Give one with classes among {', '.join(own.classes[:20])}.",
        )
    number = torch.tensor([own.classes.index(name) for name in other.classes])
    if other.x_test is not None and other.y_test is not None:
        return images.fit(other.x_test, shape), number[other.y_test]
    return images.fit(other.x, shape), number[other.y]


@dataclass(frozen=True)
class _Plan:
    """How a source is to be divided. Samples are numbered training set first, then published test set."""

    source: Source
    rule: SplitRule
    test: str
    test_fraction: float
    val_fraction: float

    def __post_init__(self) -> None:
        if self.test == "published" and self.source.y_test is None:
            raise SplitError(f"The data set {self.source.name!r} has no published test set.", "Give test = 'pooled'.")

    @property
    def y(self) -> Tensor:
        """The labels of all samples."""
        s = self.source
        return s.y if s.y_test is None else torch.cat([s.y, s.y_test])

    def copied(
        self, clients: int | None, copies: int, seed: int
    ) -> tuple[dict[str, Ints], int, tuple[str, ...] | None]:
        """The owners in each part, how many clients, and their names.

        With copies, the whole data set is divided once for each; client numbers go round the copies.
        """
        if copies == 1:
            return self.divided(clients, seed)
        count = DEFAULT_CLIENTS if clients is None else clients
        if self.rule.word in ("domain", "file") or count % copies:
            raise SplitError(
                f"{count} clients cannot share {copies} whole copies with the split {self.rule.word!r}.",
                f"Give a multiple of {copies} clients, and the split iid, classes, dirichlet or lognormal.",
            )
        found: dict[str, list[Ints]] = {p: [] for p in PARTS}
        for c in range(copies):
            parts, _, _ = self.divided(count // copies, int(generator(seed, "copy", c).integers(2**62)))
            for p in PARTS:
                found[p].append(np.where(parts[p] >= 0, parts[p] * copies + c, -1))
        return {p: np.concatenate(found[p]) for p in PARTS}, count, None

    def divided(self, clients: int | None, seed: int) -> tuple[dict[str, Ints], int, tuple[str, ...] | None]:
        """One division: the owners in each part, how many clients, and their names."""
        labels, n = self.y.numpy(), len(self.source.y)
        listed = len(labels) if self.test == "pooled" else n
        owner = np.full(len(labels), -1, np.int64)
        names: tuple[str, ...] | None = None
        if self.rule.path is not None:
            given = read_assignment(self.rule.path, len(labels))
            if clients not in (None, given.clients):
                raise SplitError(
                    f"{self.rule.path} has {given.clients} clients, not {clients}.",
                    f"Give clients = {given.clients}.",
                )
            if given.part is not None:
                return given.parts(len(labels)), given.clients, given.names
            count, names = given.clients, given.names
            owner[given.index] = given.client
            if owner[listed:].max(initial=-1) >= 0:
                raise SplitError(
                    f"{self.rule.path} assigns samples of the published test set, which is dealt out anyway.",
                    "Leave them out, add a column part, or give test = 'pooled'.",
                )
        elif self.rule.word == "domain":
            owner[:listed], count, names = self._by_domain(listed, clients, seed)
        else:
            count = DEFAULT_CLIENTS if clients is None else clients
            owner[:listed] = self.rule.owners(labels[:listed], count, seed, 2 if self.test == "pooled" else 1)
        parts = self._parts(labels, owner, count, seed)
        if self.rule.word == "classes":
            _all_classes(parts["train"], labels, count, int(self.rule.value))
        return parts, count, names

    def _by_domain(self, listed: int, clients: int | None, seed: int) -> tuple[Ints, int, tuple[str, ...]]:
        s = self.source
        if s.domain is None:
            raise SplitError(
                f"The data set {s.name!r} has no domains.",
                "Give an image folder with one folder per client, or several data sets joined by '+'.",
            )
        domain = s.domain.numpy()
        if listed > len(domain):
            if s.domain_test is None:
                raise SplitError(f"The published test set of {s.name!r} has no domains.", "Give test = 'published'.")
            domain = np.concatenate([domain, s.domain_test.numpy()])
        known = s.domain_names
        count = len(known) if clients is None else clients
        owner = partition.domains(domain, len(known), count, generator(seed, "split", "domain"))
        share = count // len(known)
        return owner, count, tuple(f"{d}/{k}" if share > 1 else d for d in known for k in range(share))

    def _parts(self, labels: Ints, owner: Ints, clients: int, seed: int) -> dict[str, Ints]:
        train, val, test = owner.copy(), np.full_like(owner, -1), np.full_like(owner, -1)
        if self.test == "pooled":
            rows = set_apart(owner, labels, self.test_fraction, 1, generator(seed, "test"))
            test[rows] = owner[rows]
            train[rows] = -1
        else:
            n = len(self.source.y)
            test[n:] = self._dealt(labels, owner[:n], clients, seed)
        least = 0 if self.rule.word == "classes" else 1  # a client of S classes trains on all of them
        rows = set_apart(train, labels, self.val_fraction, least, generator(seed, "val"))
        val[rows] = train[rows]
        train[rows] = -1
        return {"train": train, "val": val, "test": test}

    def _dealt(self, labels: Ints, owner: Ints, clients: int, seed: int) -> Ints:
        """The owners of the published test set."""
        classes = self.source.num_classes
        mine = owner >= 0
        flat = np.bincount(owner[mine] * classes + labels[: len(owner)][mine], minlength=clients * classes)
        held = flat.reshape(clients, classes).astype(np.int64)
        y_test = labels[len(owner) :]
        if self.rule.word != "domain" or self.source.domain_test is None:
            return partition.published(y_test, held, generator(seed, "test"))
        out = np.full(len(y_test), -1, np.int64)
        domain = self.source.domain_test.numpy()
        share = clients // len(self.source.domain_names)
        for d in range(len(self.source.domain_names)):
            rows = np.flatnonzero(domain == d)
            own = held[d * share : (d + 1) * share]
            got = partition.published(y_test[rows], own, generator(seed, "test", d))
            out[rows] = np.where(got >= 0, got + d * share, -1)
        return out


def _all_classes(train: Ints, labels: Ints, clients: int, each: int) -> None:
    mine, top = train >= 0, int(labels.max()) + 1
    held = np.bincount(np.unique(train[mine] * top + labels[mine]) // top, minlength=clients)
    if len(wrong := np.flatnonzero(held != each)):
        raise SplitError(
            f"Client {wrong[0]} has too few samples to train on {each} classes and to be tested.",
            "Give fewer clients or fewer classes per client.",
        )
