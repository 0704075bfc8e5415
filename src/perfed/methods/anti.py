"""Anti scheduling: FedBABU whose base layers are unfrozen one after another, from the output to the input.

    b_{K-k+1} is trained and sent in the rounds t > t_k,   t_1 <= ... <= t_K;   h = h_0 until the final fine-tuning

Jang, Choi: Personalized Federated Learning via Sequential Layer Expansion in Representation Learning. 2024.

Differences from the paper: those of Vanilla scheduling. The output of the layers that are still frozen below is
computed once per client and round, and while these have their first weights it is kept over rounds (`core/prefix.py`),
so that early rounds are cheap.
"""

from dataclasses import dataclass

from perfed.core.registry import register
from perfed.methods.vanilla import Vanilla


@register("anti")
@dataclass(frozen=True, kw_only=True)
class Anti(Vanilla):
    """The layer nearest to the head learns first."""

    title = "Anti scheduling"

    def order(self, body: tuple[str, ...]) -> tuple[str, ...]:
        """From the head towards the input."""
        return body[::-1]
