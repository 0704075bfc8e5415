"""From a data set to a federation: partition, parts, shifts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perfed.data import images, partition, shift as shifts, split as splits
from perfed.data.draw import generator
from perfed.data.federation import PARTS, Federation
from perfed.data.partition import Ints
from perfed.data.parts import set_apart
from perfed.data.source import Source
from perfed.data.sources import load
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
    test: `pooled` pools training and published test set, partitions both together and sets `test_fraction` of every
        client's samples apart; `published` partitions the training set and deals the published test set out by
        what each client trains on.
    val_fraction: the share of every client's training part that becomes its validation part; 0 for none.
    shift: what sets the clients' images or labels apart, see `perfed.data.shift`.
    unseen: so many clients, the last ones, never train; they join afterwards by adaptation.
    external: another data set to score on; its published test set, or all of it.
    min_size: scale smaller images up to this side.
    assignment: a CSV file, the same as `split="file:PATH"`.
    """
    _check(test, test_fraction, val_fraction, min_size, seed)
    rule = splits.parse(f"file:{assignment}" if assignment is not None else split)
    variant = shifts.parse(shift)
    held = load(source, data_dir) if isinstance(source, str) else source
    if min_size:
        held = _scaled(held, min_size)
    n_train = len(held.y)
    x, y = held.x, held.y
    if held.x_test is not None and held.y_test is not None:
        x, y = torch.cat([x, held.x_test]), torch.cat([y, held.y_test])
    elif test == "published":
        raise SplitError(f"The data set {held.name!r} has no published test set.", "Give test = 'pooled'.")

    least = 2 if test == "pooled" else 1
    names: tuple[str, ...] | None = None
    copies = variant.copies
    if copies > 1:
        owners, count = _copies(
            held, y, n_train, rule, clients, copies, test, test_fraction, val_fraction, seed
        )
        x, y = x.repeat(copies, 1, 1, 1), y.repeat(copies)
    else:
        owner, named, count, names = _owners(held, y, n_train, rule, clients, test, seed, least)
        owners = named or _parts(
            held, y.numpy(), owner, n_train, rule, count, test, test_fraction, val_fraction, seed
        )
    if rule.word == "classes":
        _check_classes(owners["train"], y.numpy(), count, int(rule.value))
    if not 0 <= unseen < count:
        raise SplitError(
            f"{unseen} of {count} clients cannot be unseen.", f"Give a number from 0 to {count - 1}."
        )
    everyone = np.maximum(np.maximum(owners["train"], owners["val"]), owners["test"])
    x, y = variant.apply(x, y, everyone, count, held.num_classes, seed, data_dir)
    shape = (x.shape[1], x.shape[2], x.shape[3])
    return Federation(
        x,
        y,
        owners,
        count,
        held.classes,
        client_names=names,
        unseen=unseen,
        external=_external(external, data_dir, held, shape, x.dtype),
    )


def _check(test: str, test_fraction: float, val_fraction: float, min_size: int | None, seed: int) -> None:
    if test not in ("pooled", "published"):
        raise ConfigError(f"test = {test!r} is unknown.", "Give 'pooled' or 'published'.")
    if not 0 < test_fraction < 1:
        raise ConfigError(
            f"test_fraction = {test_fraction} is not a share.", "Give a number between 0 and 1."
        )
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


def _owners(
    source: Source,
    y: Tensor,
    n_train: int,
    rule: splits.SplitRule,
    clients: int | None,
    test: str,
    seed: int,
    least: int,
) -> tuple[Ints, dict[str, Ints] | None, int, tuple[str, ...] | None]:
    """The owner of every sample, the parts if the user's file names them, how many clients, and their names."""
    n = len(y) if test == "pooled" else n_train
    labels = y.numpy()[:n]
    owner = np.full(len(y), -1, np.int64)
    if rule.path is not None:
        return _from_file(rule.path, len(y), n, clients)
    if rule.word != "domain":
        count = DEFAULT_CLIENTS if clients is None else clients
        owner[:n] = rule.owners(labels, count, seed, least)
        return owner, None, count, None
    if source.domain is None:
        raise SplitError(
            f"The data set {source.name!r} has no domains.",
            "Give an image folder with one folder per client, or several data sets joined by '+'.",
        )
    count = len(source.domain_names) if clients is None else clients
    domain = source.domain.numpy()
    if n > n_train:
        if source.domain_test is None:
            raise SplitError(f"The published test set of {source.name!r} has no domains.")
        domain = np.concatenate([domain, source.domain_test.numpy()])
    rng = generator(seed, "split", "domain")
    owner[:n] = partition.domains(domain, len(source.domain_names), count, rng)
    share = count // len(source.domain_names)
    names = tuple(f"{d}/{k}" if share > 1 else d for d in source.domain_names for k in range(share))
    return owner, None, count, names


