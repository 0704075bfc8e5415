"""FLOPs by torch's own formulas for its operators.

`torch.utils.flop_counter.FlopCounterMode` counts the same and by module; it loads torch's compiler at its first call,
which takes over a second and is of no use here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class CountFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is computed inside a `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the compiler is loaded to keep it off

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, rule = dict(kwargs or {}), flop_registry.get(func._overloadpacket)
        if rule is None:  # it may be made of operators that have one
            with self:
                found = func.decompose(*args, **given)
            if found is not NotImplemented:
                return found
        out = func(*args, **given)
        if rule is not None:
            self.total += int(rule(*args, **given, out_val=out))
        return out
