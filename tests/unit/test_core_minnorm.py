"""MGDA's weights: closed form, brute force, the conditions of optimality, and another implementation."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from perfed.core.minnorm import min_norm


def gram(gradients: Tensor) -> Tensor:
    return gradients @ gradients.T


def random_gradients(tasks: int, seed: int, size: int = 6) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    scale = 10 ** (3 * torch.rand(tasks, 1, generator=source, dtype=torch.float64) - 2)
    return scale * torch.randn(tasks, size, generator=source, dtype=torch.float64)


@pytest.mark.parametrize(
    ("a", "b", "first"),
    [
        ([1.0, 0.0], [0.0, 1.0], 0.5),
        ([2.0, 0.0], [0.0, 1.0], 0.2),
        ([1.0, 1.0], [4.0, 4.0], 1.0),
        ([3.0, 0.0], [1.0, 0.1], 0.0),
        ([1.0, 0.0], [-1.0, 0.0], 0.5),
        ([1.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_two_tasks_have_a_closed_form(a: list[float], b: list[float], first: float) -> None:
    """alpha_1 = clip((g2 - g1) . g2 / |g1 - g2|^2, 0, 1)."""
    g1, g2 = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    closed = float((((g2 - g1) @ g2) / ((g1 - g2) @ (g1 - g2))).clamp(0, 1))
    assert closed == pytest.approx(first)
    torch.testing.assert_close(
        min_norm(gram(torch.stack([g1, g2]))), torch.tensor([closed, 1 - closed], dtype=torch.float64)
    )


@pytest.mark.parametrize("seed", range(30))
def test_two_random_tasks(seed: int) -> None:
    g = random_gradients(2, seed)
    closed = ((g[1] - g[0]) @ g[1] / ((g[0] - g[1]) @ (g[0] - g[1]))).clamp(0, 1)
    torch.testing.assert_close(min_norm(gram(g))[0], closed, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_three_tasks_by_search_over_the_simplex(seed: int) -> None:
    g = gram(random_gradients(3, seed))
    ticks = torch.linspace(0, 1, 401, dtype=torch.float64)
    a, b = torch.meshgrid(ticks, ticks, indexing="ij")
    grid = torch.stack([a, b, 1 - a - b], dim=-1)[a + b <= 1 + 1e-12]
    values = ((grid @ g) * grid).sum(dim=1)
    ours = min_norm(g)
    assert ours @ g @ ours <= values.min() + 1e-12
    assert ours @ g @ ours >= values.min() - 0.01 * g.diagonal().max(), "the search is as fine as 1/400"
    assert (grid[values.argmin()] @ g @ ours) == pytest.approx(float(ours @ g @ ours), rel=0.05)


@pytest.mark.parametrize("tasks", [2, 3, 10, 40])
def test_optimality(tasks: int) -> None:
    """On the simplex, and no gradient makes a smaller angle with the combination than its own length allows."""
    for seed in range(5):
        g = gram(random_gradients(tasks, seed, size=24))
        alpha = min_norm(g)
        assert float(alpha.sum()) == pytest.approx(1)
        assert bool((alpha >= 0).all())
        least = alpha @ g @ alpha
        assert bool((g @ alpha >= least - 1e-9 * g.diagonal().max()).all())
        assert least <= g.diagonal().min() * (1 + 1e-9)


def test_equal_to_torchjd_as_far_as_frank_wolfe_gets() -> None:
    mgda = import_module("torchjd.aggregation").MGDA(epsilon=1e-9, max_iters=2000)
    for seed in range(3):
        gradients = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ours, theirs = min_norm(gram(gradients)) @ gradients, mgda(gradients)
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)
        assert ours.norm() <= theirs.norm() + 1e-12


def test_gradients_of_zero_or_beyond_all_bounds_get_equal_weights() -> None:
    """A client that diverges is left out by the check of its update, not by a crash here."""
    for value in (0.0, float("inf"), float("nan")):
        assert min_norm(torch.full((4, 4), value)).tolist() == [0.25] * 4


@pytest.mark.parametrize("tasks", [2, 10, 100])
def test_parallel_gradients_in_single_precision(tasks: int) -> None:
    """Their matrix has rank 1, and rounding makes it no Gram matrix at all."""
    source = torch.Generator().manual_seed(tasks)
    direction, sizes = torch.randn(1, 50, generator=source), 1 + 1000 * torch.rand(tasks, 1, generator=source)
    gradients = sizes * direction + 1e-4 * torch.randn(tasks, 50, generator=source)
    alpha = min_norm(gram(gradients))
    assert float(alpha.sum()) == pytest.approx(1, rel=1e-5)
    assert float((alpha @ gradients).norm()) <= float(gradients.norm(dim=1).min()) * 1.01


def test_the_type_is_kept_and_scale_does_not_matter() -> None:
    g = gram(random_gradients(5, 0)).float()
    assert min_norm(g).dtype == torch.float32
    torch.testing.assert_close(min_norm(g * 1e-12), min_norm(g))
    torch.testing.assert_close(min_norm(g * 1e12), min_norm(g))
