"""One client at a time: the code that every executor runs, whether in this process, in a pool or at a site."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.core import rng
from perfed.core.client import Client
from perfed.core.fit import batches, pieces
from perfed.core.method import Method, probabilities
from perfed.core.plan import Plan, Round
from perfed.core.prefix import Prefixes
from perfed.core.state import Scalars, State
from perfed.data.federation import Federation, Split
from perfed.errors import ConfigError, StoreError, UpdateError
from perfed.nets.net import Net
from perfed.nets.subnets import is_sampling

EVAL_BATCH = 256
Operation = Literal["train", "evaluate", "new", "external"]


@dataclass(frozen=True)
class Kept:
    """What is known of a private state that lies with its client: its sum, and the last committed round and sum."""

    sha: str = ""
    round: int = 0
    committed: str = ""


@dataclass(frozen=True)
class Task:
    """Work on one client: what it is, when, what the client received and what it remembers."""

    op: Operation
    client: int
    t: int
    since: int
    received: State
    private: State
    options: Scalars = field(default_factory=dict)
    kept: Kept | None = None
    """instead of `private`, where the client itself keeps that"""


@dataclass(frozen=True)
class Reply:
    """What came of a task: the update or the measured tensors, the client's memory, and plain scalars."""

    client: int
    state: State
    private: State
    scalars: Scalars
    kept: str | None = None
    """the sum of a private state that stays with its client, instead of the state"""

    @property
    def error(self) -> str | None:
        """Why the client could not do its work, if it could not."""
        value = self.scalars.get("error")
        return None if value is None else str(value)


