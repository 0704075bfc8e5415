"""The ClientApp: answers for a simulated client, or for the site that this node runs at.

Flower starts a process for every message. At a site it hands the message to the process that `perfed site start` left
running, which has everything loaded; if that is not there, it answers by itself. So this module imports little.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from perfed.flower.resident import ask

app = ClientApp()


@app.query()
def present(message: Message, context: Context) -> Message:
    """Say who is here: a simulated client by its number, or a site by its name and the outline of its data."""
    return _answered("query", message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Compute a client's local round."""
    return _answered("train", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score a client's personal model."""
    return _answered("evaluate", message, context)


def _answered(kind: str, message: Message, context: Context) -> Message:
    site, partition = context.node_config.get("site"), context.node_config.get("partition-id")
    place = None if site is None else str(site)
    content = ask(place, kind, message.content, message.metadata.ttl) if place is not None else None
    if content is None:
        from perfed.flower.answering import answer

        content = answer(kind, message.content, place, partition if isinstance(partition, int) else None)
    return Message(content, reply_to=message)
