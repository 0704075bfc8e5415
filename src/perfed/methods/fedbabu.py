"""FedBABU: only the body is trained and shared; the head keeps its common random start until fine-tuning.

    b_i <- SGD on D_i from b with h = h_0,    b <- sum_i |D_i| / |D| * b_i,    at the end: fine-tune on D_i

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022.

Differences from the paper: the head is left out of the optimiser and of the messages instead of having a learning rate
of zero, so weight decay and momentum cannot move it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perfed.core.client import Client
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection


@register("fedbabu")
@dataclass(frozen=True, kw_only=True)
class FedBABU(Method):
    """Body aggregation and body update."""

    finetune_epochs: int = 5
    """epochs of the final fine-tuning (the paper's tau_f)"""
    finetune: Literal["all", "head", "body"] = "all"
    """which layers the final fine-tuning trains"""

    title = "FedBABU"
    cites = "Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022"
    family = "split by layer"
    keeps = "nothing until the final fine-tuning"
    sends = "the body"

    def travels(self, part: Part, round: Round, shared: Selection) -> Selection:
        """Everything but the head, which is the same everywhere."""
        return False if part.is_head else shared

    def phases(self, client: Client) -> Sequence[Phase]:
        """Train the body below the frozen head."""
        return [Phase(self.epochs, trains=client.net.body)]