class Worker:
    """Computes tasks on one network instance that it fills anew for every client."""

    folds = False
    """whether clients that train together send one mean, and not an update each"""

    def __init__(self, federation: Federation, net: Net, method: Method, rounds: int, seed: int) -> None:
        self.federation, self.net, self.method = federation, net, method
        self.rounds, self.seed = rounds, seed
        self.plan = Plan(method, net, rounds)
        self.prefixes = Prefixes()
        self._layout = _lay_out(net, federation.input_shape)
        for k in net.cuts:  # known from the start, so that no round is the one that finds out
            net.width(torch.zeros(2, *federation.input_shape), k)
        self._tensors: Mapping[str, Tensor] = net.module.state_dict()
        self._precision, self._compiled = net.precision, net.compiled

    def jobs(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Which tasks, by their places, are done together; here each alone."""
        return [[number] for number in range(len(tasks))]

    def run_all(self, tasks: Sequence[Task]) -> list[Reply]:
        """Do the tasks of one job."""
        return [self.run(task) for task in tasks]

    def run(self, task: Task) -> Reply:
        """Do one task. What goes wrong with a client's own data or state is told in the reply."""
        started = time.perf_counter()
        try:
            client = self.client(task)
            reply = self._train(client) if task.op == "train" else self._measure(client, task)
        except (UpdateError, StoreError) as error:
            reply = Reply(task.client, {}, {}, {"error": str(error)})
        reply.scalars["seconds"] = time.perf_counter() - started
        return reply

    def client(self, task: Task) -> Client:
        """The client of a task, its network filled with the initial, the received and its own private values."""
        self.fill(self._tensors, task)
        self.net.precision, self.net.compiled = self._precision, self._compiled
        rng.seed_torch(rng.derive(self.seed, f"torch/{task.op}", task.t, task.client))
        return self.described(task)

    def described(self, task: Task) -> Client:
        """The client of a task, with whatever the network holds just now."""
        plan = self.plan
        return Client(
            id=task.client,
            round=Round(task.t, self.rounds),
            net=self.net,
            data=self.federation.client(task.client),
            plan=plan,
            received=task.received,
            memory={name: tensor for name, tensor in task.private.items() if name not in plan.parts},
            seed=self.seed,
            num_clients=self.federation.num_clients,
            prefixes=self.prefixes,
        )

    def fill(self, tensors: Mapping[str, Tensor], task: Task) -> None:
        """Write these tensors of the network of a task's client: initial, received and its own private values."""
        plan = self.plan
        down, kept = (
            {name: which[name] for name in tensors}
            for which in (plan.download(task.t, task.since), plan.private(task.since))
        )
        bare = {name: True for name in tensors if not self._covered(name, task, down[name], kept[name])}
        plan.place(tensors, bare, plan.initial)
        plan.place(tensors, down, task.received)
        plan.place(tensors, kept, task.private)

    def round(self, t: int) -> Round:
        """Round t of this run."""
        return Round(t, self.rounds)

    def newcomer(self, client: int, t: int) -> Client:
        """A client that takes part for the first time in round t, with the network's first values."""
        received = self.plan.pick(self.plan.initial, self.plan.download(t, 0))
        return self.client(Task("train", client, t, 0, received, {}))

    @staticmethod
    def _covered(name: str, task: Task, down: object, kept: object) -> bool:
        return (down is True and name in task.received) or (kept is True and name in task.private)

    def _train(self, client: Client) -> Reply:
        update = self.method.train(client)
        if strange := sorted(update.scalars.keys() - set(self.method.scalars)):
            raise ConfigError(f"{self.method.title} sends {strange[0]!r} unannounced.", "Name it in scalars.")
        kept = self.plan.pick(client.weights(), self.plan.private(client.round.t))
        scalars = {"weight": update.weight, "extra": update.scalars, "meter": asdict(client.meter)}
        return Reply(client.id, update.state, kept | client.memory, scalars)

    def _measure(self, client: Client, task: Task) -> Reply:
        method, seen = self.method, task.options.get("seen", True)
        self.personal(client)
        if task.op in ("new", "external"):
            if task.options.get("adapt", False):
                self.prepare(client, seen=True)
            pooled = self.federation.pooled_test() if task.op == "new" else self.federation.external
            assert pooled is not None
            client.net.module.eval()
            parts = [probabilities(method, client, x) for x in pieces(self._arrange(pooled.x), EVAL_BATCH)]
            return Reply(client.id, {"probabilities": torch.cat(parts)}, {}, {})
        if "stack" in task.options:
            return Reply(client.id, self._score_stack(client, task.options["stack"]), {}, {})
        state = {f"before/{name}": value for name, value in self._score(client).items()}
        if task.options.get("adapt", False) or not seen:
            self.prepare(client, seen=seen)
            state |= {f"after/{name}": value for name, value in self._score(client).items()}
        return Reply(client.id, state, {}, {})

    def personal(self, client: Client) -> None:
        """Put the client's personal model into its network, as it is before any adaptation."""
        self.method.personal(client)
        if self.method.buffers == "reset":
            self._refresh(client)

    @torch.no_grad()
    def _refresh(self, client: Client) -> None:
        """Take BatchNorm statistics that do not last anew from the client's own training data."""
        module, data = client.net.module, client.data.train
        layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta = [layer.momentum for layer in layers]
        module.train()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over the batches
        for index in batches(len(data), EVAL_BATCH, client.generator("refresh"), whole=True):
            client.net(data.x[index])
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum

    def prepare(self, client: Client, *, seen: bool) -> None:
        """Adapt the personal model; a client that never took part joins first."""
        if not seen:
            self.method.join(client)
        self.method.adapt(client)

    def _score(self, client: Client) -> State:
        client.net.module.eval()
        found: State = {}
        for part, data in (("test", client.data.test), ("val", client.data.val)):
            found |= {f"{part}/{name}": value for name, value in self._sums(client, data).items()}
        return found

    @torch.no_grad()
    def _sums(self, client: Client, data: Split) -> State:
        """The confusion matrix, the summed loss, and the sums of the method's own measures."""
        classes = self.federation.num_classes
        zero = torch.zeros((), dtype=torch.float64)
        sums: State = {"confusion": torch.zeros(classes, classes, dtype=torch.int64), "loss": zero}
        sums |= {f"measure/{name}": zero for name in self.method.measured(self.net)}
        for x, y in zip(pieces(self._arrange(data.x), EVAL_BATCH), pieces(data.y, EVAL_BATCH), strict=True):
            scores = self.method.predict(client, x)
            pairs = torch.bincount(y * classes + scores.argmax(dim=1), minlength=classes * classes)
            sums["confusion"] = sums["confusion"] + pairs.view(classes, classes)
            sums["loss"] = sums["loss"] + F.cross_entropy(scores, y, reduction="sum").double()
            for name, values in self.method.measures(client, scores, y).items():
                if f"measure/{name}" not in sums:
                    raise ConfigError(f"{self.method.title} measures {name!r} unannounced.", "Name it in measured.")
                sums[f"measure/{name}"] = sums[f"measure/{name}"] + values.double().sum()
        return sums

    @torch.no_grad()
    def _score_stack(self, client: Client, members: Sequence[int]) -> State:
        """What `_score` finds for each of several clients that predict with this client's model; a row for each."""
        client.net.module.eval()
        classes, many = self.federation.num_classes, len(members)
        found: State = {}
        for part in ("test", "val"):
            data, owner = self.federation.stacked(members, part)
            confusion = torch.zeros(many * classes * classes, dtype=torch.int64)
            loss = torch.zeros(many, dtype=torch.float64)
            sizes = (EVAL_BATCH,) * 3
            for x, y, who in zip(*map(pieces, (self._arrange(data.x), data.y, owner), sizes), strict=True):
                scores = self.method.predict(client, x)
                cells = (who * classes + y) * classes + scores.argmax(dim=1)
                confusion += torch.bincount(cells, minlength=len(confusion))
                loss.index_add_(0, who, F.cross_entropy(scores, y, reduction="none").double())
            found |= {
                f"before/{part}/confusion": confusion.view(many, classes, classes),
                f"before/{part}/loss": loss,
            }
        return found

    def _arrange(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=self._layout) if x.dim() == 4 else x


@torch.no_grad()
def _lay_out(net: Net, input_shape: tuple[int, ...]) -> torch.memory_format:
    """Put convolutions into the channels-last layout, which is faster, unless the forward pass is written against it.

    `x.view(len(x), -1)` of a feature map works in the default layout alone.
    """
    module = net.module
    narrow = any(is_sampling(part) and part.in_channels < 16 for part in module.modules())  # type: ignore[operator]
    if narrow or not any(parameter.dim() == 4 for parameter in module.parameters()):
        return torch.contiguous_format
    flags = [(part, part.training) for part in module.modules()]
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with net.by_torch():
            module.eval()(torch.zeros(2, *input_shape).contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return torch.contiguous_format
    finally:
        for part, flag in flags:
            part.training = flag
    return torch.channels_last
