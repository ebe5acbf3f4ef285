"""A subscriber of a stack's events, written independently of the publisher's code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import zmq

from tiered_kv.stack.exporters.events import EventPublisher

PATIENCE_S = 30.0
CLEARED = {"type": "AllBlocksCleared"}
Index = dict[str, set[int]]
"""The hashes of the blocks of each tier: its ownership, or the medium of the primary one."""


class Message(NamedTuple):
    topic: bytes
    number: int
    time_s: float
    events: list[dict[str, Any]]  # Any: as vLLM's
    rank: int


class Subscriber:
    def __init__(self, publisher: EventPublisher, topic: str = "", queue: int = 0) -> None:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, queue)
        if queue:
            self._live.setsockopt(zmq.RCVBUF, 4096)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._live.ipv6 = "[" in publisher.publish_address
        self._live.connect(publisher.publish_address)
        self._past = self._context.socket(zmq.DEALER)
        if publisher.replay_address:
            self._past.connect(publisher.replay_address)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None after the timeout."""
        return _message(self._live.recv_multipart()) if self._live.poll(int(1000 * timeout_s)) else None

    def connect(self, publish: Callable[[], object]) -> Message:
        """Call `publish` until a message with blocks arrives, and return it: the socket connects late."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            publish()
            if (message := self.receive(0.05)) and message.events != [CLEARED]:
                return message
        raise AssertionError("no message came")

    def replay(self, first: int = 0) -> list[Message]:
        """Return the messages from number `first` on that the publisher still has."""
        self._past.send_multipart((b"", first.to_bytes(8, "big")))
        messages: list[Message] = []
        while True:
            assert self._past.poll(int(1000 * PATIENCE_S)), "the replay has no end"
            empty, *frames = self._past.recv_multipart()
            assert empty == b""
            if frames == [b"", b"\xff" * 8, b""]:
                return messages
            messages.append(_message(frames))

    def replay_until(self, is_enough: Callable[[list[Message]], bool]) -> list[Message]:
        end_s = time.monotonic() + PATIENCE_S
        while not is_enough(messages := self.replay()):
            assert time.monotonic() < end_s, messages[-3:]
            time.sleep(0.002)
        return messages


def index_of(messages: Iterable[Message]) -> Index:
    index: Index = {}
    for event in [event for message in messages for event in message.events]:
        if event["type"] == "AllBlocksCleared":
            index.clear()
            continue
        known = index.setdefault(event.get("ownership", event["medium"]), set())
        known.update(event["block_hashes"])
        if event["type"] == "BlockRemoved":
            known.difference_update(event["block_hashes"])
    return index


def _message(frames: list[bytes]) -> Message:
    topic, number, payload = frames
    return Message(topic, int.from_bytes(number, "big"), *msgspec.msgpack.decode(payload))
