"""Many clients in one batched step: a group's weights lie in one tensor, and a layer is one batched matrix product.

    Z_i = X_i W_i^T + b_i    for all clients i of a group at once

It is for networks of linear layers, where one client's step is too small to be worth a call, and for methods whose
local rule is cross-entropy by phases. Sums run in another order than one client at a time, so this is a numeric mode of
its own: equal to the plain one to 1e-5, not to the bit. Groups follow from the configuration and the order of clients
alone, so the number of workers changes nothing. Where the server takes the plain mean, a group sends its own mean in
place of an update per client: the first of its clients brings it, with the weight of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.core import rng
from perfed.core.client import Meter
from perfed.core.fit import Optimiser, Phase, batches, fitting, is_plain
from perfed.core.method import Method
from perfed.core.state import State, finite
from perfed.data.federation import Federation
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import ConfigError, StoreError, UpdateError
from perfed.nets.net import Net

GROUP_BYTES = 8 << 20
"""Weights of a group: about what a processor keeps near itself."""
SAMPLE_WISE = (nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus)
Step = Callable[[Tensor, Tensor, Tensor], None]
"""From every client's batch, the labels and the samples' weights in the loss."""
CURE = "Leave executor out, which computes one client at a time."


def refuse(method: Method, net: Net) -> None:
    """Refuse a method or network that cannot be computed as a cohort, saying why."""
    cls = type(method)
    if cls.train is not Method.train or cls.fit is not Method.fit or not is_plain(method.loss):
        raise ConfigError(
            f"executor = 'cohort' does not fit {cls.__name__}: a round is more than cross-entropy by phases.", CURE
        )
    if len(list(net.module.named_parameters(remove_duplicate=False))) > len(list(net.module.parameters())):
        what = "executor = 'cohort' is for layers with weights of their own, and this network uses some twice."
        raise ConfigError(what, CURE)
    odd = [m for m in net.modules_from(0) if type(m) not in (nn.Linear, nn.Flatten, *SAMPLE_WISE)]
    if odd or any(True for _ in net.module.buffers()):
        what = type(odd[0]).__name__ if odd else "a buffer"
        raise ConfigError(
            f"executor = 'cohort' is for networks of linear layers, and this one has {what}.",
            "Take net = 'mlp', or leave executor out, which computes one client at a time.",
        )


class Layers(torch.autograd.Function):
    """A linear layer of every client. Its gradients lie in memory as the weights do, which the fused step relies on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, weight)
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight = ctx.saved_tensors
        below, own, bias = ctx.needs_input_grad
        return (
            torch.bmm(slope, weight) if below else None,
            torch.bmm(slope.transpose(1, 2), x) if own else None,
            slope.sum(1) if bias else None,
        )


