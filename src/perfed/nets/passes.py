"""The forward pass in two parts: where a module can be cut, and what runs on either side.

- An `nn.Sequential` can be cut before every layer, because its children run one after another.
- Any other module can be cut right before its head, once a trial batch (`perfed.nets.probe`) has shown that
  what the model returns is the head's output and nothing else. The trial needs the input's shape; without it
  the module is one piece. Nothing is learnt from ordinary forward passes, so that what can be cut never
  depends on which worker has run what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from perfed.nets import attending, fused, tiled
from perfed.nets.attention import CrossAttention
from perfed.nets.layering import Stages
from perfed.nets.probe import at_head


class Chain:
    """A Sequential, as the names of its children in each layer."""

    def __init__(self, module: nn.Module, stages: Stages) -> None:
        self.module = module
        self.stages = stages
        self.head_path = next(name for name in stages[-1] if module.get_submodule(name).state_dict())
        self.fused: frozenset[str]
        """convolutions that are computed in one with the two modules behind them"""
        self.tiled: list[nn.Conv2d]
        """convolutions that are computed by tiles, wherever they are called"""
        self.fuse(False)

    @property
    def compiled(self) -> bool:
        """Whether compiled code computes anything here."""
        return bool(self.fused or self.tiled) or any(part.compiled for part in _attentions(self.module))

    def fuse(self, on: bool) -> None:
        """Compute by compiled code what can be, or nothing."""
        at = [stage[i : i + 3] for stage in self.stages for i in range(len(stage) - 2)] if on else []
        modules = {names[0]: [self.module.get_submodule(name) for name in names] for names in at}
        self.fused = frozenset(name for name, three in modules.items() if fused.fusible(three))
        self.tiled = _tileable(self.module) if on else []  # fused ones too: a method may call them by themselves
        for part in _attentions(self.module):
            part.compiled = on and attending.takes(*part.size)

    def ready(self) -> None:
        """Compile what modules need: now, and not in the middle of a run."""
        for name in self.fused:
            fused.kernel(self.module.get_submodule(name))
        _make(self.tiled)
        for part in _attentions(self.module):
            if part.compiled:
                attending.kernel(*part.size)

    def divisible(self, k: int, head: int) -> bool:
        """Whether the pass can be cut before layer k: always."""
        return True

    @property
    def head_is_output(self) -> bool:
        """Whether nothing happens behind the head's module."""
        last = self.stages[-1]
        behind = last[last.index(self.head_path) + 1 :]
        return all(isinstance(self.module.get_submodule(name), nn.Identity) for name in behind)

    def whole(self, x: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.prefix(x, len(self.stages)) if self.fused else self.module(x)
        return logits

    def prefix(self, x: Tensor, k: int) -> Tensor:
        """Layers [0, k)."""
        return self._run(x, (name for stage in self.stages[:k] for name in stage))

    def suffix(self, z: Tensor, k: int) -> Tensor:
        """Layers [k, end)."""
        return self._run(z, (name for stage in self.stages[k:] for name in stage))

    def features(self, x: Tensor) -> Tensor:
        """What the head's module receives."""
        last = self.stages[-1]
        return self._run(self.prefix(x, len(self.stages) - 1), last[: last.index(self.head_path)])

    def modules_before(self, k: int) -> Iterator[nn.Module]:
        """Every module inside layers [0, k)."""
        for stage in self.stages[:k]:
            for name in stage:
                yield from self.module.get_submodule(name).modules()

    def modules_from(self, k: int) -> list[nn.Module]:
        """What layers [k, end) run, one after another."""
        return [self.module.get_submodule(name) for stage in self.stages[k:] for name in stage]

    def groups_from(self, k: int) -> list[list[nn.Module]]:
        """The same, and together those that are computed as one."""
        return list(self._groups(name for stage in self.stages[k:] for name in stage))

    def _groups(self, names: Iterable[str]) -> Iterator[list[nn.Module]]:
        left = iter(names)
        for name in left:
            behind = [next(left) for _ in range(2)] if name in self.fused else []
            yield [self.module.get_submodule(one) for one in (name, *behind)]

    def _run(self, x: Tensor, names: Iterable[str]) -> Tensor:
        for group in self._groups(names):
            x = fused.run(group, x) if len(group) > 1 else group[0](x)
        return x


class Whole:
    """A module whose inside is its own affair: known are the head, and whether its output is the model's."""

    def __init__(self, module: nn.Module, head_path: str) -> None:
        self.module = module
        self.head_path = head_path
        self.head_is_output = False
        self.tiled: list[nn.Conv2d]
        self.fuse(False)

    @property
    def compiled(self) -> bool:
        """Whether compiled code computes anything here."""
        return bool(self.tiled)

    def fuse(self, on: bool) -> None:
        """Compute convolutions by tiles, and nothing else by compiled code: what follows what is not known here."""
        self.tiled = _tileable(self.module) if on else []
        for part in _attentions(self.module):
            part.compiled = False

    def ready(self) -> None:
        """Compile what is missing."""
        _make(self.tiled)

    def divisible(self, k: int, head: int) -> bool:
        """Whether the pass can be cut before layer k: only before the head."""
        return k == head and self.head_is_output

    def whole(self, x: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.module(x)
        return logits

    def prefix(self, x: Tensor, k: int) -> Tensor:
        """All that comes before the head."""
        return self.features(x)

    def suffix(self, z: Tensor, k: int) -> Tensor:
        """The head."""
        logits: Tensor = self.module.get_submodule(self.head_path)(z)
        return logits

    def features(self, x: Tensor) -> Tensor:
        """What the head receives."""
        return at_head(self.module, self.head_path, x)

    def modules_before(self, k: int) -> Iterator[nn.Module]:
        """Every module outside the head: which layer a module without state serves is not known."""
        head = set(self.module.get_submodule(self.head_path).modules())
        return (module for module in self.module.modules() if module not in head)

    def modules_from(self, k: int) -> list[nn.Module]:
        """What layers [k, end) run, one after another: the head, or the whole as one."""
        return [self.module.get_submodule(self.head_path)] if k else [self.module]

    def groups_from(self, k: int) -> list[list[nn.Module]]:
        """The same, each by itself."""
        return [[module] for module in self.modules_from(k)]


def _attentions(module: nn.Module) -> list[CrossAttention]:
    return [part for part in module.modules() if isinstance(part, CrossAttention)]


def _tileable(module: nn.Module) -> list[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d) and tiled.known(part)]


def _make(convolutions: Iterable[nn.Conv2d]) -> None:
    for conv in convolutions:
        tiled.kernel(conv.in_channels, conv.out_channels, int(conv.padding[0]))


def is_random(module: nn.Module) -> bool:
    """Whether this module itself draws random numbers in training (its children are asked on their own).

    BatchNorm without running statistics counts as random too: what it gives for a sample depends on its batch.
    """
    if isinstance(module, _BatchNorm):
        return module.running_mean is None
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return True
    # Other libraries' DropPath, StochasticDepth, GaussianNoise: a false alarm costs time, never correctness.
    kind = type(module).__name__.lower()
    return any(word in kind for word in ("drop", "stochastic", "noise"))
