"""What happens around a head inside a module whose forward pass cannot be read: seen through hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perfed.errors import NetError


class _Reached(BaseException):
    """Ends a forward pass at the head. Not an Exception, so that no model's own handler swallows it."""

    def __init__(self, features: Any) -> None:
        super().__init__()
        self.features = features


def at_head(module: nn.Module, head: str, x: Tensor) -> Tensor:
    """The head's first argument; the head and what follows it are not run."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(next(iter((*args, *kwargs.values())), None))

    hook = module.get_submodule(head).register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        module(x)
    except _Reached as reached:
        features = reached.features
    else:
        raise _unused(head)
    finally:
        hook.remove()
    if not isinstance(features, Tensor):
        raise NetError(f"The head {head!r} does not receive a tensor.", "Name a module that receives features.")
    return features


@dataclass(frozen=True)
class Trial:
    """What two samples showed: the output's shape (empty when it is no tensor) and how it came about."""

    output_shape: tuple[int, ...]
    head_is_output: bool
    body_is_random: bool


def trial(
    module: nn.Module, head: str, input_shape: tuple[int, ...], known: Callable[[nn.Module], bool] = lambda _: False
) -> Trial:
    """Run a copy of the module on two samples, as in evaluation and as in training.

    Modules that are known to be random are quiet, so that what is hidden beside them shows.
    The module's buffers, its training flag and the global random state stay as they are.
    """
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    source = torch.Generator().manual_seed(0)
    x = torch.rand(2, *input_shape, generator=source).to(like.device, like.dtype)
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        evaluating = _observe(copy.deepcopy(module).eval(), head, x)
        awake = copy.deepcopy(module).train()
        for part in [part for part in awake.modules() if known(part)]:
            part.eval()
        training = _observe(awake, head, x)
    return Trial(
        evaluating.output_shape,
        evaluating.head_is_output and training.head_is_output,
        evaluating.body_is_random or training.body_is_random,
    )


@dataclass
class _Call:
    """One call of the head: what it received and gave."""

    one_tensor: bool
    after_random: bool
    output: Any = None
    version: int = 0


def _observe(module: nn.Module, head: str, x: Tensor) -> Trial:
    calls: list[_Call] = []
    start = _random_state(x)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        one_tensor = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        calls.append(_Call(one_tensor, not torch.equal(start, _random_state(x))))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls[-1].output = output
        calls[-1].version = output._version if isinstance(output, Tensor) else 0

    named = module.get_submodule(head)
    named.register_forward_pre_hook(before, with_kwargs=True)
    named.register_forward_hook(after)
    try:
        output = module(x)
    except Exception as failure:
        raise NetError(
            f"The model cannot run on samples of shape {list(x.shape[1:])}: {failure}",
            "Check input_shape (channels, height, width).",
        ) from failure
    if not calls:
        raise _unused(head)
    shape = tuple(output.shape) if isinstance(output, Tensor) else ()
    direct = len(calls) == 1 and calls[0].one_tensor and _is_untouched(output, calls[0])
    return Trial(shape, direct, calls[0].after_random)


def _is_untouched(output: Any, call: _Call) -> bool:
    """Whether the model returned what its head gave.

    Equal values do not suffice: a learnable scale that happens to be 1 would be lost. It must be the very
    tensor, or a view of all of it, with no change in place since (which would have raised its version).
    """
    given = call.output
    return (
        isinstance(output, Tensor)
        and isinstance(given, Tensor)
        and (output.shape, output.stride()) == (given.shape, given.stride())
        and output.data_ptr() == given.data_ptr()
        and output._version == call.version
    )


def _random_state(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


def _unused(head: str) -> NetError:
    return NetError(
        f"The model's forward pass never runs its head {head!r} as a module.",
        "Name the module whose call makes the logits.",
    )
