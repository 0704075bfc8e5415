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
    secret: bool = True
    """whether what is kept is never sent; a variate's first change is the variate, a teacher is what was sent before"""
    predicts: bool = True
    """whether what is kept, if anything, reaches the prediction"""
    fused: bool = True
    """whether kernels = "compiled" is for the network that the method makes; where not, it is refused"""
    rough: float = 0.1
    """how far off two rounds in bfloat16 may be, as a part of the way that weights go in float32"""


ROWS: dict[str, Row] = {
    "anti": Row({"unfreeze": (0, 2), "finetune_epochs": 2}, private=False),
    "apfl": Row(),
    "cd2pfed": Row(),
    "ditto": Row(),
    "fedavg": Row(private=False),
    "fedavg+ft": Row({"finetune_epochs": 2}, private=False),
    "fedbabu": Row({"finetune_epochs": 2}, private=False),
    "fedbn": Row(net="batchnorm", fused=False, rough=0.3),
    "fedbsd": Row({"head_epochs": 2}),
    "fedem": Row({"M": 2}, fused=False),
    "fedfomo": Row({"M": 3}, secret=False),
    "fedma": Row(private=False),
    "fedmtl": Row(secret=False),
    "fedpac": Row(private=False),
    "fedper": Row(),
    "fedprox": Row(private=False),
    "fedrep": Row({"head_epochs": 2}),
    "fedrod": Row(),
    "l2gd": Row(secret=False),
    "lgfedavg": Row(),
    "local": Row(travels=False),
    "perfedavg": Row(private=False),
    "pfedc": Row(),
    "pfedme": Row(rough=0.4),
    "pfedsd": Row(secret=False),
    "privacypfedc": Row(),
    "pse": Row({"lr": 0.02, "batch_size": 50}, net="conv3attn", secret=False, rough=0.8),
    "scaffold": Row(secret=False, predicts=False),
    "vanilla": Row({"unfreeze": (0, 2), "finetune_epochs": 2}, private=False),
}
