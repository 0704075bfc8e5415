"""Each client's samples divided into a training, a validation and a test part, class by class."""

from __future__ import annotations

import numpy as np

from perfed.data.partition import Ints


def set_apart(owner: Ints, y: Ints, fraction: float, least: int, rng: np.random.Generator) -> Ints:
    """The samples to set apart from every client's: a fraction of each, in the proportions of its classes.

    Owners of -1 are passed over. A class that a client holds keeps at least one sample. A client with two samples
    or more gives at least `least` (0 or 1), even where that takes the last of a class.
    """
    if fraction <= 0:
        return np.empty(0, np.int64)
    rows = np.flatnonzero(owner >= 0)
    rows = rows[np.lexsort((rng.random(len(rows)), y[rows], owner[rows]))]
    if not len(rows):
        return rows
    who, what = owner[rows], y[rows]
    begins = np.flatnonzero(np.r_[True, (who[1:] != who[:-1]) | (what[1:] != what[:-1])])
    size = np.diff(np.r_[begins, len(rows)])  # samples of one client and class: a cell
    client = who[begins]
    total = np.bincount(client, size).astype(np.int64)

    exact = size * fraction
    take = np.minimum(np.floor(exact + 1e-9).astype(np.int64), size - 1)
    goal = np.floor(total * fraction + 0.5).astype(np.int64)
    short = np.maximum(goal, least) - np.bincount(client, take, len(total)).astype(np.int64)
    # what is missing goes to the cells with the largest remainders that can still give
    spare = size - 1 - take > 0
    order = np.lexsort((rng.random(len(size)), take - exact, ~spare, client))
    first = np.searchsorted(client[order], client[order])
    rank = np.empty(len(size), np.int64)
    rank[order] = np.arange(len(size)) - first
    take += (rank < short[client]) & spare
    if least:
        given = np.bincount(client, take, len(total))
        largest = np.lexsort((-size, client))
        lead = largest[np.r_[True, client[largest][1:] != client[largest][:-1]]]
        take[lead[(given[client[lead]] == 0) & (total[client[lead]] > 1)]] = 1
    place = np.arange(len(rows)) - np.repeat(begins, size)
    return np.sort(rows[place < np.repeat(take, size)])
