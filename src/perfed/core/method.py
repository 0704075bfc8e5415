"""The contract: a method answers what stays private, how a client learns, how the server combines, what predicts.

The defaults are FedAvg. A method is a frozen dataclass that overrides the answers in which it differs; its fields are
its hyper-parameters. It has no other state: what must last is named tensors, on the client or on the server.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from perfed.core.client import Batch, Client, Update
from perfed.core.combine import merge, weighted_mean
from perfed.core.fit import Optimiser, Phase, fit, plain
from perfed.core.plan import Part, Round
from perfed.core.server import Peer, Server
from perfed.core.state import Selection, State, check
from perfed.nets.net import Net


@dataclass(frozen=True, kw_only=True)
class Method:
    """FedAvg's answers, for every method to start from."""

    lr: float = 0.01
    """learning rate of the local SGD"""
    lr_decay: float = 1.0
    """factor on the learning rate after every round"""
    momentum: float = 0.0
    """momentum of the local SGD, fresh in every round"""
    nesterov: bool = False
    """Nesterov's form of the momentum"""
    weight_decay: float = 0.0
    """L2 penalty of the local SGD"""
    epochs: int = 1
    """passes over a client's data per round"""
    batch_size: int = 10
    """samples per step; the last batch may be smaller, none is dropped"""
    finetune_epochs: int = 0
    """epochs of fine-tuning on a client's own data before it is scored (`+ft` makes it 10)"""
    finetune: Literal["all", "head", "body"] = "all"
    """which layers fine-tuning trains"""
    join_epochs: int = 10
    """epochs of adaptation for a client that never took part"""
    buffers: Literal["average", "private", "reset"] = "average"
    """what happens to BatchNorm statistics and other buffers: averaged, kept by the client, or fresh every round"""

    title: ClassVar[str] = ""
    """the method's name as papers write it"""
    cites: ClassVar[str] = ""
    """authors, title, venue and year"""
    family: ClassVar[str] = "global"
    keeps: ClassVar[str] = "nothing"
    """what is private, in words"""
    sends: ClassVar[str] = "the whole network"
    """what travels, in words"""
    scalars: ClassVar[tuple[str, ...]] = ()
    """names of the plain numbers that an update brings beside its weight; `cost.NAME` is added up in the ledger"""
    labels_stay: ClassVar[bool] = False
    """whether the server must not learn which classes a site has: its scores tell right from wrong, and no class"""

    # What the network is, and which of it stays at home

    def build(self, net: Net) -> Net:
        """Change the network: branches, attention, a second head."""
        return net

    def private(self, part: Part, round: Round) -> Selection:
        """Which elements of this tensor a client keeps: none, all, or a mask."""
        return False

    def travels(self, part: Part, round: Round, shared: Selection) -> Selection:
        """Which of the shared elements are sent in this round; less than all where a layer is frozen for everyone."""
        return shared

    def stage(self, round: Round) -> Hashable:
        """Rounds of the same stage cost the same per sample; the ledger measures each stage once."""
        return 0

    # A client's round

    def phases(self, client: Client) -> Sequence[Phase]:
        """What a local round trains, one phase after another."""
        return [Phase(self.epochs, trains=client.net.layers)]

    @plain
    def loss(self, client: Client, batch: Batch) -> Tensor:
        """What one step minimises."""
        return F.cross_entropy(client.logits(batch), batch.y)

    def train(self, client: Client) -> Update:
        """A whole local round."""
        self.fit(client, self.phases(client))
        return client.update()

    def rehearse(self, client: Client) -> None:
        """A local round for counting its FLOPs, where the clients' secrets are not at hand."""
        self.train(client)

    def fit(self, client: Client, phases: Sequence[Phase], purpose: str = "fit") -> None:
        """Train phases with this method's loss and optimiser."""
        fit(client, phases, self.loss, self.optimiser(client.round), purpose)

    def optimiser(self, round: Round) -> Optimiser:
        """The local optimiser of a round."""
        return Optimiser(
            lr=self.lr * self.lr_decay ** (round.t - 1),
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
        )

    # The server's side

    def start(self, net: Net, clients: int, initial: State) -> State:
        """The server's state before the first round."""
        return dict(initial)

    def send(self, server: Server, peer: Peer, round: Round) -> State:
        """What one client downloads."""
        plan = server.plan
        return plan.pick(server.state, plan.download(round.t, peer.since))

    def offers(self, server: Server, round: Round) -> State:
        """What a download may hold beside all that `send` makes of the first state: right names, shapes and types."""
        return {}

    def schema(self, server: Server, round: Round) -> State:
        """What an update must look like: tensors of the right names, shapes and types."""
        return server.plan.pick(server.plan.initial, server.plan.travels(round.t))

    def verify(self, server: Server, state: State, sender: str, round: Round) -> None:
        """Refuse an update that is not what the schema declares."""
        check(state, self.schema(server, round), sender)

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """The server's state after a round: the mean of what arrived, weighted by data size."""
        mean = weighted_mean([u.state for u in updates], [u.weight for u in updates])
        return merge(server.state, server.plan.travels(round.t), mean)

    # What a client predicts with

    def personal(self, client: Client) -> None:
        """Put the client's personal model into its network; by default it is what it received and kept."""

    def adapt(self, client: Client) -> None:
        """Prepare the personal model for scoring: fine-tuning, where the method has it."""
        if self.finetune_epochs:
            self.fit(client, [Phase(self.finetune_epochs, self.chosen(client.net))], "adapt")

    @property
    def adapts(self) -> bool:
        """Whether adaptation changes anything, so that scores before and after it differ."""
        return bool(self.finetune_epochs) or type(self).adapt is not Method.adapt

    def join(self, client: Client) -> None:
        """Make a personal model for a client that never took part: learn what would be private, else all."""
        kept = {
            client.plan.parts[name].layer
            for name, which in client.plan.private(client.round.t).items()
            if which is not False and not client.plan.parts[name].is_buffer
        }
        layers = tuple(layer for layer in client.net.layers if layer in kept) or self.chosen(client.net)
        self.fit(client, [Phase(self.join_epochs, layers)], "join")

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Scores whose softmax are the class probabilities."""
        return client.net(x)

    def measures(self, client: Client, scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Further values per sample to be averaged and reported as `local.NAME.mean`, from what `predict` returned."""
        return {}

    def measured(self, net: Net) -> tuple[str, ...]:
        """The names that `measures` gives; every client reports all of them, and no other."""
        return ()

    def chosen(self, net: Net) -> tuple[str, ...]:
        """The layers that fine-tuning trains."""
        return {"all": net.layers, "head": (net.head,), "body": net.body}[self.finetune]


@torch.no_grad()
def probabilities(method: Method, client: Client, x: Tensor) -> Tensor:
    """The client's class probabilities."""
    return method.predict(client, x).softmax(dim=1)
