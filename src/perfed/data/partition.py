"""How samples are divided among clients.

Every function returns the owner of each sample, an int64 array with a client number or -1 for a sample that
no client gets. Work and memory grow with samples + clients * classes, so 100,000 clients are nothing special.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from perfed.errors import SplitError

Ints = npt.NDArray[np.int64]

DRAWS = 20_000_000  # random numbers that redrawing a Dirichlet partition may cost at most
FLOOR = 10  # samples that the smallest client of a Dirichlet partition should have


def apportion(total: int, weights: npt.NDArray[np.float64], rng: np.random.Generator) -> Ints:
    """Whole numbers that add up to total, in proportion to the weights: largest remainders, ties by lot."""
    scale = weights.sum()
    if total == 0 or scale <= 0:
        return np.zeros(len(weights), np.int64)
    exact = weights * (total / scale)
    whole: Ints = np.floor(exact + 1e-9).astype(np.int64)
    short = total - int(whole.sum())
    if short > 0:
        order = np.lexsort((rng.random(len(weights)), whole - exact))
        whole[order[:short]] += 1
    return whole


def _need(samples: int, clients: int, least: int) -> None:
    if clients < 1:
        raise SplitError(f"The data cannot be divided among {clients} clients.", "Give at least 1.")
    if samples < clients * least:
        raise SplitError(
            f"{samples} samples are too few for {clients} clients of at least {least} each.",
            f"Give at most {samples // least} clients, or more data.",
        )


def iid(y: Ints, clients: int, rng: np.random.Generator, least: int = 1) -> Ints:
    """Equal numbers of samples drawn at random."""
    _need(len(y), clients, least)
    owner = np.empty(len(y), np.int64)
    owner[rng.permutation(len(y))] = np.arange(len(y)) % clients
    return owner


def lognormal(y: Ints, clients: int, sigma: float, rng: np.random.Generator, least: int = 1) -> Ints:
    """Samples drawn at random, in numbers that follow a log-normal distribution, at least `least` each."""
    _need(len(y), clients, least)
    if not 0 <= sigma < 100:
        raise SplitError(f"lognormal:{sigma:g} has no such spread.", "Give a sigma from 0 (equal sizes) up, such as 1.")
    weights = np.exp(sigma * rng.standard_normal(clients))
    sizes = least + apportion(len(y) - clients * least, weights, rng)
    owner = np.empty(len(y), np.int64)
    owner[rng.permutation(len(y))] = np.repeat(np.arange(clients), sizes)
    return owner


def deal_classes(classes: int, clients: int, each: int, rng: np.random.Generator) -> Ints:
    """A (clients, each) table of distinct classes per client, every class held equally often (+- 1).

    Shuffled packs of all classes are laid end to end and dealt `each` at a time. Where a hand spans two
    packs, the second begins with classes that the hand does not have yet.
    """
    packs, last = [], np.empty(0, np.int64)
    dealt = 0
    while dealt < clients * each:
        begun = last[len(last) - dealt % each :] if dealt % each else last[:0]
        missing = each - len(begun) if len(begun) else 0
        pack = rng.permutation(classes)
        if missing:
            fresh = pack[~np.isin(pack, begun)][:missing]
            pack = np.concatenate([fresh, pack[~np.isin(pack, fresh)]])
        packs.append(pack)
        last = np.concatenate([begun, pack])
        dealt += classes
    table = np.concatenate(packs)[: clients * each].reshape(clients, each)
    return table[rng.permutation(clients)].astype(np.int64)


def classes_per_client(y: Ints, clients: int, each: int, rng: np.random.Generator, some: bool = False) -> Ints:
    """Exactly `each` classes for every client; the holders of a class share its samples equally.

    Every class is used, unless `some` is set and the clients are too few to hold them all: then the classes
    that nobody holds are left out.
    """
    _need(len(y), clients, 1)
    held = np.unique(y)
    if not 1 <= each <= len(held):
        raise SplitError(
            f"classes:{each} cannot be dealt: the data has {len(held)} classes with samples.",
            f"Give a number from 1 to {len(held)}.",
        )
    if clients * each < len(held) and not some:
        raise SplitError(
            f"{clients} clients with {each} classes each can hold {clients * each} of {len(held)} classes.",
            f"Give classes:{-(-len(held) // clients)} or {-(-len(held) // each)} clients, "
            f"or write classes:{each}:some to leave the other classes out.",
        )
    table = deal_classes(len(held), clients, each, rng)
    holder_class = table.ravel()
    holder = np.repeat(np.arange(clients), each)
    order = np.lexsort((rng.random(len(holder)), holder_class))
    starts = np.searchsorted(holder_class[order], np.arange(len(held) + 1))
    owner = np.full(len(y), -1, np.int64)
    for c, label in enumerate(held):
        holders = holder[order[starts[c] : starts[c + 1]]]
        mine = rng.permutation(np.flatnonzero(y == label))
        if len(mine) < len(holders):
            raise SplitError(
                f"Class {label} has {len(mine)} samples for the {len(holders)} clients that should hold it.",
                "Give fewer clients or fewer classes per client.",
            )
        if len(holders):
            owner[mine] = holders[np.arange(len(mine)) % len(holders)]
    return owner


def dirichlet(y: Ints, clients: int, alpha: float, rng: np.random.Generator, least: int = 1) -> Ints:
    """Each class divided by proportions from Dirichlet(alpha); a client with its fair share gets no more.

    Redrawn until the smallest client has 10 samples (fewer if there are too few for that). When no draw does,
    the last one is repaired: the largest clients give samples to those below the floor.
    """
    _need(len(y), clients, least)
    if not 0 < alpha < 1e9:
        raise SplitError(f"dirichlet:{alpha:g} is no Dirichlet distribution.", "Give an alpha above 0, such as 0.1.")
    floor = max(least, min(FLOOR, len(y) // clients // 2))
    members = [np.flatnonzero(y == c) for c in np.unique(y)]
    owner = np.empty(len(y), np.int64)
    for _ in range(max(1, min(300, DRAWS // (clients * len(members))))):
        sizes = np.zeros(clients, np.int64)
        for mine in members:
            below = sizes < len(y) / clients
            p = rng.dirichlet(np.full(clients, alpha)) * below
            if not p.sum() > 0:  # all of the class fell to clients that have their share
                p[below] = rng.dirichlet(np.full(int(below.sum()), alpha))
            cuts = np.floor(np.cumsum(p / p.sum()) * len(mine) + 1e-9).astype(np.int64)
            cuts[-1] = len(mine)
            counts = np.diff(cuts, prepend=0)
            owner[rng.permutation(mine)] = np.repeat(np.arange(clients), counts)
            sizes += counts
        if sizes.min() >= floor:
            return owner
    return _raised(owner, sizes, floor, rng)


def _raised(owner: Ints, sizes: Ints, floor: int, rng: np.random.Generator) -> Ints:
    """Samples of the largest clients moved to those that have fewer than floor."""
    order = np.lexsort((rng.random(len(owner)), owner))
    starts = np.searchsorted(owner[order], np.arange(len(sizes) + 1))
    heap = [(-int(n), i) for i, n in enumerate(sizes) if n > floor]
    heapq.heapify(heap)
    owner = owner.copy()
    for poor in np.flatnonzero(sizes < floor):
        for _ in range(floor - int(sizes[poor])):
            n, rich = heapq.heappop(heap)
            owner[order[starts[rich] - n - 1]] = poor
            if -n - 1 > floor:
                heapq.heappush(heap, (n + 1, rich))
    return owner


def domains(domain: Ints, number: int, clients: int, rng: np.random.Generator) -> Ints:
    """One domain per client; with clients = m * domains, each domain is dealt at random to m clients."""
    if clients % number:
        raise SplitError(
            f"{clients} clients cannot share {number} domains evenly.",
            f"Give {number} clients or a multiple of it.",
        )
    share = clients // number
    owner = np.empty(len(domain), np.int64)
    for d in range(number):
        mine = rng.permutation(np.flatnonzero(domain == d))
        owner[mine] = d * share + np.arange(len(mine)) % share
    return owner


def published(y_test: Ints, held: Ints, rng: np.random.Generator) -> Ints:
    """Owners of the published test samples: a class is shared in proportion to what its holders train on.

    `held` is the (clients, classes) matrix of training samples. Every client gets at least one sample, if
    need be from the client that has the most of one of its classes.
    """
    clients, classes = held.shape
    owner = np.full(len(y_test), -1, np.int64)
    got = np.zeros_like(held)
    rows: list[Ints] = []
    for c in range(classes):
        mine = rng.permutation(np.flatnonzero(y_test == c))
        got[:, c] = apportion(len(mine), held[:, c].astype(np.float64), rng)
        if held[:, c].any():
            owner[mine] = np.repeat(np.arange(clients), got[:, c])
        rows.append(mine)
    if len(without := np.flatnonzero(got.sum(1) == 0)):
        _one_each(without, owner, held, got, rows)
    return owner


def _one_each(without: Ints, owner: Ints, held: Ints, got: Ints, rows: list[Ints]) -> None:
    """One sample for each client without any, from whoever has the most of a class that it holds."""
    starts = np.cumsum(got, axis=0) - got
    total = got.sum(1)
    heaps: dict[int, list[tuple[int, int]]] = {}
    for poor in without.tolist():
        best: tuple[int, int, int] | None = None
        for c in np.flatnonzero(held[poor]).tolist():
            if c not in heaps:
                heaps[c] = [(-int(got[i, c]), i) for i in np.flatnonzero(got[:, c]).tolist()]
                heapq.heapify(heaps[c])
            heap = heaps[c]
            while heap and (-heap[0][0] != got[heap[0][1], c] or total[heap[0][1]] < 2):
                _, i = heapq.heappop(heap)
                if got[i, c] and total[i] > 1:
                    heapq.heappush(heap, (-int(got[i, c]), i))
            if heap and (best is None or heap[0][0] < best[0]):
                best = (*heap[0], c)
        if best is None:
            raise SplitError(
                f"The published test set has no sample left for client {poor}.",
                "Give fewer clients, or test = 'pooled'.",
            )
        _, giver, c = best
        got[giver, c] -= 1
        total[giver] -= 1
        owner[rows[c][starts[giver, c] + got[giver, c]]] = poor