class Descents(torch.autograd.Function):
    """A linear layer of every client that steps while gradients pass: they are added to the weights and never stored.

    `anchor` is what autograd is asked about, so that it comes by here although the weights want no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lr: float, anchor: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.lr = weight, bias, lr
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        (x,) = ctx.saved_tensors
        below = torch.bmm(slope, ctx.weight) if ctx.needs_input_grad[0] else None
        ctx.weight.baddbmm_(slope.transpose(1, 2), x, alpha=-ctx.lr)
        if ctx.bias is not None:
            ctx.bias.add_(slope.sum(1), alpha=-ctx.lr)
        return below, None, None, None, None


@dataclass
class Group:
    """The clients of one batched step, the one with the most steps first."""

    tasks: list[Task]
    weights: State
    """every tensor of the network, one row per client"""
    x: Tensor
    y: Tensor
    starts: list[int]
    sizes: list[int]
    meters: list[Meter]


class CohortWorker(Worker):
    """Trains groups of clients at once; scores them as every worker does."""

    def __init__(self, federation: Federation, net: Net, method: Method, rounds: int, seed: int) -> None:
        refuse(method, net)
        super().__init__(federation, net, method, rounds, seed)
        model = sum(tensor.numel() * tensor.element_size() for tensor in self.plan.initial.values())
        self.group_size = max(1, GROUP_BYTES // model)
        cls = type(method)
        self.folds = (cls.combine, cls.verify, cls.schema) == (Method.combine, Method.verify, Method.schema)
        self._stacks: State = {}
        self._linear = {id(module): path for path, module in net.module.named_modules()}
        for phase in method.phases(self.newcomer(0, 1)):
            _check(phase)

    def jobs(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Neighbours train together; anything else is done one at a time."""
        if not tasks or tasks[0].op != "train":
            return super().jobs(tasks)
        return [list(range(len(tasks)))[at : at + self.group_size] for at in range(0, len(tasks), self.group_size)]

    def run_all(self, tasks: Sequence[Task]) -> list[Reply]:
        """Train a group, or do a single task of another kind."""
        if tasks[0].op != "train":
            return super().run_all(tasks)
        try:
            return self._train_group(tasks)
        except (UpdateError, StoreError) as error:  # one client's own state is bad: it alone must suffer
            if len(tasks) == 1:
                return [Reply(tasks[0].client, {}, {}, {"error": str(error), "seconds": 0.0})]
            return [reply for task in tasks for reply in self.run_all([task])]

    def _train_group(self, tasks: Sequence[Task]) -> list[Reply]:
        started = time.perf_counter()
        plans = [self._phases(task) for task in tasks]
        if any(plan != plans[0] for plan in plans):  # clients that train differently do not train together
            return [self._train_group([task])[0] for task in tasks]
        group = self._gather(tasks)
        optimiser = self.method.optimiser(self.round(tasks[0].t))
        for number, phase in enumerate(plans[0]):
            self._train_phase(group, phase, optimiser, f"fit/{number}")
        seconds = (time.perf_counter() - started) / len(tasks)
        replies = {reply.client: reply for reply in self._replies(group, seconds)}
        return [replies[task.client] for task in tasks]

    def _phases(self, task: Task) -> list[Phase]:
        phases = list(self.method.phases(self.described(task)))
        for phase in phases:
            _check(phase)
        return phases

    def _gather(self, tasks: Sequence[Task]) -> Group:
        """Lay the clients' networks and data side by side."""
        ordered = sorted(tasks, key=lambda task: (-self.federation.size(task.client), task.client))
        weights = self._room(len(tasks))
        for row, task in enumerate(ordered):
            self.fill({name: stack[row] for name, stack in weights.items()}, task)
        data, _ = self.federation.stacked([task.client for task in ordered], "train")
        sizes = [self.federation.size(task.client) for task in ordered]
        starts = [sum(sizes[:row]) for row in range(len(sizes))]
        return Group(ordered, weights, data.x, data.y, starts, sizes, [Meter() for _ in tasks])

    def _room(self, clients: int) -> State:
        """Memory for so many networks: the same one for every group, unless updates are to outlive it."""
        if not self.folds or (self._stacks and len(next(iter(self._stacks.values()))) < clients):
            self._stacks = {}
        self._stacks = self._stacks or {n: torch.empty(clients, *t.shape) for n, t in self.plan.initial.items()}
        return {name: stack[:clients] for name, stack in self._stacks.items()}

    def _train_phase(self, group: Group, phase: Phase, optimiser: Optimiser, purpose: str) -> None:
        if not phase.epochs:
            return
        trained = sorted(self.net.names(*phase.trains))
        if not trained:  # a body that is not there, or nothing unfrozen
            return
        cut = self._cut(group, phase)
        x = self._prefix(group, cut) if cut else group.x
        schedule = self._schedule(group, phase.epochs, optimiser.batch_size, purpose)
        suffix = self.net.modules_from(cut)
        make = self._stepping if optimiser.momentum or optimiser.weight_decay else self._descending
        step = make(group, trained, suffix, replace(optimiser, lr=optimiser.lr if phase.lr is None else phase.lr))
        for index, share in schedule:
            step(x[index.flatten()].view(*index.shape, *x.shape[1:]), group.y[index.flatten()], share)
        trainable = sum(self.plan.initial[name].numel() for name in trained)
        for meter, size in zip(group.meters, group.sizes, strict=True):
            meter.prefix_samples += size if cut else 0
            meter.enter(size * phase.epochs, -(-size // optimiser.batch_size) * phase.epochs, trainable)

    def _descending(self, group: Group, trained: list[str], suffix: Sequence[nn.Module], optimiser: Optimiser) -> Step:
        """Steps without momentum or weight decay: on the way back through the layers."""
        anchor = torch.zeros((), requires_grad=True)

        def step(x: Tensor, y: Tensor, share: Tensor) -> None:
            held = {name: stack[: len(x)] for name, stack in group.weights.items()}
            logits = self._forward(suffix, x, held, set(trained), optimiser.lr, anchor)
            losses = F.cross_entropy(logits.flatten(0, 1), y, reduction="none")
            torch.autograd.grad(losses, anchor, share.flatten(), allow_unused=True)

        return step

    def _stepping(self, group: Group, trained: list[str], suffix: Sequence[nn.Module], optimiser: Optimiser) -> Step:
        """Steps that need the gradients as a whole."""
        moving, sgd = [group.weights[name] for name in trained], [optimiser.over([])]

        def step(x: Tensor, y: Tensor, share: Tensor) -> None:
            if not sgd[0].parameters or len(sgd[0].parameters[0]) != len(x):  # some clients have finished
                fewer = optimiser.over([stack[: len(x)] for stack in moving])  # type: ignore[misc]
                if sgd[0].parameters:
                    fewer.inherit(sgd[0])
                sgd[0] = fewer
            leaves = [stack.detach().requires_grad_() for stack in sgd[0].parameters]
            held = {name: stack[: len(x)] for name, stack in group.weights.items()}
            logits = self._forward(suffix, x, held | dict(zip(trained, leaves, strict=True)))
            losses = F.cross_entropy(logits.flatten(0, 1), y, reduction="none")
            gradients = torch.autograd.grad(losses, leaves, share.flatten())
            with torch.no_grad():
                sgd[0].move(sgd[0].parameters, list(gradients))

        return step

    def _schedule(self, group: Group, epochs: int, size: int, purpose: str) -> list[tuple[Tensor, Tensor]]:
        """For every step the rows of each active client's batch and their weights in its loss; gaps weigh nothing.

        Clients are in order of their steps, so those that are still active are always the first ones.
        """
        orders: list[list[Tensor]] = []
        for task, start, n in zip(group.tasks, group.starts, group.sizes, strict=True):
            source = rng.generator(self.seed, purpose, task.t, task.client)
            own = [index + start for _ in range(epochs) for index in batches(n, size, source, whole=False)]
            orders.append(own)
        steps = []
        for step in range(len(orders[0])):
            rows = [own[step] for own in orders if step < len(own)]
            counts = torch.tensor([len(row) for row in rows])
            index = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            inside = torch.arange(index.shape[1]) < counts.unsqueeze(1)
            steps.append((index, inside / counts.unsqueeze(1)))
        return steps

    def _cut(self, group: Group, phase: Phase) -> int:
        """Before which layer the frozen ones end whose output is stored."""
        return fitting(self.net, phase, group.x, sum(group.sizes)) if phase.reuse else 0

    @torch.no_grad()
    def _prefix(self, group: Group, cut: int) -> Tensor:
        """The output of the frozen layers for every sample, client after client."""
        prefix = self.net.modules_from(0)[: -len(self.net.modules_from(cut))]
        parts = []
        for row, (start, size) in enumerate(zip(group.starts, group.sizes, strict=True)):
            own = {name: stack[row : row + 1] for name, stack in group.weights.items()}
            parts.append(self._forward(prefix, group.x[start : start + size].unsqueeze(0), own).squeeze(0))
        return torch.cat(parts)

    def _forward(
        self,
        modules: Sequence[nn.Module],
        x: Tensor,
        weights: State,
        moving: Set[str] = frozenset(),
        lr: float = 0.0,
        anchor: Tensor | None = None,
    ) -> Tensor:
        """The modules one after another, for (clients, samples, ...) at once; `moving` weights step on the way back."""
        for module in modules:
            if isinstance(module, nn.Linear):
                path = self._linear[id(module)]
                own = (x, weights[f"{path}.weight"], weights.get(f"{path}.bias"))
                steps = f"{path}.weight" in moving
                x = Descents.apply(*own, lr, anchor) if steps else Layers.apply(*own)  # type: ignore[no-untyped-call]
            else:
                x = x.flatten(2) if isinstance(module, nn.Flatten) else module(x)
        return x

    def _replies(self, group: Group, seconds: float) -> list[Reply]:
        found = []
        for row, task in enumerate(group.tasks):
            weights = {name: stack[row] for name, stack in group.weights.items()}
            kept = self.plan.pick(weights, self.plan.private(task.t))
            memory = {name: tensor for name, tensor in task.private.items() if name not in self.plan.parts}
            scalars = {
                "weight": float(group.sizes[row]),
                "extra": {},
                "meter": asdict(group.meters[row]),
                "seconds": seconds,
            }
            state = {} if self.folds else self.plan.pick(weights, self.plan.travels(task.t))
            found.append(Reply(task.client, state, {k: v.clone() for k, v in kept.items()} | memory, scalars))
        return self._folded(group, found) if self.folds else found

    def _folded(self, group: Group, replies: list[Reply]) -> list[Reply]:
        """The replies, the first of which brings the mean of all; clients whose values are not finite are left out."""
        t = group.tasks[0].t
        sent = [name for name, which in self.plan.travels(t).items() if which is not False]
        kept = [name for name, which in self.plan.private(t).items() if which is not False]
        mean = _mean(group, sent, range(len(replies)))
        good = list(range(len(replies)))
        if not all(map(finite, (*mean.values(), *(group.weights[name] for name in kept)))):
            good = [row for row in good if all(finite(group.weights[name][row]) for name in (*sent, *kept))]
            bad = "values that are not finite came out of its training."
            replies = [
                one if row in good else Reply(one.client, {}, {}, {"error": bad, "seconds": one.scalars["seconds"]})
                for row, one in enumerate(replies)
            ]
            mean = _mean(group, sent, good)
        if good:
            first = replies[good[0]]
            for row in good[1:]:
                replies[row].scalars["within"] = first.client
            first.scalars["weight"] = float(sum(group.sizes[row] for row in good))
            state = self.plan.pick(mean, self.plan.travels(t))
            replies[good[0]] = replace(first, state=state)
        return replies


def _mean(group: Group, names: Sequence[str], rows: Sequence[int]) -> State:
    """The mean of these clients' tensors, weighted by their sizes."""
    total = sum(group.sizes[row] for row in rows)
    shares = torch.tensor([group.sizes[row] / total for row in rows])
    found = {}
    for name in names:
        stack = group.weights[name]
        some = stack if len(rows) == len(stack) else stack[list(rows)]
        found[name] = (shares @ some.flatten(1)).view(stack.shape[1:])
    return found


def _check(phase: Phase) -> None:
    if phase.loss or phase.after_epoch or phase.after_step or phase.features is not None:
        raise ConfigError("executor = 'cohort' does not fit this method: a phase has a loss or hooks of its own.", CURE)
