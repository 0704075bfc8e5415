"""The shortest vector in the convex hull of some gradients: MGDA's common descent direction.

    alpha = argmin |sum_t alpha_t g_t|^2 = argmin alpha' G alpha,   alpha_t >= 0,  sum_t alpha_t = 1,  G_st = g_s . g_t

Désidéri: Multiple-Gradient Descent Algorithm for Multiobjective Optimization. Comptes Rendus Mathématique 2012.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import nnls
from torch import Tensor


def min_norm(gram: Tensor) -> Tensor:
    """The weights alpha for a matrix of inner products, exactly: no number of iterations to choose.

    Over x = s alpha >= 0, the sum x' G x + (1'x - 1)^2 is least at s = 1 / (1 + alpha' G alpha), where it grows with
    alpha' G alpha alone. So non-negative least squares for a root of G + 11' finds a multiple of the weights.
    """
    g = gram.detach().double().numpy()
    norms = np.diag(g)
    if not 0 < norms.max() < np.inf:
        return gram.new_full((len(g),), 1 / len(g))
    rounding = 4 * len(g) * torch.finfo(gram.dtype).eps  # by so much a computed G may fail to be a Gram matrix
    g = g / max(norms.min(), rounding * norms.max())
    root = cholesky(g + 1 + np.diag(rounding * (1 + np.diag(g))))
    x, _ = nnls(root, solve_triangular(root, np.ones(len(g)), trans="T"))
    return gram.new_tensor(x / x.sum())