def _from_file(
    path: Path, samples: int, listed: int, clients: int | None
) -> tuple[Ints, dict[str, Ints] | None, int, tuple[str, ...] | None]:
    given = splits.read_assignment(path, samples)
    if clients is not None and clients != given.clients:
        raise SplitError(
            f"{path} has {given.clients} clients, not {clients}.", f"Give clients = {given.clients}."
        )
    owner = np.full(samples, -1, np.int64)
    owner[given.index] = given.client
    if given.part is None:
        if owner[listed:].max(initial=-1) >= 0:
            raise SplitError(
                f"{path} assigns samples of the published test set, which test = 'published' deals out itself.",
                "Leave them out, add a column part, or give test = 'pooled'.",
            )
        return owner, None, given.clients, given.names
    parts = {p: np.full(samples, -1, np.int64) for p in PARTS}
    words = np.array(given.part)
    for p in PARTS:
        chosen = words == p
        parts[p][given.index[chosen]] = given.client[chosen]
    return owner, parts, given.clients, given.names


def _parts(
    source: Source, labels: Ints, owner: Ints, n_train: int, rule: splits.SplitRule, clients: int, test: str,
    test_fraction: float, val_fraction: float, seed: int,
) -> dict[str, Ints]:  # fmt: skip
    train, val, tested = owner.copy(), np.full_like(owner, -1), np.full_like(owner, -1)
    if test == "pooled":
        rows = set_apart(owner, labels, test_fraction, 1, generator(seed, "test"))
        tested[rows] = owner[rows]
        train[rows] = -1
    else:
        tested[n_train:] = _dealt(source, labels, owner, n_train, rule, clients, seed)
    rows = set_apart(train, labels, val_fraction, 1 if rule.word != "classes" else 0, generator(seed, "val"))
    val[rows] = train[rows]
    train[rows] = -1
    return {"train": train, "val": val, "test": tested}


def _dealt(
    source: Source, labels: Ints, owner: Ints, n_train: int, rule: splits.SplitRule, clients: int, seed: int
) -> Ints:
    """The owners of the published test set."""
    k = source.num_classes
    mine = owner[:n_train] >= 0
    flat = np.bincount(owner[:n_train][mine] * k + labels[:n_train][mine], minlength=clients * k)
    held = flat.reshape(clients, k).astype(np.int64)
    y_test = labels[n_train:]
    if rule.word != "domain" or source.domain_test is None:
        return partition.published(y_test, held, generator(seed, "test"))
    out = np.full(len(y_test), -1, np.int64)
    domain = source.domain_test.numpy()
    share = clients // len(source.domain_names)
    for d in range(len(source.domain_names)):
        rows = np.flatnonzero(domain == d)
        got = partition.published(y_test[rows], held[d * share : (d + 1) * share], generator(seed, "test", d))
        out[rows] = np.where(got >= 0, got + d * share, -1)
    return out


def _copies(
    source: Source, y: Tensor, n_train: int, rule: splits.SplitRule, clients: int | None, copies: int, test: str,
    test_fraction: float, val_fraction: float, seed: int,
) -> tuple[dict[str, Ints], int]:  # fmt: skip
    """Owners when the whole data set is divided once for each variant; client numbers alternate between variants."""
    count = DEFAULT_CLIENTS if clients is None else clients
    if rule.word in ("domain", "file") or count % copies:
        raise SplitError(
            f"{count} clients cannot each hold a share of {copies} whole copies with split {rule.word!r}.",
            f"Give a multiple of {copies} clients and the split iid, classes, dirichlet or lognormal.",
        )
    found: dict[str, list[Ints]] = {p: [] for p in PARTS}
    for c in range(copies):
        mixed = int(generator(seed, "copy", c).integers(2**62))
        least = 2 if test == "pooled" else 1
        owner, _, own, _ = _owners(source, y, n_train, rule, count // copies, test, mixed, least)
        parts = _parts(source, y.numpy(), owner, n_train, rule, own, test, test_fraction, val_fraction, mixed)
        for p in PARTS:
            found[p].append(np.where(parts[p] >= 0, parts[p] * copies + c, -1))
    return {p: np.concatenate(found[p]) for p in PARTS}, count


def _check_classes(train: Ints, labels: Ints, clients: int, each: int) -> None:
    mine = train >= 0
    cells = np.unique(train[mine] * (int(labels.max()) + 1) + labels[mine])
    held = np.bincount(cells // (int(labels.max()) + 1), minlength=clients)
    if len(wrong := np.flatnonzero(held != each)):
        raise SplitError(
            f"Client {wrong[0]} has too few samples to train on {each} classes and to be tested.",
            "Give fewer clients or fewer classes per client.",
        )


def _external(
    external: Source | str | None,
    data_dir: Path | str | None,
    own: Source,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:
    if external is None:
        return None
    other = load(external, data_dir) if isinstance(external, str) else external
    if other.num_classes > own.num_classes:
        raise SplitError(
            f"The external data set {other.name!r} has {other.num_classes} classes, {own.name!r} {own.num_classes}.",
            "Give one with the same classes.",
        )
    x, y = (
        (other.x, other.y) if other.x_test is None or other.y_test is None else (other.x_test, other.y_test)
    )
    return images.fit(x, shape), y
