"""The single steps of a traced forward pass: which ones make channels, keep them or flatten them, and how they run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

# Modules, functions and tensor methods of which every channel's output depends on that channel's input alone.
_PLACES = (1, 2, 3)
_MODULES = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold),
    *(nn.Dropout, nn.AlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(getattr(nn, f"{kind}Pool{n}d") for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg") for n in _PLACES),
)
_NAMES = {
    *("relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "sigmoid"),
    *("logsigmoid", "tanh", "softsign", "hardtanh", "hardswish", "hardsigmoid", "threshold", "clamp", "clip"),
    *("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "abs", "square"),
    *(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in _PLACES),
    *("add", "add_", "sub", "mul", "mul_", "neg"),
}
_FUNCTIONS = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.neg,
    operator.iadd,
    operator.imul,
    *(getattr(where, name) for where in (torch, F) for name in _NAMES if hasattr(where, name)),
}
_METHODS = {name for name in _NAMES if hasattr(Tensor, name)}
_REDUCTIONS = {torch.mean, torch.sum, torch.amax, "mean", "sum", "amax"}
_FLATTENINGS = {torch.flatten, torch.reshape, torch.squeeze, "flatten", "reshape", "view", "squeeze"}
_OUT_OF_PLACE: dict[Any, Any] = {operator.iadd: operator.add, operator.imul: operator.mul, "add_": "add", "mul_": "mul"}


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that a step calls, if it calls one."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_layer(module: object) -> bool:
    """Whether a module is a convolution or a linear layer and computes nothing else."""
    return isinstance(module, LAYERS) and any(type(module).forward is kind.forward for kind in LAYERS)


def is_norm(module: object) -> bool:
    """Whether a module is a BatchNorm and computes nothing else."""
    return isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward


def is_flattening(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a step gives the same elements another shape."""
    return isinstance(module, nn.Flatten) if node.op == "call_module" else node.target in _FLATTENINGS


def is_size(value: Any) -> bool:
    """Whether a value is a size or the like, made of plain numbers."""
    return all(map(is_size, value)) if isinstance(value, tuple | list) else isinstance(value, int | float)


def keeps_channels(node: fx.Node, module: nn.Module | None, dims: int) -> bool:
    """Whether every channel of the output depends on the same channel of the input, of so many dimensions, alone."""
    if node.op == "call_module":
        return type(module) in _MODULES
    if node.target in _REDUCTIONS:
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        listed = given if isinstance(given, list | tuple) else [given]
        return all(isinstance(dim, int) and dim % dims >= 2 for dim in listed)
    return node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)


def make_flatten(node: fx.Node) -> None:
    """Write a reshape that flattens as a flatten, which holds for any number of channels."""
    if node.op != "call_module":
        node.op, node.target = "call_function", torch.flatten
        node.args, node.kwargs = (node.all_input_nodes[0], 1), {}


def make_out_of_place(node: fx.Node) -> None:
    """Write `x += y` as `x + y`: in a sub-network, x may be a part of another tensor."""
    if node.op != "call_module":
        node.target = _OUT_OF_PLACE.get(node.target, node.target)


def runnable(node: fx.Node, module: nn.Module | None) -> Callable[..., Any]:
    """What a step calls with its arguments."""
    if module is not None:
        return module
    if node.op == "call_method":
        name = str(node.target)
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    if node.op == "output":
        return lambda value: value
    assert callable(node.target)
    return node.target


def constant(node: fx.Node, module: nn.Module) -> Any:
    """An argument that keeps its default value, or a tensor of the module that is used by itself."""
    if node.op == "placeholder":
        return node.args[0] if node.args else None
    return operator.attrgetter(str(node.target))(module)


def describe(node: fx.Node, module: nn.Module | None) -> str:
    """A step in words that its author recognises."""
    if module is not None:
        return f"{str(node.target)!r} ({type(module).__name__})"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)
    name = node.name if name == "fn" else name  # functions that torch chooses by an argument
    where = f"in {node.meta['path']!r}" if node.meta.get("path") else "in the network's own forward pass"
    return f"{name} {where}"
