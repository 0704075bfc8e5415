"""How clients relate: how alike what they keep is, and where they pull the shared representation apart."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from perfed.core.client import Client
from perfed.core.method import Method
from perfed.engine.rounds import Simulation

Numbers = NDArray[np.float64]
MOST = 60
"""clients whose private parts are compared"""
ELEMENTS = 200_000_000
"""numbers of all their networks together"""
ASKED = 24
"""clients whose gradients are compared"""
SAMPLES = 32
"""samples of a class that a client's gradient is taken from"""


def likeness(simulation: Simulation, client: int) -> tuple[list[int], Numbers, str] | None:
    """Cosines between what clients keep, as moved away from the common start; alike ones stand together."""
    vectors, what = _parameters(simulation, client), "private parameters"
    if len(vectors) < 2:
        vectors, what = _memories(simulation, client), "memories beside the network"
    shapes = [v.shape for v in vectors.values()]
    if len(vectors) < 2 or len(set(shapes)) > 1 or client not in vectors:
        return None
    stacked = F.normalize(torch.stack(list(vectors.values())), dim=1)
    cosines = (stacked @ stacked.T).clamp(-1, 1).double().numpy()
    order = _grouped(cosines)
    who = [list(vectors)[k] for k in order]
    return who, cosines[np.ix_(order, order)], what


def _parameters(simulation: Simulation, client: int) -> dict[int, Tensor]:
    """The parameters that all of these clients keep, less their first values; who never took part has none."""
    plan = simulation.plan
    names = [n for n, part in plan.parts.items() if part.tensor.is_floating_point() and not part.is_buffer]
    elements = sum(plan.parts[name].tensor.numel() for name in names)
    states = {}
    for one in _some(simulation, client, int(np.clip(ELEMENTS // elements, 2, MOST))):
        since, state = simulation.store.client(one)
        if since:
            states[one] = (plan.private(since), state)
    masks = {name: torch.ones_like(plan.initial[name], dtype=torch.bool) for name in names}
    for which, _ in states.values():
        for name in names:
            masks[name] &= which[name]
    if not any(bool(mask.any()) for mask in masks.values()):
        return {}
    vectors = {}
    for one, (which, state) in states.items():
        full = {name: plan.initial[name].clone() for name in names}
        plan.place(full, {name: which[name] for name in names}, state)
        vectors[one] = torch.cat([(full[name] - plan.initial[name])[masks[name]] for name in names])
    return vectors


def _memories(simulation: Simulation, client: int) -> dict[int, Tensor]:
    """What clients remember beside the network."""
    vectors = {}
    for one in _some(simulation, client, MOST):
        _, state = simulation.store.client(one)
        parts = [
            t.flatten() for n, t in sorted(state.items()) if n not in simulation.plan.parts and t.is_floating_point()
        ]
        if parts:
            vectors[one] = torch.cat(parts)
    return vectors


def _grouped(cosines: Numbers) -> list[int]:
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    away = np.clip(1 - (cosines + cosines.T) / 2, 0, None)
    np.fill_diagonal(away, 0)
    return [int(k) for k in leaves_list(linkage(squareform(away, checks=False), "average"))]


def conflicts(simulation: Simulation, client: int) -> tuple[list[int], Numbers] | None:
    """For pairs of classes of different clients: the mean cosine of their gradients on the shared representation.

    Below zero, what one client's class asks of the representation is against what the other's asks.
    """
    pulls: dict[tuple[int, int], Tensor] = {}
    for one in _some(simulation, client, ASKED):
        task = simulation._task("evaluate", one, simulation.settings.rounds, seen=True)
        found = simulation.worker.client(task)
        simulation.worker.personal(found)
        found.net.plain().module.eval()
        for label in found.data.classes_held:
            pulls[one, label] = _pull(simulation.method, found, label)
    held = sorted({label for _, label in pulls})
    if len({v.shape for v in pulls.values()}) != 1 or len({one for one, _ in pulls}) < 2:
        return None
    keys = list(pulls)
    stacked = F.normalize(torch.stack([pulls[key] for key in keys]).double(), dim=1)
    cosines = (stacked @ stacked.T).numpy()
    table = np.full((len(held), len(held)), np.nan)
    for a, one in enumerate(held):
        for b, other in enumerate(held):
            pairs = [
                cosines[i, j]
                for i, (who, label) in enumerate(keys)
                for j, (whose, second) in enumerate(keys)
                if label == one and second == other and who != whose
            ]
            if pairs:
                table[a, b] = np.mean(pairs)
    return held, table


def _pull(method: Method, client: Client, label: int) -> Tensor:
    """The mean gradient of the client's loss on one class with respect to what its head receives."""
    data = client.data.train
    rows = torch.nonzero(data.y == label).flatten()[:SAMPLES]
    kept: list[Tensor] = []
    head = client.net.module.get_submodule(client.net.head_path)
    handle = head.register_forward_pre_hook(lambda _module, given: kept.append(given[0]))
    try:
        with torch.enable_grad():
            x = data.x[rows].clone().requires_grad_()
            loss = F.cross_entropy(method.predict(client, x), data.y[rows])
            (gradient,) = torch.autograd.grad(loss, kept[-1])
    finally:
        handle.remove()
    return gradient.flatten(1).mean(dim=0) if gradient.dim() > 1 else gradient


def _some(simulation: Simulation, client: int, most: int) -> list[int]:
    everyone = list(simulation.federation.participants)
    return sorted({client, *everyone[:most]})
