"""Data sets as published, and their division among clients."""

from perfed.data.download import get
from perfed.data.federate import federate
from perfed.data.federation import ClientData, Federation, Split
from perfed.data.source import Source, from_tensors, join
from perfed.data.sources import describe, load, names

__all__ = [
    "ClientData",
    "Federation",
    "Source",
    "Split",
    "describe",
    "federate",
    "from_tensors",
    "get",
    "join",
    "load",
    "names",
]
