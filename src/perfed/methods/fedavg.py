"""FedAvg: clients train the whole network, the server averages it.

    w_i <- w - lr * sum of gradients on D_i,    w <- sum_i |D_i| / |D| * w_i

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017.

Differences from the paper: none. BatchNorm statistics are averaged like weights.
"""

from dataclasses import dataclass

from perfed.core.method import Method
from perfed.core.registry import register


@register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """One model for all: the contract's default answers."""

    title = "FedAvg"
    cites = "McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017"
