"""The neurons of a network's hidden layers: what changes places together when two of them do.

A neuron (a channel, where the layer is a convolution) is a row of the weight that makes it, an element of its bias and
of the BatchNorm behind it, and a column of every weight that takes it: after a flatten, a block of columns. Layers
whose outputs are added have their neurons in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from perfed.nets import steps
from perfed.nets.channels import channel_map
from perfed.nets.net import Net


@dataclass(eq=False)
class Neurons:
    """The neurons of one hidden layer, or of several whose outputs are added."""

    count: int
    rows: dict[str, int] = field(default_factory=dict)
    """tensors whose dimension 0 they are, with the number of elements per neuron"""
    columns: dict[str, int] = field(default_factory=dict)
    """tensors whose dimension 1 they are, with the number of elements per neuron"""
    sources: dict[str, Neurons | None] = field(default_factory=dict)
    """the weights that make them, each with the neurons that it takes; None for the network's input"""

    def reorder(self, state: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
        """The same function with neuron order[k] in place k."""
        changed = dict(state)
        for dim, tensors in ((0, self.rows), (1, self.columns)):
            for name in tensors.keys() & changed.keys():
                index = order.unsqueeze(1) * tensors[name] + torch.arange(tensors[name])
                changed[name] = changed[name].index_select(dim, index.flatten())
        return changed


def hidden_neurons(net: Net) -> list[Neurons]:
    """All hidden neurons from input to output; refused with the layer's name where they cannot be followed."""
    channels = channel_map(net)
    one = _united(net, channels.flow.nodes, channels.flow.channels)
    names: dict[int, list[str]] = {}
    for name, tensor in net.module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    found: dict[str, Neurons] = {}
    for node in channels.flow.nodes:
        module = _module(net, node)
        if module is None:
            continue
        made = taken = None
        if node.name in one:
            count = channels.flow.channels[node.name].count
            made = found.setdefault(one[node.name], Neurons(count))
        if steps.is_layer(module):
            taken = found.get(one.get(node.all_input_nodes[0].name, ""))
        for name in (name for tensor in module.state_dict(keep_vars=True).values() for name in names[id(tensor)]):
            rows, columns = channels.axes[name]
            if made and rows:
                made.rows[name] = rows.block
            if taken and columns:
                taken.columns[name] = columns.block
            if made and steps.is_layer(module) and name.endswith("weight"):
                made.sources[name] = taken
    return list(found.values())


def _united(net: Net, nodes: tuple[fx.Node, ...], channels: Mapping[str, object]) -> dict[str, str]:
    """For every step that gives channels the same word as for all steps that give the same ones."""
    leader: dict[str, str] = {}
    for node in nodes:
        if node.name not in channels:
            continue
        leader[node.name] = node.name
        if not steps.is_layer(_module(net, node)):
            alike = {leader[source.name] for source in node.all_input_nodes if source.name in leader}
            leader |= {name: node.name for name, first in leader.items() if first in alike}
    return leader


def _module(net: Net, node: fx.Node) -> torch.nn.Module | None:
    return net.module.get_submodule(str(node.target)) if node.op == "call_module" else None
