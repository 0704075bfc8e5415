"""Local: every client trains alone from the common initial weights.

    w_i <- w_i - lr * sum of gradients on D_i

The lower bound that every personalised method must beat. Differences from a paper: none to differ from.
"""

from dataclasses import dataclass

from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection


@register("local")
@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Everything is private, nothing travels."""

    title = "Local"
    cites = "training without federation"
    family = "local"
    keeps = "the whole network"
    sends = "nothing"

    def private(self, part: Part, round: Round) -> Selection:
        """Keep every tensor."""
        return True
