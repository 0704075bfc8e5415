"""Partitions: disjoint, complete, never empty, and what their names promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed.data import partition, split
from perfed.data.parts import set_apart
from perfed.errors import SplitError, UnknownNameError

QUICK = settings(max_examples=60, deadline=None)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counts(owner: np.ndarray, y: np.ndarray, clients: int) -> np.ndarray:
    out = np.zeros((clients, int(y.max()) + 1), int)
    np.add.at(out, (owner[owner >= 0], y[owner >= 0]), 1)
    return out


@QUICK
@given(st.integers(1, 20), st.integers(1, 60), st.data())
def test_hands_of_classes_are_distinct_and_even(classes: int, clients: int, data: st.DataObject) -> None:
    each = data.draw(st.integers(1, classes))
    table = partition.deal_classes(classes, clients, each, rng(data.draw(st.integers(0, 99))))
    assert table.shape == (clients, each)
    assert all(len(set(hand)) == each for hand in table.tolist())
    held = np.bincount(table.ravel(), minlength=classes)
    assert held.max() - held.min() <= 1


@QUICK
@given(st.integers(1, 8), st.integers(1, 15), st.data())
def test_classes_per_client(classes: int, clients: int, data: st.DataObject) -> None:
    each = data.draw(st.integers(1, classes))
    y = np.repeat(np.arange(classes), 40)
    y = rng(1).permutation(y)
    if clients * each < classes:
        with pytest.raises(SplitError, match="or write classes"):
            partition.classes_per_client(y, clients, each, rng())
        owner = partition.classes_per_client(y, clients, each, rng(), some=True)
        assert (counts(owner, y, clients).sum(0) > 0).sum() == clients * each
        return
    owner = partition.classes_per_client(y, clients, each, rng())
    table = counts(owner, y, clients)
    assert (owner >= 0).all()
    assert ((table > 0).sum(1) == each).all()
    assert ((table > 0).sum(0) > 0).all()
    for c in range(classes):
        shares = table[table[:, c] > 0, c]
        assert shares.max() - shares.min() <= 1


@QUICK
@given(
    st.sampled_from(["iid", "dirichlet:0.01", "dirichlet:0.3", "dirichlet:100", "lognormal:0", "lognormal:2"]),
    st.integers(1, 40),
    st.integers(80, 400),
    st.integers(0, 5),
)
def test_every_sample_has_one_owner_and_every_client_samples(words: str, clients: int, n: int, seed: int) -> None:
    y = rng(seed).integers(0, 5, n)
    owner = split.parse(words).owners(y, clients, seed, 2)
    assert owner.shape == (n,)
    sizes = np.bincount(owner, minlength=clients)
    assert owner.min() >= 0
    assert len(sizes) == clients
    assert sizes.min() >= 2
    assert np.array_equal(owner, split.parse(words).owners(y, clients, seed, 2))
    if clients > 3:
        assert not np.array_equal(owner, split.parse(words).owners(y, clients, seed + 1, 2))
    if words in ("iid", "lognormal:0"):
        assert sizes.max() - sizes.min() <= 1


def test_dirichlet_is_skewed_by_alpha_and_keeps_ten_samples() -> None:
    y = np.repeat(np.arange(10), 600)
    spread = {}
    for alpha in (0.05, 1.0, 1000.0):
        owner = partition.dirichlet(y, 20, alpha, rng(3))
        table = counts(owner, y, 20)
        assert table.sum(1).min() >= 10
        p = table / table.sum(1, keepdims=True)
        spread[alpha] = float(-(p * np.log(np.maximum(p, 1e-12))).sum(1).mean())
    assert spread[0.05] < 1.0 < spread[1.0] < spread[1000.0]
    assert spread[1000.0] > 2.2  # nearly log 10


def test_dirichlet_that_no_draw_satisfies_is_repaired() -> None:
    """With an alpha this small each class goes to one client: five classes cannot feed thirty clients."""
    y = np.repeat(np.arange(5), 120)
    owner = partition.dirichlet(y, 30, 1e-6, rng())
    assert np.bincount(owner, minlength=30).min() == 10


def test_domains_divide_evenly_or_not_at_all() -> None:
    domain = np.repeat([0, 1, 2], [10, 20, 30])
    owner = partition.domains(domain, 3, 6, rng())
    assert np.bincount(owner).tolist() == [5, 5, 10, 10, 15, 15]
    assert np.array_equal(owner // 2, domain)
    with pytest.raises(SplitError, match="3 clients or a multiple"):
        partition.domains(domain, 3, 4, rng())


def test_published_samples_follow_the_holders_shares() -> None:
    held = np.array([[30, 0, 5], [10, 0, 5], [0, 7, 0]])
    y_test = np.repeat([0, 1, 2], [8, 5, 4])
    owner = partition.published(y_test, held, rng())
    assert counts(owner, y_test, 3).tolist() == [[6, 0, 2], [2, 0, 2], [0, 5, 0]]
    nobody = partition.published(y_test, np.array([[1, 0, 0], [3, 0, 0]]), rng())
    assert counts(nobody, y_test, 2).tolist() == [[2, 0, 0], [6, 0, 0]]
    assert (nobody[8:] == -1).all()


@QUICK
@given(st.integers(1, 12), st.integers(0, 50))
def test_published_leaves_no_client_without_a_sample(clients: int, seed: int) -> None:
    r = rng(seed)
    held = r.integers(0, 3, (clients, 4)) * r.integers(0, 400, (clients, 1)) + (
        r.integers(0, 4, (clients, 1)) == np.arange(4)
    )
    y_test = np.repeat(np.arange(4), clients)
    owner = partition.published(y_test, held, rng(seed))
    table = counts(owner, y_test, clients)
    assert table.sum(1).min() >= 1
    assert (held[table > 0] > 0).all()
    assert np.array_equal(table.sum(0), np.where(held.sum(0) > 0, clients, 0))


def test_published_with_fewer_samples_than_clients_is_refused() -> None:
    with pytest.raises(SplitError, match="no sample left for client"):
        partition.published(np.zeros(3, int), np.ones((4, 1), int), rng())


@QUICK
@given(st.integers(1, 12), st.integers(30, 300), st.floats(0.05, 0.9), st.integers(0, 9))
def test_what_is_set_apart_is_a_stratified_share(clients: int, n: int, fraction: float, seed: int) -> None:
    y, owner = rng(seed).integers(0, 4, n), rng(seed + 1).integers(-1, clients, n)
    rows = set_apart(owner, y, fraction, 1, rng(seed))
    assert len(np.unique(rows)) == len(rows)
    assert (owner[rows] >= 0).all()
    before, apart = counts(owner, y, clients), counts(owner[rows], y[rows], clients) if len(rows) else None
    if apart is None:
        assert before.sum(1).max() < 2
        return
    apart = np.pad(apart, ((0, 0), (0, before.shape[1] - apart.shape[1])))
    many = before.sum(1) >= 2
    assert (apart.sum(1)[many] >= 1).all()
    cells = before.sum(1) >= 2 * before.shape[1]
    assert (np.abs(apart - before * fraction)[cells] < 2).all()
    goal = np.floor(before.sum(1) * fraction + 0.5)
    room = np.maximum(before - 1, 0).sum(1)
    roomy = room >= goal + 4
    assert (apart.sum(1)[roomy] == np.maximum(goal, 1)[roomy]).all()


def test_setting_apart_takes_the_last_of_a_class_only_when_it_must() -> None:
    y, owner = np.array([0, 1, 2, 0]), np.zeros(4, int)
    assert y[set_apart(owner, y, 0.25, 1, rng())].tolist() == [0]
    y = np.array([0, 1])
    assert len(set_apart(np.zeros(2, int), y, 0.25, 1, rng())) == 1
    assert len(set_apart(np.zeros(2, int), y, 0.25, 0, rng())) == 0
    assert len(set_apart(np.zeros(1, int), y[:1], 0.25, 1, rng())) == 0
    assert len(set_apart(owner, np.zeros(4, int), 0.0, 1, rng())) == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("classes:11", "from 1 to 10"),
        ("classes:0", "from 1 to 10"),
        ("dirichlet:0", "above 0"),
        ("dirichlet:-1", "above 0"),
        ("dirichlet:inf", "above 0"),
        ("lognormal:-1", "from 0"),
    ],
)
def test_impossible_values_are_refused(words: str, why: str) -> None:
    with pytest.raises(SplitError, match=why):
        split.parse(words).owners(np.arange(1000) % 10, 5, 0, 1)


@pytest.mark.parametrize(
    "words", ["classes", "classes:two", "classes:2:all", "classes:2:", "dirichlet:", "dirichlet:nan", "iid:3", "file"]
)
def test_misspelt_splits_say_what_to_write(words: str) -> None:
    with pytest.raises(SplitError, match="Write"):
        split.parse(words)


def test_an_unknown_split_suggests_one() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'dirichlet'"):
        split.parse("dirichelt")


@pytest.mark.parametrize("words", ["iid", "dirichlet:1", "lognormal:1"])
def test_more_clients_than_samples_are_refused(words: str) -> None:
    with pytest.raises(SplitError, match="at most 15 clients"):
        split.parse(words).owners(np.zeros(30, int), 16, 0, 2)
    with pytest.raises(SplitError, match="0 clients"):
        split.parse(words).owners(np.zeros(30, int), 0, 0, 2)


def test_a_class_with_too_few_samples_is_named() -> None:
    y = np.array([0] * 50 + [1] * 3)
    with pytest.raises(SplitError, match="Class 1 has 3 samples for the 10 clients"):
        partition.classes_per_client(y, 10, 2, rng())
