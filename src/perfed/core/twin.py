"""A second network for a client: the personal model beside the shared one, or a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor

from perfed.core.client import Client
from perfed.core.fit import keep_statistics, set_trainable
from perfed.nets.net import Net

_second: WeakKeyDictionary[Net, Net] = WeakKeyDictionary()
"""the other network of each: made once and filled anew for every client"""


def twin(client: Client, state: Mapping[str, Tensor]) -> Client:
    """The same client (data, memory, meter) around a copy of its network that holds this state, ready to be trained.

    The copy lasts until the next client asks for one.
    """
    if client.net not in _second:
        _second[client.net] = client.net.clone()
    other = replace(client, net=_second[client.net])
    other.load({**client.net.module.state_dict(), **state})
    set_trainable(other.net, other.net.layers)
    if len(client.data.train) == 1:
        keep_statistics(other.net)
    return other
