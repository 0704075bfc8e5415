"""How channels pass through a module: its forward pass, followed step by step with torch.fx.

Every step's output is either common (the input, what is made of it before the first layer, and the logits) or consists
of channels along dimension 1. Convolutions and linear layers make channels; BatchNorm, activations, dropout, pooling,
sums and products keep them; a flatten gives each of them a block. Anything else would mix channels in a way that
cannot be divided, and is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from perfed.errors import NetError
from perfed.nets import steps

BATCH = 2
ROUNDING = 1e-9
"""p * C may come out a hair below a whole number: 0.29 * 100 is 28.999999999999996."""


@dataclass(frozen=True)
class Channels:
    """A dimension divided into channels, each a block of neighbouring elements; the last ones are private."""

    count: int
    block: int = 1

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.count * self.block

    def private(self, p: float) -> int:
        """The number of private channels, floor(p * C)."""
        return int(p * self.count + ROUNDING)

    def cut(self, p: float) -> int:
        """The element with which the private channels begin."""
        return (self.count - self.private(p)) * self.block


@dataclass(frozen=True, eq=False)
class Flow:
    """The steps of a forward pass, and the channels of what each step gives."""

    nodes: tuple[fx.Node, ...]
    channels: Mapping[str, Channels]
    """by the name of a step; steps that are missing here do not give channels"""
    common: frozenset[str]
    """steps that have nothing to do with channels, so that every sub-network has the same"""
    stem: frozenset[str]
    """steps before the second layer: a channel's values do not depend on the other channels"""
    hidden: frozenset[Channels]
    axes: Mapping[int, tuple[Channels | None, Channels | None]]
    """output and input channels by the id of a parameter or buffer"""


def follow(module: nn.Module, input_shape: Sequence[int]) -> Flow:
    """Follow a module's forward pass in training mode, on two black images; the module stays as it is."""
    if not input_shape:
        raise NetError("The network's channels cannot be followed: its input shape is not known.", "Call Net.probe.")
    like = next((parameter for parameter in module.parameters()), torch.empty(0))
    x = torch.zeros(BATCH, *input_shape, dtype=like.dtype, device=like.device)
    with _training(module), torch.random.fork_rng(devices=[]), torch.no_grad():
        graph = _trace(module)
        walk = _Walk(module, _needed(graph))
        for node in walk.nodes:
            walk.visit(node, x)
    if not walk.hidden:
        raise NetError("The network has no hidden layer, so there are no channels to split.", "Take a deeper one.")
    nodes = tuple(_needed(graph))  # without what only told a flatten its sizes
    return Flow(
        nodes, walk.channels, frozenset(walk.common), frozenset(walk.stem), frozenset(walk.hidden), dict(walk.axes)
    )


class _Tracer(fx.Tracer):
    """Remembers in which module it is, to name it when something is wrong there."""

    path = ""

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        outer, self.path = self.path, self.path_of_module(m)
        result = super().call_module(m, forward, args, kwargs)
        self.path = outer
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["path"] = self.path
        return node


