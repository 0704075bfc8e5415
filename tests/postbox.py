"""Flower's grid without a network, for tests of whoever sends and collects messages."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message


class Postbox:
    """Messages are answered when they are pushed; subclasses say with what. Each answer can be pulled once."""

    def __init__(self) -> None:
        self.posted: list[Message] = []
        self.asked = 0

    def answers_to(self, message: Message) -> list[Message]:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            self.asked += 1
            message.metadata.__dict__["_message_id"] = str(self.asked)
            numbers.append(str(self.asked))
            self.posted += self.answers_to(message)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        wanted = set(numbers)
        found = [message for message in self.posted if message.metadata.reply_to_message_id in wanted]
        self.posted = [message for message in self.posted if message not in found]
        return found
