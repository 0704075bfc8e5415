"""MGDA's weights: closed form, brute force, the conditions of optimality, and another implementation."""

from __future__ import annotations

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


def test_equal_to_torchjd() -> None:
    mgda = pytest.importorskip("torchjd.aggregation").MGDA(epsilon=1e-9, max_iters=3000)
    for seed in range(2):
        gradients = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(min_norm(gram(gradients)) @ gradients, mgda(gradients), atol=1e-3, rtol=1e-3)


def test_gradients_of_zero_get_equal_weights() -> None:
    assert min_norm(torch.zeros(4, 4)).tolist() == [0.25] * 4


def test_the_type_is_kept_and_scale_does_not_matter() -> None:
    g = gram(random_gradients(5, 0)).float()
    assert min_norm(g).dtype == torch.float32
    torch.testing.assert_close(min_norm(g * 1e-12), min_norm(g))
    torch.testing.assert_close(min_norm(g * 1e12), min_norm(g))