class _Walk:
    """Visits the steps in order."""

    def __init__(self, module: nn.Module, nodes: Sequence[fx.Node]) -> None:
        self.module = module
        self.nodes = nodes
        self.classifiers = _classifiers(module, nodes)
        self.values: dict[fx.Node, Any] = {}
        self.channels: dict[str, Channels] = {}
        self.common: set[str] = set()
        self.stem: set[str] = set()
        self.hidden: set[Channels] = set()
        self.axes: dict[int, tuple[Channels | None, Channels | None]] = {}

    def visit(self, node: fx.Node, x: Tensor) -> None:
        """Find the shape and the channels of one step's output."""
        self.values[node] = self._value(node, x)
        inputs = [source.name for source in node.all_input_nodes]
        channels = self._channels(node, [self.channels[name] for name in inputs if name in self.channels])
        sources = set(inputs)
        if channels:
            self.channels[node.name] = channels
        if sources <= self.common:
            (self.stem if channels else self.common).add(node.name)
        elif channels and sources <= self.common | self.stem and not steps.is_layer(self._submodule(node)):
            self.stem.add(node.name)

    def _channels(self, node: fx.Node, given: list[Channels]) -> Channels | None:
        made, module = self.values[node], self._submodule(node)
        if module is not None and steps.is_layer(module):
            return self._through_layer(node, module, given)
        if module is not None and steps.is_norm(module):
            self._own(node, module, given[0] if given else None, None)
            return given[0] if given else None
        if not given or steps.is_size(made):
            return None
        if steps.is_flattening(node, module):
            return self._through_flatten(node, given[0])
        sources = [s for s in node.all_input_nodes if isinstance(self.values[s], Tensor)]
        shapes = [tuple(self.values[s].shape) for s in sources]
        if not isinstance(made, Tensor) or not steps.keeps_channels(node, module, len(shapes[0])):
            self._refuse(node, "it does not keep channels apart")
        if len(given) != len(sources) or len(set(given)) > 1 or len({len(shape) for shape in shapes}) > 1:
            self._refuse(node, f"its inputs of shapes {_per_sample(shapes)} do not have the same channels")
        if made.shape[:2] != shapes[0][:2]:
            self._refuse(node, "it changes the number of channels")
        steps.make_out_of_place(node)
        return given[0]

    def _through_layer(self, node: fx.Node, module: nn.Module, given: list[Channels]) -> Channels | None:
        """A convolution or a linear layer: takes channels, makes new ones, or the logits."""
        source = node.all_input_nodes[0]
        x = self.values[source]
        if getattr(module, "groups", 1) != 1:
            self._refuse(node, "its channels are in groups")
        if isinstance(module, nn.Linear) and x.dim() != 2:
            self._refuse(node, f"it works on samples of shape {_per_sample([x.shape])}, not on flat ones")
        if not given and source.name not in self.common:
            self._refuse(node, "the channels of its input are not known")
        if not given:
            self._refuse_bare_parameters(node)
        made = None if node in self.classifiers else Channels(int(self.values[node].shape[1]))
        self._own(node, module, made, given[0] if given else None)
        if made:
            self.hidden.add(made)
        return made

    def _refuse_bare_parameters(self, layer: fx.Node) -> None:
        """Before the first layer there are no channels, so a parameter that is used there by itself is not split."""
        reached = {layer}
        for node in reversed(self.nodes):
            if node not in reached:
                continue
            for source in node.all_input_nodes:
                if source.op == "get_attr" and isinstance(self.values[source], nn.Parameter):
                    self._refuse(node, f"it uses the parameter {str(source.target)!r} outside a layer")
            reached.update(node.all_input_nodes)

    def _through_flatten(self, node: fx.Node, given: Channels) -> Channels:
        """(n, C, H, W) to (n, C * H * W), however it is written."""
        before, after = self.values[node.all_input_nodes[0]].shape, self.values[node].shape
        if tuple(after) != (before[0], before[1:].numel()):
            self._refuse(node, f"it makes {_per_sample([after])} of {_per_sample([before])}; a flatten is accepted")
        steps.make_flatten(node)
        return Channels(given.count, given.block * before[2:].numel())

    def _own(self, node: fx.Node, module: nn.Module, rows: Channels | None, columns: Channels | None) -> None:
        """Note the channels of a layer's own tensors."""
        state = module.state_dict(keep_vars=True)
        if not state.keys() <= {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}:
            self._refuse(node, f"it has parameters of its own kind ({', '.join(state)})")
        for tensor in state.values():
            axes = (rows if tensor.dim() else None, columns if tensor.dim() > 1 else None)
            if self.axes.setdefault(id(tensor), axes) != axes:
                self._refuse(node, "it is used twice, with different channels")

    def _value(self, node: fx.Node, x: Tensor) -> Any:
        """What a step gives for the batch x, as far as shapes are concerned."""
        if node.op == "placeholder" and node is self.nodes[0]:
            return x
        if node.op in ("placeholder", "get_attr"):
            return steps.constant(node, self.module)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: self.values[source])
        module = self._submodule(node)
        if steps.is_norm(module):
            return args[0]  # of the same shape, and the running statistics stay as they are
        if module is not None and not steps.is_layer(module) and module.state_dict():
            self._refuse(node, "its parameters cannot be divided by channels")
        try:
            return steps.runnable(node, module)(*args, **kwargs)
        except Exception as failure:
            self._refuse(node, f"it cannot be run on samples of shape {list(x.shape[1:])} ({failure})")

    def _submodule(self, node: fx.Node) -> nn.Module | None:
        return steps.module_of(node, self.module)

    def _refuse(self, node: fx.Node, why: str) -> NoReturn:
        what = steps.describe(node, self._submodule(node))
        raise NetError(
            f"The channels of this network cannot be split at {what}: {why}.",
            "Convolutions, linear and BatchNorm layers, activations, dropout, pooling, flatten and additions can be.",
        )


def _trace(module: nn.Module) -> fx.Graph:
    tracer = _Tracer()
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    try:
        graph = tracer.trace(module, concrete_args=defaults)
    except Exception as failure:
        raise NetError(
            f"The forward pass of {tracer.path or type(module).__name__!r} cannot be followed: {failure}.",
            "It must do the same for every batch: no branches that depend on values or shapes.",
        ) from failure
    return graph


def _needed(graph: fx.Graph) -> list[fx.Node]:
    """The steps that the output depends on, in order."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or found.intersection(node.users):
            found.add(node)
    return [node for node in graph.nodes if node in found]


def _classifiers(module: nn.Module, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The layers that make the logits: those with no other layer between them and the output."""
    found: set[fx.Node] = set()
    reached = {node for node in nodes if node.op == "output"}
    for node in reversed(nodes):
        if node in reached:
            if steps.is_layer(steps.module_of(node, module)):
                found.add(node)
            else:
                reached.update(node.all_input_nodes)
    return found


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Inside, every part of the module is in training mode."""
    before = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        yield
    finally:
        for part, flag in before:
            part.training = flag


def _per_sample(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(list(shape[1:])) for shape in shapes)
