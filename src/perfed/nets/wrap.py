"""Describe a model that a user brings: name its head, and every method can work on it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

from perfed.errors import NetError
from perfed.nets.layering import is_chain
from perfed.nets.net import Net


def wrap(
    model: nn.Module,
    head: str = "fc",
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    layers: Sequence[str] | None = None,
) -> Net:
    """A Net around any `nn.Module` that returns logits.

    `head` is the module that makes the logits, by its dotted name ("fc", "classifier.6"). The other layers
    are the model's children with parameters in the order of their registration, or the modules that
    `layers` names, input first. With `input_shape` (channels, height, width) a copy of the model is tried
    on two samples, which shows whether a frozen body may be computed once and reused; without it that is
    left off until `Net.probe`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_known("its head", [head], modules)
    if not _has_parameters(modules[head]):
        raise NetError(f"The head {head!r} has no parameters.", "Name the layer that makes the logits.")
    if num_classes is None:
        num_classes = _classes(modules[head], head)
    prefixes = _explicit(layers, head, modules) if layers is not None else _from_children(model, head)
    net = Net(model, prefixes, None, num_classes)
    if input_shape is not None:
        net.probe(input_shape)
    return net


def _classes(module: nn.Module, head: str) -> int:
    sizes = [size for m in module.modules() if isinstance(size := getattr(m, "out_features", None), int)]
    if not sizes:
        raise NetError(f"The head {head!r} does not tell its number of classes.", "Pass num_classes to wrap().")
    return sizes[-1]


def _explicit(layers: Sequence[str], head: str, modules: dict[str, nn.Module]) -> dict[str, list[str]]:
    _check_known("a layer", layers, modules)
    ordered = [*layers, head] if head not in layers else list(layers)
    if ordered[-1] != head or len(set(ordered)) != len(ordered):
        raise NetError(f"The layers {ordered} do not end with the head {head!r}, or name a module twice.")
    return {layer: [layer] for layer in ordered}


def _from_children(model: nn.Module, head: str) -> dict[str, list[str]]:
    """A layer per child with parameters, the head last."""
    top = head.partition(".")[0]
    sized = [name for name, child in model._modules.items() if child is not None and _has_parameters(child)]
    if is_chain(model) and top == head:  # what has no parameters belongs to the layer before it, by position
        if sized[-1] != head:
            raise NetError(
                f"Module {sized[-1]!r} runs after the head {head!r} and has parameters.",
                f"Name the last one as the head: head={sized[-1]!r}.",
            )
        return {name: [name] for name in sized}
    state = list(model.state_dict())
    layers: dict[str, list[str]] = {}
    if own := [name for name in state if "." not in name]:  # held by the model itself, not by a child
        layers["root" if "root" not in model._modules else "root_"] = own
    layers |= {name: [name] for name in sized if name != top}
    if top != head and any(name.startswith(f"{top}.") and not name.startswith(f"{head}.") for name in state):
        layers[top] = [top]
    layers[head] = [head]
    _place_buffers(layers, model, top)
    return layers


def _place_buffers(layers: dict[str, list[str]], model: nn.Module, top: str) -> None:
    """A child with buffers alone joins the layer registered before it, or else the first layer."""
    before = next(iter(layers))
    for name, child in model._modules.items():
        if name in layers:
            before = name
        elif child is not None and name != top and child.state_dict():
            layers[before].append(name)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _check_known(kind: str, given: Iterable[str], modules: dict[str, nn.Module]) -> None:
    names = [name for name, module in modules.items() if name and _has_parameters(module)]
    for name in given:
        if name not in modules or not name:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            near = f"Did you mean {close[0]!r}? " if close else ""
            more = "..., " if len(names) > 12 else ""
            raise NetError(
                f"The model has no module {name!r}, which was named as {kind}.",
                f"{near}Modules with parameters: {more}{', '.join(names[-12:]) or 'none'}.",
            )
