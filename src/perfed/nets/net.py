"""A network as methods see it: an ordered list of named layers around one `nn.Module`, the last one the head.

The module is never rewritten: state names are `module.state_dict()` names. What is added is order ("the
k-th layer", "from the input"), ownership (every parameter and buffer belongs to exactly one layer), and the
cut: the same forward pass in two parts (see `perfed.nets.passes`), so that a frozen prefix can be computed
once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from perfed.errors import NetError, unknown
from perfed.nets import halfbits
from perfed.nets.layering import ownership, stages
from perfed.nets.passes import Chain, Whole, is_random
from perfed.nets.probe import trial
from perfed.nets.tiled import Tiles


class Net:
    """A module, its layers in order from input to output, and what it takes and gives.

    `input_shape` is (channels, height, width), or () for a wrapped model whose input is not known yet.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, Sequence[str]],
        input_shape: Sequence[int] | None,
        num_classes: int,
    ) -> None:
        """Describe `module`; `layers` maps each layer to the names of the modules that belong to it."""
        self.module = module
        self.prefixes = {layer: tuple(parts) for layer, parts in layers.items()}
        self.layers = tuple(self.prefixes)
        self.input_shape = tuple(input_shape or ())
        self.num_classes = num_classes
        self.precision: torch.dtype | None = None
        """what convolutions and matrix products are computed in, if it is not the type of the weights"""
        divided = stages(module, self.prefixes)
        self._owner = ownership(module, self.prefixes, divided)
        self._names = {
            layer: frozenset(name for name, owner in self._owner.items() if owner == layer) for layer in self.layers
        }
        self._pass: Chain | Whole
        self._pass = Chain(module, divided) if divided else Whole(module, self.prefixes[self.head][0])
        self._widths: dict[tuple[tuple[int, ...], int], int] = {}
        # What is known here tells whether it is random; other modules have to be tried, and count as random until then.
        foreign = any(not type(part).__module__.startswith(("torch.nn.", "perfed.nets.")) for part in module.modules())
        self._hidden_randomness = bool(divided) and foreign
        if self.input_shape and (foreign or not divided):
            self._try(self.input_shape)

    @property
    def head(self) -> str:
        """The last layer."""
        return self.layers[-1]

    @property
    def body(self) -> tuple[str, ...]:
        """Every layer but the head."""
        return self.layers[:-1]

    @property
    def head_path(self) -> str:
        """The dotted name of the head's module: the first one with state in the last layer."""
        return self._pass.head_path

    def layer_of(self, name: str) -> str:
        """The layer that owns a parameter or buffer."""
        try:
            return self._owner[name]
        except KeyError:
            raise NetError(f"No layer of the network owns {name!r}.") from None

    def names(self, *layers: str) -> frozenset[str]:
        """The parameters and buffers of these layers, by state name."""
        self._check(layers)
        return frozenset().union(*(self._names[layer] for layer in layers))

    def __call__(self, x: Tensor) -> Tensor:
        """The logits."""
        return self._run(self._pass.whole, x)

    def features(self, x: Tensor) -> Tensor:
        """What the head receives."""
        return self._run(self._pass.features, x)

    def computing(self) -> AbstractContextManager[object]:
        """Where modules are called one by one: the precision that the network computes in, or its compiled code."""
        if self.precision is None:
            return Tiles() if self._pass.tiled else nullcontext()
        return torch.autocast("cpu", dtype=self.precision, cache_enabled=False)  # a weight may move in between

    def compute_in(self, precision: torch.dtype | None) -> None:
        """Set the precision, if the network can be computed in it."""
        if precision is not None:
            halfbits.demand()
        self.precision = precision
        if precision is None or not self.input_shape:
            return
        try:
            self._silently(torch.zeros(2, *self.input_shape), len(self.layers))
        except RuntimeError as error:
            raise NetError(f"The network cannot be computed in {precision}: {error}.", "Leave precision out.") from None

    @property
    def compiled(self) -> bool:
        """Whether compiled code computes what it can: convolutions, networks of small ones, attention's heads."""
        return self._pass.compiled

    @compiled.setter
    def compiled(self, on: bool) -> None:
        self._pass.fuse(on)
        if on and not self.compiled:
            raise NetError(
                "kernels = 'compiled' is for small convolutions (at most 64 output channels and, for 5x5 filters, 64"
                " input channels) directly followed by ReLU and 2x2 max pooling in the outermost Sequential, for 3x3"
                " convolutions with 32, 48, ... or 256 channels in and out, stride and dilation 1, no groups and a"
                " padding by 0, 1 or 2 zeros, and for attention on maps of at most 256 positions"
                " with 8, 16, ... or 128 channels a head, and this network has none of them.",
                "Leave kernels out.",
            )

    @torch.no_grad()
    def ready(self) -> None:
        """Have everything at hand that computing needs, and see that it works, before a run begins."""
        self._pass.ready()
        if self.compiled and self.input_shape:
            try:
                with self._evaluating():
                    self(torch.zeros(2, *self.input_shape))
            except RuntimeError as error:
                what = f"The network cannot be computed by compiled kernels, whose maps have channels last: {error}"
                raise NetError(what, "Flatten maps with nn.Flatten or reshape, or leave kernels out.") from None

    def plain(self) -> Net:
        """This network, computed as torch does it and in full precision from now on."""
        self.precision, self.compiled = None, False
        return self

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """What takes small differences is computed in full precision."""
        held, self.precision = self.precision, None
        try:
            yield
        finally:
            self.precision = held

    @property
    def head_is_output(self) -> bool:
        """Whether the logits are what the head's module gives, untouched; False while the input shape is not known."""
        return self._pass.head_is_output

    def cut(self, trained: Collection[str]) -> int:
        """The largest k, at most the head's index, before which nothing is trained and the module can be cut.

        0 means that the forward pass cannot be divided.
        """
        self._check(trained)
        k = next((i for i, layer in enumerate(self.body) if layer in trained), len(self.body))
        return k if self._divisible(k) else 0

    def reusable(self, trained: Collection[str]) -> int:
        """The largest cut whose prefix is neither trained nor random: its output can be stored and used again."""
        return next(self.reusable_cuts(trained), 0)

    def reusable_cuts(self, trained: Collection[str]) -> Iterator[int]:
        """Every cut whose prefix is neither trained nor random, the largest first."""
        return (k for k in range(self.cut(trained), 0, -1) if self._divisible(k) and not self.stochastic(k))

    @property
    def cuts(self) -> list[int]:
        """Before which layers the forward pass can be divided."""
        return [k for k in range(1, len(self.layers)) if self._divisible(k)]

    @torch.no_grad()
    def width(self, x: Tensor, k: int) -> int:
        """How many values layers [0, k) give for each sample of inputs like these."""
        key = tuple(x.shape[1:]), k
        if key not in self._widths:
            self._widths[key] = self._silently(x.new_zeros(2, *x.shape[1:]), k).numel() // 2
        return self._widths[key]

    def run_prefix(self, x: Tensor, k: int) -> Tensor:
        """Layers [0, k) of the network."""
        self._demand(k)
        return self(x) if k == len(self.layers) else self._run(self._pass.prefix, x, k) if k else x

    def run_suffix(self, z: Tensor, k: int) -> Tensor:
        """Layers [k, end): `run_suffix(run_prefix(x, k), k)` equals `net(x)`."""
        self._demand(k)
        return z if k == len(self.layers) else self._run(self._pass.suffix, z, k) if k else self(z)

    def modules_from(self, k: int) -> list[nn.Module]:
        """The modules that layers [k, end) run, one after another."""
        self._demand(k)
        return self._pass.modules_from(k)

    def groups_from(self, k: int) -> list[list[nn.Module]]:
        """The same, and together those that compiled code computes as one."""
        self._demand(k)
        return self._pass.groups_from(k)

    def stochastic(self, k: int) -> bool:
        """Whether layers [0, k) draw random numbers in training: dropout and its like."""
        return k > 0 and (self._hidden_randomness or any(map(is_random, self._pass.modules_before(k))))

    @cached_property
    def batchnorm_names(self) -> frozenset[str]:
        """The state of every BatchNorm, found by module type at any depth, whatever it is called."""
        modules = self.module.named_modules(remove_duplicate=False)
        prefixes = tuple(f"{path}." for path, module in modules if isinstance(module, _BatchNorm))
        return frozenset(name for name in self._owner if name.startswith(prefixes))

    @property
    def has_batchnorm(self) -> bool:
        """Whether any module is a BatchNorm, with or without state."""
        return any(isinstance(module, _BatchNorm) for module in self.module.modules())

    def probe(self, input_shape: Sequence[int]) -> None:
        """Try a copy on two samples of this shape: does the network give logits, and where can it be cut?"""
        shape = tuple(input_shape)
        gives = self._try(shape)
        if gives != (2, self.num_classes):
            what = f"a tensor of shape {list(gives)}" if gives else "no tensor"
            raise NetError(
                f"For two samples of shape {list(shape)} the model returns {what}, not logits of shape"
                f" {[2, self.num_classes]}.",
                "Return one row of logits per sample, and pass the right num_classes.",
            )
        self.input_shape = shape

    def with_head(self, head: nn.Module, num_classes: int | None = None) -> Net:
        """A copy of the network with another module as its head, under the head's name."""
        module = copy.deepcopy(self.module)
        parent, _, name = self.head_path.rpartition(".")
        setattr(module.get_submodule(parent), name, head)
        changed = Net(module, self.prefixes, self.input_shape, num_classes or self.num_classes)
        changed._hidden_randomness |= self._hidden_randomness
        return changed

    def clone(self) -> Net:
        """A deep copy that shares nothing with this network."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        sizes = dict.fromkeys(self.layers, 0)
        for name, parameter in self.module.named_parameters():
            sizes[self._owner[name]] += parameter.numel()
        parts = ", ".join(f"{layer} {size:,}" for layer, size in sizes.items())
        return f"Net({parts}; {sum(sizes.values()):,} parameters)"

    @contextmanager
    def by_torch(self) -> Iterator[None]:
        """Where a network is only looked at: nothing is compiled for that."""
        compiled = self.compiled
        self._pass.fuse(False)
        try:
            yield
        finally:
            self._pass.fuse(compiled)

    @torch.no_grad()
    def _silently(self, x: Tensor, k: int) -> Tensor:
        """What layers [0, k) give, leaving no trace and compiling nothing."""
        with self._evaluating(), self.by_torch():
            return self.run_prefix(x, k)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Every module in evaluation, and afterwards as it was."""
        flags = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for part, flag in flags:
                part.training = flag

    def _run(self, part: Callable[..., Tensor], x: Tensor, *others: int) -> Tensor:
        """What a part of the pass gives, in full precision whatever it was computed in."""
        if self.precision is None and not self._pass.tiled:
            return part(x, *others)
        with self.computing():
            found = part(x, *others)
        return found if self.precision is None else found.float()

    def _divisible(self, k: int) -> bool:
        return k in (0, len(self.layers)) or (0 < k < len(self.layers) and self._pass.divisible(k, len(self.body)))

    def _demand(self, k: int) -> None:
        if not self._divisible(k):
            raise NetError(f"The network cannot be cut before layer {k}.", "Ask cut() for an index that works.")

    def _check(self, layers: Iterable[str]) -> None:
        for layer in layers:
            if layer not in self._names:
                raise unknown("layer", layer, self.layers)

    def _try(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        with self.by_torch():
            result = trial(self.module, self.head_path, shape, is_random)
        if isinstance(self._pass, Whole):
            self._pass.head_is_output = result.head_is_output
        self._hidden_randomness = result.body_is_random
        return result.output_shape
