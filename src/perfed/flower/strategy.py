"""A Flower Strategy, for a ServerApp of one's own: Flower's loop carries the messages, the rounds stay perfed's.

    strategy = Strategy(context.run_config)
    strategy.start(grid)
    strategy.result.table()

Flower's loop asks what to send and hands over what came back; the run itself goes on in a thread, which waits for it.
So every method fits, personal downloads and private states included, and a run that was cut short goes on: rounds that
are committed already pass without a message.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result as FlowerResult
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from flwr.supercore import log

from perfed import config as configuration
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Progress
from perfed.engine.worker import Reply, Task
from perfed.errors import ConfigError
from perfed.flower.coordinate import SITES_NAME, TERMS, Hooks, coordinate, words_of
from perfed.flower.nodes import Nodes, Sent, StoppedError
from perfed.flower.payload import write_state
from perfed.result import Result


@dataclass(frozen=True)
class Batch:
    """Tasks that the run waits for."""

    nodes: Nodes
    tasks: Sequence[Task]

    @property
    def trains(self) -> bool:
        """Whether it is a round's training; all else is scoring."""
        return self.tasks[0].op == "train"


@dataclass(frozen=True)
class Ended:
    """The run is over, well or not."""

    result: Result | None = None
    error: BaseException | None = None


class Strategy(FlowerStrategy):
    """A run's rounds as a Flower Strategy; the words are those of the run configuration."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        self.words = dict(words)
        plain = {key: value for key, value in words_of(words).items() if key not in (*TERMS, "out")}
        self.config = configuration.resolve({"data": SITES_NAME} | plain)
        self.rounds = self.config.rounds
        self._posted: queue.Queue[Batch | Ended] = queue.Queue()
        self._answers: queue.Queue[list[Reply] | None] = queue.Queue()
        self._next: Batch | Ended | None = None
        self._sent: list[tuple[Message, Task]] = []
        self._thread: threading.Thread | None = None
        self._simulation: Simulation | None = None
        self._scores: dict[int, dict[str, float]] = {}
        self._timeout = 3600.0

    @property
    def result(self) -> Result:
        """What the run found, once it has ended."""
        if not isinstance(self._next, Ended) or self._next.result is None:
            raise StoppedError("The run has not ended.", "Call start.")
        return self._next.result

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> FlowerResult:
        """Run to the end. First weights and rounds are the run's own words; `timeout` is a round's deadline."""
        if initial_arrays:
            raise ConfigError("initial_arrays has no effect: the first weights follow from the seed.", "Leave it out.")
        if num_rounds not in (None, self.rounds):
            raise ConfigError(f"num_rounds = {num_rounds} is not the run's {self.rounds}.", "Leave it out.")
        self._timeout = timeout
        others = (timeout, train_config, evaluate_config, evaluate_fn)
        try:
            return super().start(grid, ArrayRecord(), self.rounds, *others)
        finally:
            self.close()

    def close(self) -> None:
        """End the run's thread; what is committed stays."""
        if self._thread and not isinstance(self._next, Ended):
            self._answers.put(None)
            self._thread.join(60)

    def summary(self) -> None:
        """Say what is run."""
        log(INFO, "\t└──> perfed: %s over %s rounds", self.config.method["name"], self.rounds)

    # Flower's loop

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round's training; none if the round was committed before."""
        self._begin(grid)
        batch = self._wait()
        due = isinstance(batch, Batch) and batch.trains and batch.tasks[0].t == server_round
        return self._messages(batch) if due and isinstance(batch, Batch) else []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The server's state after a round, as the method combines it."""
        if not self._next or isinstance(self._next, Ended) or not self._sent:
            return self._arrays(), None
        found = self._deliver(replies)
        self._wait()
        good = sum(reply.error is None for reply in found)
        return self._arrays(), MetricRecord({"replies": good, "failures": len(found) - good})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages that score clients, in rounds that are scored."""
        self._begin(grid)
        batch = self._wait()
        return self._messages(batch) if isinstance(batch, Batch) and not batch.trains else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The round's scores; what more the run wants to know of clients before the next round is asked here."""
        if self._sent:
            self._deliver(replies)
        while isinstance(batch := self._wait(), Batch) and not batch.trains:
            self._deliver(self._grid.send_and_receive(self._messages(batch), timeout=self._timeout))
        scores = self._scores.get(server_round)
        return MetricRecord(dict(scores)) if scores else None

    # The run's thread

    def _begin(self, grid: Grid) -> None:
        if self._thread:
            return
        self._grid = grid
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            result = coordinate(self._grid, self.words, Hooks(self._watch, self._opened, self._carry))
            self._posted.put(Ended(result))
        except BaseException as error:
            self._posted.put(Ended(error=error))

    def _opened(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def _watch(self, now: Progress) -> None:
        if now.doing == "done" and now.metrics:
            self._scores[now.t] = {key: value for key, value in now.metrics.items() if key.startswith("local.")}

    def _carry(self, nodes: Nodes, tasks: Sequence[Task]) -> list[Reply]:
        if not tasks:
            return []
        self._posted.put(Batch(nodes, tasks))
        found = self._answers.get()
        if found is None:
            raise StoppedError("Flower's loop ended before the run did.", "Start it again.")
        return found

    # Between the two

    def _wait(self) -> Batch | Ended:
        """What the run waits for next."""
        if self._next is None:
            self._next = self._posted.get()
        if isinstance(self._next, Ended) and self._next.error:
            raise self._next.error
        return self._next

    def _messages(self, batch: Batch) -> list[Message]:
        batch.nodes.address.refresh()
        where = [(task, batch.nodes.address.node(task.client)) for task in batch.tasks]
        self._sent = [(batch.nodes.message(task, node), task) for task, node in where if node is not None]
        return [message for message, _ in self._sent]

    def _deliver(self, replies: Iterable[Message]) -> list[Reply]:
        """Hand the run a reply for each of its tasks; who sent none, or no good one, is named in it."""
        batch, self._next = self._next, None
        assert isinstance(batch, Batch)
        asked = {message.metadata.message_id: Sent(task) for message, task in self._sent}  # numbered when it was sent
        waiting = {sent.task.client: sent for sent in asked.values()}
        found: dict[int, Reply] = {}
        for message in replies:
            sent = asked.pop(message.metadata.reply_to_message_id, None)
            reply = batch.nodes.read(message, sent) if sent else None
            if reply:
                found[reply.client] = reply
        self._sent = []
        given = [
            found.get(task.client) or batch.nodes.missing(waiting.get(task.client, Sent(task))) for task in batch.tasks
        ]
        self._answers.put(given)
        return given

    def _arrays(self) -> ArrayRecord | None:
        return write_state(self._simulation.server.state) if self._simulation else None
