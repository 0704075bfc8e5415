"""The shortest vector in the convex hull of some gradients: MGDA's common descent direction.

    alpha = argmin |sum_t alpha_t g_t|^2 = argmin alpha' G alpha,   alpha_t >= 0,  sum_t alpha_t = 1,  G_st = g_s . g_t

Désidéri: Multiple-Gradient Descent Algorithm for Multiobjective Optimization. Comptes Rendus Mathématique 2012.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import nnls
from torch import Tensor

JITTER = 1e-12


def min_norm(gram: Tensor) -> Tensor:
    """The weights alpha for a matrix of inner products, exactly: no iteration count, no tolerance to choose.

    Over x >= 0, x = s alpha, the sum x' G x + (1'x - 1)^2 is least at s = 1 / (1 + alpha' G alpha) and then grows with
    alpha' G alpha alone. So non-negative least squares for a root of G + 11' finds a multiple of the weights.
    """
    g = gram.detach().double().numpy()
    norms = np.diag(g)
    largest = norms.max()
    if not largest > 0:
        return gram.new_full((len(g),), 1 / len(g))
    g = g / max(norms.min(), JITTER * largest)
    root = cholesky(g + 1 + np.diag(JITTER * (1 + np.diag(g))))
    x, _ = nnls(root, solve_triangular(root, np.ones(len(g)), trans="T"))
    return gram.new_tensor(x / x.sum())
