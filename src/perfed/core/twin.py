"""A second network for a client: the personal model beside the shared one, or a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from perfed.core.client import Client
from perfed.core.fit import keep_statistics, set_trainable


def twin(client: Client, state: Mapping[str, Tensor]) -> Client:
    """The same client (data, memory, meter) around a copy of its network that holds this state, ready to be trained."""
    other = replace(client, net=client.net.clone())
    other.load(state)
    set_trainable(other.net, other.net.layers)
    if len(client.data.train) == 1:
        keep_statistics(other.net)
    return other
