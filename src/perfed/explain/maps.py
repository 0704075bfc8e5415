"""Where a model looks, and what each channel is worth to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from perfed.data.federation import Split
from perfed.errors import ExtraError
from perfed.explain.models import Model

EACH = 4
"""images that are right, and images that are wrong"""


@dataclass
class Seen:
    """What a model makes of the chosen images: maps from 0 to 1, classes, probabilities."""

    model: Model
    maps: Tensor
    said: Tensor
    sure: Tensor


def require() -> None:
    """Refuse where Captum is missing."""
    if not find_spec("captum"):
        raise ExtraError("Explanations need the package captum.", "Run: pip install 'perfed[explain]'.")


@torch.no_grad()
def choose(model: Model, data: Split) -> tuple[Tensor, Tensor]:
    """Rows of test images that the model gets right, of as many classes as there are, and those it gets wrong."""
    right = model.module(data.x).argmax(dim=1) == data.y
    hits, misses = torch.nonzero(right).flatten().tolist(), torch.nonzero(~right).flatten().tolist()
    return torch.tensor(_varied(hits, data.y), dtype=torch.long), torch.tensor(
        _varied(misses, data.y), dtype=torch.long
    )


def _varied(rows: list[int], y: Tensor) -> list[int]:
    """The first of each class, then the second of each, and so on."""
    turns: dict[int, int] = {}
    order = []
    for row in rows:
        label = int(y[row])
        turns[label] = turns.get(label, 0) + 1
        order.append((turns[label], row))
    return [row for _, row in sorted(order)][:EACH]


def look(model: Model, x: Tensor) -> Seen:
    """Grad-CAM of the class that the model says, or the gradient at each pixel where there is no convolution."""
    from captum.attr import LayerAttribution, LayerGradCam, Saliency

    with torch.no_grad():
        sure, said = model.module(x).softmax(dim=1).max(dim=1)
    layer = model.conv()
    with torch.enable_grad():
        if layer is None:
            found = Saliency(model.module).attribute(x.clone().requires_grad_(), target=said).sum(dim=1, keepdim=True)
        else:
            cam = LayerGradCam(model.module, layer).attribute(x, target=said, relu_attributions=True)
            found = LayerAttribution.interpolate(cam, tuple(x.shape[-2:]), "bilinear")
    maps = found.detach()[:, 0]
    top = maps.amax(dim=(1, 2), keepdim=True)
    return Seen(model, maps / torch.where(top > 0, top, torch.ones_like(top)), said, sure)


def channels(model: Model, data: Split, most: int = 256) -> Tensor | None:
    """What each channel of the last convolution contributes to the true class: Grad-CAM's weights, mean over images."""
    layer = model.conv()
    if layer is None:
        return None
    kept: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _module, _given, out: kept.append(out))
    try:
        with torch.enable_grad():
            scores = model.module(data.x[:most])
            true_class = scores.gather(1, data.y[:most].unsqueeze(1)).mean()
            (gradient,) = torch.autograd.grad(true_class, kept[-1])
    finally:
        handle.remove()
    return gradient.sum(dim=(0, 2, 3))


def names(models: Sequence[Model]) -> str:
    """Which layer was looked at, in words."""
    layer = models[0].conv()
    if layer is None:
        return "the pixels: the network has no convolution, so plain gradients are shown instead of Grad-CAM"
    return str(next(n for n, m in models[0].net.module.named_modules() if m is layer))
