"""FedBN: FedAvg without the BatchNorm layers, which stay with the client.

    (w_i, n_i) <- SGD on D_i from (w, n_i),    w <- sum_i |D_i| / |D| * w_i,    n_i: scale, shift, running statistics

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021.

Differences from the paper: none. BatchNorm layers are found by the type of the module, at any depth and under any name;
a network without them makes this FedAvg.
"""

from dataclasses import dataclass

from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection


@register("fedbn")
@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """Local batch normalisation."""

    title = "FedBN"
    cites = "Li et al.: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021"
    family = "split by layer"
    keeps = "every BatchNorm layer: scale, shift and running statistics"
    sends = "everything else"

    def private(self, part: Part, round: Round) -> Selection:
        """Keep all that belongs to a BatchNorm module."""
        return part.is_batchnorm
