"""Events: which tier has stored or removed which blocks, published by ZeroMQ in the form of vLLM's KV cache events.

A message has three frames: the topic, a sequence number (8 bytes, big-endian) and a batch (`event_messages`).

The numbers of a process rise by one, from the microseconds since 1970 at its start. So they are above the
numbers of an earlier process at the same address, and a subscriber sees that messages are missing. The first message is
AllBlocksCleared.

A subscriber that missed messages sends a first number to the replay socket (`event_replay`). It gets the kept messages
from there on, and then one with the number -1. If older ones are missing, a snapshot comes first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

from tiered_kv.base import OffloadingEvent
from tiered_kv.config.stack_config import EventSettings
from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.stack.exporters.event_messages import ALL_BLOCKS_CLEARED, MESSAGE_KEYS_MAX, Fields, MessageForm
from tiered_kv.stack.exporters.event_queue import EventQueue, StepEvents, keys_of
from tiered_kv.stack.exporters.event_replay import NUMBER_BYTES, KeptMessages, ReplayAnswers
from tiered_kv.system.step import give_way
from tiered_kv.system.threads import start_thread

SUBSCRIBER_MESSAGES_MAX: Final = 1000
"""Messages that wait for one slow subscriber; it loses further ones."""
PEER_MESSAGE_BYTES_MAX: Final = 4096
"""The largest frame from a peer: a subscription to a topic, or a request for a replay."""
REQUESTS_WAITING_MAX: Final = 4096
"""Ended requests that wait to be published."""
MESSAGE_REQUESTS_MAX: Final = 64
"""Ended requests in one message."""
APART_MAX: Final = 256
"""Events for recorders that wait to be sent; further ones are refused."""
STEP_WAITS_MAX: Final = 3
"""How often a message waits while a scheduler's step runs. Steps without an end delay it by 60 ms at most."""
BEGIN_S: Final = 1.0
"""Seconds that the first message waits for events. By then, subscribers of an earlier process have reconnected."""

_KEYS_A_BATCH: Final = 16
"""The cost of a batch for the thread, in keys: a batch without keys costs as much as this many keys."""
_POLL_MS: Final = 20
_CLOSE_TIMEOUT_S: Final = 2.0
_LINGER_MS: Final = 500

DESCRIPTORS: Final = 24
"""More than a publisher opens. libzmq ends the process if it gets none."""

_log = logging.getLogger(__name__)


