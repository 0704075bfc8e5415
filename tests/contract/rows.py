"""One row per registered method: small settings under which the contract suite runs it. A missing row is a failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """How a method is tried: its hyper-parameters, its network, and whether it keeps something."""

    hyper: dict[str, Any] = field(default_factory=dict)
    net: str = "mlp"
    private: bool = True
    travels: bool = True


ROWS: dict[str, Row] = {
    "fedavg": Row(private=False),
    "fedavg+ft": Row({"finetune_epochs": 2}, private=False),
    "fedbabu": Row({"finetune_epochs": 2}, private=False),
    "fedper": Row(),
    "fedrep": Row({"head_epochs": 2}),
    "lgfedavg": Row(),
    "local": Row(travels=False),
}
