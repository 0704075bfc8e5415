"""States: selections, bytes, sums and checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed.core.combine import merge, weighted_mean
from perfed.core.rng import derive, round_half_up, sample
from perfed.core.state import (
    State,
    check,
    complement,
    digest,
    from_bytes,
    put,
    serialised_bytes,
    take,
    to_bytes,
    under,
    union,
    within,
)
from perfed.errors import StoreError, UpdateError

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
names = st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__" and n.isprintable())


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(max(1, torch.Size(shape).numel())) % 7)[: torch.Size(shape).numel()].view(shape).to(dtype)


states = st.dictionaries(names, st.builds(tensor, shapes, dtypes), max_size=5)


@given(states)
@settings(deadline=None, max_examples=60)
def test_bytes_come_back_as_the_same_state(state: State) -> None:
    again, scalars = from_bytes(to_bytes(state, {"a": 1, "b": [True, None, "x"]}))
    assert scalars == {"a": 1, "b": [True, None, "x"]}
    assert digest(again) == digest(state)
    assert serialised_bytes(state) == (len(to_bytes(state)) if state else 0)


def test_tensors_that_share_memory_are_written_each_for_itself() -> None:
    whole = torch.arange(6.0).view(2, 3)
    state = {"sent": whole, "kept/sent": whole, "row": whole[1], "turned": whole.t()}
    again, _ = from_bytes(to_bytes(state))
    assert digest(again) == digest(state)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        from_bytes(data + b"\xff")


def test_a_digest_sees_names_types_shapes_and_bits() -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    others = [
        {"a": torch.zeros(2, 3), "c": torch.ones(1)},
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3), "b": torch.ones(1) + 1e-7},
        {"a": -torch.zeros(2, 3), "b": torch.ones(1)},
    ]
    assert len({digest(s) for s in [state, *others]}) == 6
    assert digest(state) == digest(dict(reversed(state.items())))
    conv = torch.randn(4, 3, 2, 2)
    assert digest({"w": conv}) == digest({"w": conv.contiguous(memory_format=torch.channels_last)})


def test_take_and_put_are_inverse_for_masks() -> None:
    value = torch.arange(6.0).view(2, 3)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    chosen = take(value, mask)
    assert chosen is not None
    assert chosen.tolist() == [0.0, 2.0, 5.0]
    target = torch.zeros(2, 3)
    put(target, mask, chosen)
    put(target, complement(mask), value[~mask])
    assert torch.equal(target, value)
    assert take(value, mask & False) is None
    assert take(value, False) is None
    assert bool(union(mask, ~mask).all())  # type: ignore[union-attr]
    assert union(False, mask) is mask
    assert union(mask, True) is True


def test_prefixes() -> None:
    state = {"w": torch.ones(1)}
    assert within("c", under("c", state) | {"cc/w": torch.zeros(1)}).keys() == {"w"}


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ({"w": torch.ones(2)}, "missing b"),
        ({"w": torch.ones(2), "b": torch.ones(1), "x": torch.ones(1)}, "extra x"),
        ({"w": torch.ones(3), "b": torch.ones(1)}, "(3,)"),
        ({"w": torch.ones(()), "b": torch.ones(1)}, "()"),
        ({"w": torch.ones(2, dtype=torch.float64), "b": torch.ones(1)}, "float64"),
        ({"w": torch.tensor([1.0, float("nan")]), "b": torch.ones(1)}, "finite"),
        ({"w": torch.tensor([1.0, float("inf")]), "b": torch.ones(1)}, "finite"),
    ],
)
def test_what_was_not_declared_is_refused_with_its_sender(state: State, word: str) -> None:
    with pytest.raises(UpdateError, match="Client 7") as caught:
        check(state, {"w": torch.zeros(2), "b": torch.zeros(1)}, "Client 7")
    assert word in str(caught.value)


def test_weighted_mean_by_hand() -> None:
    a = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    b = {"w": torch.tensor([5.0, 6.0]), "n": torch.tensor(8)}
    mean = weighted_mean([a, b], [1.0, 3.0])
    assert mean["w"].tolist() == [4.0, 5.0]
    assert mean["n"].item() == 7  # 6.75 rounded
    assert mean["n"].dtype == torch.int64


def test_merge_changes_only_what_is_selected() -> None:
    old = {"w": torch.zeros(3), "v": torch.zeros(2)}
    mask = torch.tensor([True, False, True])
    new = merge(old, {"w": mask, "v": False}, {"w": torch.tensor([1.0, 2.0])})
    assert new["w"].tolist() == [1.0, 0.0, 2.0]
    assert new["v"] is old["v"]
    assert old["w"].tolist() == [0.0, 0.0, 0.0]


@given(st.integers(0, 2**40), st.integers(1, 500), st.integers(1, 400), st.floats(0.001, 1.0))
@settings(deadline=None, max_examples=100)
def test_a_cohort_is_distinct_ordered_and_repeatable(seed: int, t: int, clients: int, fraction: float) -> None:
    cohort = sample(seed, t, range(clients), fraction)
    assert cohort == sorted(set(cohort))
    assert len(cohort) == min(clients, max(1, round_half_up(fraction * clients)))
    assert cohort == sample(seed, t, range(clients), fraction)
    assert set(cohort) <= set(range(clients))


def test_every_client_is_drawn_about_equally_often() -> None:
    counts = torch.zeros(20)
    for t in range(1, 1001):
        counts[sample(3, t, range(20), 0.1)] += 1
    assert counts.sum() == 2000
    assert counts.min() > 60
    assert counts.max() < 140


def test_seeds_differ_by_every_ingredient() -> None:
    seeds = {
        derive(0, "a"),
        derive(1, "a"),
        derive(0, "b"),
        derive(0, "a", 1),
        derive(0, "a", 0, 1),
        derive(0, "a", 1, 1),
    }
    assert len(seeds) == 6
    assert all(0 <= s < 2**63 for s in seeds)