class EventPublisher:
    """Publishes the events of a stack on its own thread.

    The manager's thread calls `publish` and `clear`, which append to a queue. `publish_address` and `replay_address`
    have a port's number in place of `*`. Without a replay socket, the latter is empty.

    Raises:
        MissingExtraError: pyzmq or msgspec is not installed.
        ConfigError: An address cannot be used.
    """

    def __init__(self, settings: EventSettings) -> None:
        try:
            import zmq
        except ImportError:
            raise MissingExtraError("'events'", "events", location="events") from None
        self._topics = [each.encode() for each in settings.topic]
        self._form = MessageForm()
        self._queue = EventQueue()
        self._requests_topic = None if settings.requests is None else settings.requests.encode()
        self._requests: deque[Fields] = deque(maxlen=REQUESTS_WAITING_MAX)
        """Ended requests that are not published yet. Any thread appends, and the publisher's takes them."""
        # Written by the publisher's thread.
        self._kept = KeptMessages(self._form)
        self._next_number = self._next_request_number = time.time_ns() // 1000
        self._sent_messages = 0
        self._begin_s = time.monotonic() + BEGIN_S
        self._apart: deque[tuple[bytes, Fields]] = deque()
        """Events for recorders, which have a topic of their own. The recorder's thread appends."""
        self._apart_number = self._next_number
        self._is_closing = threading.Event()
        _check_descriptors(DESCRIPTORS)
        self._context = zmq.Context()
        try:
            self._publisher, self.publish_address = self._bound(zmq.PUB, "publish", settings.publish)
            self._answers, self.replay_address = None, ""
            if settings.replay is not None:
                replayer, self.replay_address = self._bound(zmq.ROUTER, "replay", settings.replay)
                self._answers = ReplayAnswers(replayer, self._topics[0], self._kept, self._begun_number)
            self._thread = start_thread(self._run, "tiered-kv-events")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def publishes_requests(self) -> bool:
        """Whether `request_ended` is to be called."""
        return self._requests_topic is not None

    def request_ended(self, about: Fields) -> None:
        """Queue what a request got. Any thread may call. The oldest ones give way if too many wait."""
        self._requests.append(about)

    # The manager's thread.

    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        """Queue events; their keys must not change any more."""
        self._queue.add(events)

    def clear(self) -> None:
        """Queue the removal of all blocks."""
        self._queue.add((), is_cleared=True)

    def publish_apart(self, topic: bytes, event: Fields) -> bool:
        """Queue an event for recorders, with its topic; return whether there was room. One thread calls this."""
        has_room = len(self._apart) < APART_MAX
        if has_room:
            self._apart.append((topic, event))
        return has_room

    def snapshot(self) -> dict[str, int]:
        return {
            "event_messages_total": self._sent_messages,
            "dropped_event_batches_total": self._queue.dropped_batches + self._form.invalid_batches,
            "event_replay_requests_total": 0 if self._answers is None else self._answers.requests,
        }

    def close(self) -> None:
        """Publish the queue, and end the publisher's thread; wait for two seconds at most."""
        self._is_closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    # The publisher's thread.

    def _bound(self, kind: int, setting: str, address: str) -> tuple[Any, str]:  # Any: a zmq.Socket
        import zmq

        socket = self._context.socket(kind)
        socket.linger = _LINGER_MS
        socket.sndhwm = SUBSCRIBER_MESSAGES_MAX
        if kind == zmq.ROUTER:
            socket.router_mandatory = True
        socket.maxmsgsize = PEER_MESSAGE_BYTES_MAX
        socket.ipv6 = "[" in address
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            message = f"cannot listen at '{address}': {error.strerror}"
            raise ConfigError(message, location=f"events.{setting}") from error
        endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket, endpoint.rstrip("\0")

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                wait_ms = 0 if self._queue or self._requests else _POLL_MS
                if self._answers is not None:
                    self._answers.serve(wait_ms)
                else:
                    self._is_closing.wait(wait_ms / 1000)
                if self._queue or time.monotonic() >= self._begin_s:
                    self._begun_number()
                self._send_some()
                self._send_requests()
                self._send_apart()
            while self._queue:
                self._begun_number()
                self._send_some()
            self._send_requests()
            self._send_apart()
        except Exception as error:
            _log.error("events are published no more", exc_info=error)
        finally:
            self._context.destroy()

    def _begun_number(self) -> int:
        """Publish that all blocks are cleared, if nothing was published yet; return the next message's number."""
        if not self._sent_messages:
            self._send(time.time(), [{"type": ALL_BLOCKS_CLEARED}])
        return self._next_number

    def _send_some(self) -> None:
        """Send the messages of waiting batches, of some `MESSAGE_KEYS_MAX` keys."""
        room = MESSAGE_KEYS_MAX
        if self._queue:
            self._wait_for_the_step()
        while room > 0 and (batch := self._queue.take()) is not None:
            room -= keys_of(batch.events) + _KEYS_A_BATCH
            self._send_batch(batch)

    def _send_requests(self) -> None:
        """Send what requests got, in one message with a number of its own; no replay has it."""
        count = min(len(self._requests), MESSAGE_REQUESTS_MAX)
        if not count or self._requests_topic is None:
            return
        events = [{"type": "RequestEnded", **self._requests.popleft()} for _ in range(count)]
        number = self._next_request_number.to_bytes(NUMBER_BYTES, "big")
        self._next_request_number += 1
        self._publisher.send_multipart((self._requests_topic, number, self._form.encode(time.time(), events)))

    def _send_apart(self) -> None:
        for _ in range(len(self._apart)):
            topic, event = self._apart.popleft()
            payload = self._form.encode(time.time(), [event])
            self._publisher.send_multipart((topic, self._apart_number.to_bytes(NUMBER_BYTES, "big"), payload))
            self._apart_number += 1

    def _send_batch(self, batch: StepEvents) -> None:
        if batch.is_cleared:
            self._send(batch.time_s, [{"type": ALL_BLOCKS_CLEARED}])
        for number, message in enumerate(self._form.messages(batch.events)):
            if number:
                self._wait_for_the_step()
            self._send(batch.time_s, message)

    def _wait_for_the_step(self) -> None:
        for _ in range(STEP_WAITS_MAX):
            if not self._is_closing.is_set():
                give_way(_POLL_MS / 1000)
            self._queue.merge()

    def _send(self, time_s: float, events: Sequence[Fields]) -> None:
        payload = self._form.encode(time_s, events)
        number = self._next_number
        self._next_number += 1
        for topic in self._topics:
            self._publisher.send_multipart((topic, number.to_bytes(NUMBER_BYTES, "big"), payload))
        self._sent_messages += 1
        if self._answers is not None:
            self._kept.add(number, payload)


def _check_descriptors(count: int) -> None:
    """Raise `OSError` if this process cannot open this number of descriptors."""
    with ExitStack() as closing:
        for _ in range(count):
            closing.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
