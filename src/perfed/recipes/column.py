"""A column of a published table: which metric of which runs."""

from __future__ import annotations

from dataclasses import dataclass

LOWER = (".std", ".loss", "param_batches", "flops")
SETTLED = "settled."
CLIENT = "client."
TOOK_PART = "local.took_part"
TOOK_PART_STD = "local.took_part.std"
OWN = "accuracy on clients' own test data, mean over clients"
WORDS = {
    "local.mean": OWN,
    "local.weighted": "accuracy over all clients' test samples",
    "local.last": f"{OWN} and over the last rounds",
    "local.task.mean": "accuracy of the binary branches, mean over clients",
    "local.val": "accuracy on clients' own validation data, mean over clients",
    "local.std": "deviation of accuracy over clients",
    TOOK_PART: f"{OWN} that took part in at least one round",
    TOOK_PART_STD: "deviation of accuracy over clients that took part in at least one round",
    "new": "accuracy of all clients' vote on all test data",
    "param_batches": "trained parameters times batches",
    "flops": "FLOPs of training",
}
"""What the metrics of the recipes are."""


@dataclass(frozen=True)
class Column:
    """A metric of the result in a setting, read at the end or after a round: `SETTING/METRIC@ROUND`.

    Beside the metrics of a result there are `client.N`, the accuracy of client N; `local.took_part` and
    `local.took_part.std`, mean and deviation over the clients that took part in at least one round; and
    `settled.METRIC`, the first round from which on METRIC stays within a point of its last value.
    """

    key: str

    @property
    def setting(self) -> str:
        """The setting it belongs to; '' is the recipe's [run] as it stands."""
        return self.key.rpartition("/")[0]

    @property
    def metric(self) -> str:
        """The metric's name in a result."""
        return self.key.rpartition("/")[2].partition("@")[0]

    @property
    def round(self) -> int | None:
        """The round it is read at; None is the end."""
        after = self.key.rpartition("/")[2].partition("@")[2]
        return int(after) if after else None

    @property
    def falls(self) -> bool:
        """Whether less is better."""
        return self.metric.endswith(LOWER) or self.metric.startswith(SETTLED)

    @property
    def whole(self) -> bool:
        """Whether it is a number of its own, instead of a share shown in per cent."""
        return self.metric.startswith(SETTLED) or self.metric.endswith(".loss") or self.metric in LOWER

    @property
    def words(self) -> str:
        """What its figures are, in words; empty where the name has to do."""
        if self.metric.startswith(CLIENT):
            said = f"accuracy of client {self.metric.removeprefix(CLIENT)}"
        elif self.metric.startswith(SETTLED):
            said = "round from which on the accuracy stays within a point of its end"
        else:
            said = WORDS.get(self.metric, "")
        return f"{said}, at round {self.round}" if said and self.round is not None else said
