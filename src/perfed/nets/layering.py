"""Which layer owns what: the children of an `nn.Sequential` by position, any other module's state by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from perfed.errors import NetError

Stages = tuple[tuple[str, ...], ...]
"""For an `nn.Sequential`: the names of the children that make up each layer. Empty for other modules."""


def is_chain(module: nn.Module) -> bool:
    """Whether the children run one after another and nothing else happens."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def stages(module: nn.Module, prefixes: Mapping[str, Sequence[str]]) -> Stages:
    """Divide a Sequential: a layer runs from its first child up to the next layer's first child."""
    if not prefixes:
        raise NetError("A network needs at least one layer, the head.")
    children = list(module._modules)  # named_children() leaves out the second use of a shared module
    parts = [part for layer in prefixes.values() for part in layer]
    if not is_chain(module) or not all(part in children for part in parts):
        return ()
    starts = [0, *(min(map(children.index, layer)) for layer in list(prefixes.values())[1:]), len(children)]
    divided = tuple(tuple(children[a:b]) for a, b in pairwise(starts))
    for (layer, named), stage in zip(prefixes.items(), divided, strict=True):
        if not set(named) <= set(stage):
            raise NetError(
                f"Layer {layer!r} is out of order: {', '.join(sorted(set(named) - set(stage)))} do not run"
                " between its first module and the next layer's.",
                "List the layers from input to output.",
            )
    return divided


def ownership(module: nn.Module, prefixes: Mapping[str, Sequence[str]], divided: Stages) -> dict[str, str]:
    """The layer of every parameter and buffer; refuses state that no layer, or more than one, would own."""
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise NetError(f"The model's state {name!r} is not a tensor.", "Keep state in parameters and buffers.")
        if is_lazy(value):
            raise NetError(f"Parameter {name!r} has no shape yet.", "Run one batch through the model first.")
    if divided:
        by_child = {name: layer for layer, stage in zip(prefixes, divided, strict=True) for name in stage}
        owner = {name: by_child[name.split(".")[0]] for name in state if name.split(".")[0] in by_child}
    else:
        owner = _by_longest_prefix(list(state), prefixes)
    _check_complete(list(state), owner, prefixes)
    _check_untied(state, owner)
    return owner


def _by_longest_prefix(names: Sequence[str], prefixes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    of: dict[str, str] = {}
    for layer, parts in prefixes.items():
        for part in parts:
            if of.setdefault(part, layer) != layer:
                raise NetError(f"Layers {of[part]!r} and {layer!r} both claim {part!r}.", "Name it once.")
    owner = {}
    for name in names:
        pieces = name.split(".")
        paths = (".".join(pieces[:n]) for n in range(len(pieces), 0, -1))
        if path := next((path for path in paths if path in of), None):
            owner[name] = of[path]
    return owner


def _check_complete(names: Sequence[str], owner: Mapping[str, str], layers: Mapping[str, Sequence[str]]) -> None:
    orphans = [name for name in names if name not in owner]
    if orphans:
        raise NetError(
            f"No layer owns {', '.join(orphans[:5])}{' and more' if len(orphans) > 5 else ''}.",
            "Add the modules that hold them to the layers.",
        )
    idle = [layer for layer in layers if layer not in owner.values()]
    if idle:
        raise NetError(
            f"Layer {idle[0]!r} ({', '.join(layers[idle[0]])}) has no parameters or buffers.",
            "Name modules that have some, as named_modules() spells them.",
        )


def _check_untied(state: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
    first: dict[int, str] = {}
    for name, tensor in state.items():
        twin = first.setdefault(id(tensor), name)
        if owner[twin] != owner[name]:
            raise NetError(
                f"{twin} and {name} are one tensor, but lie in layers {owner[twin]!r} and {owner[name]!r}.",
                "Untie them, or put both modules into one layer.",
            )
