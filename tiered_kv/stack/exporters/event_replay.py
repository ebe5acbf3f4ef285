"""The replay of events: the messages that are kept, and the answers to subscribers that missed some.

All of it belongs to the publisher's thread. An answer holds no messages, only the next number, and is sent in portions.
So a subscriber that reads slowly delays neither the publishing nor other subscribers. It costs no memory but that of
the socket's own queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from tiered_kv.stack.exporters.event_messages import ALL_BLOCKS_CLEARED, MESSAGE_KEYS_MAX, Fields, MessageForm
from tiered_kv.system.step import give_way

REPLAY_BYTES_MAX: Final = 32 << 20
REPLAY_MESSAGES_MAX: Final = 10_000
SNAPSHOT_KEYS_MAX: Final = 1 << 20
"""Keys in a snapshot, of some 80 bytes each. Beyond it the oldest keys are left out: not every tier reports its removed
blocks."""
ANSWERS_MAX: Final = 16
"""Answers in progress; further requests wait in the socket."""
STALLED_S: Final = 10.0
"""Seconds without a read of the subscriber after which an answer ends, without its last message."""

NUMBER_BYTES: Final = 8
_PORTION: Final = 64
_END: Final = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class KeptMessages:
    """The latest messages, and a snapshot: the blocks that are stored after all earlier messages."""

    def __init__(self, form: MessageForm) -> None:
        self.folded_number = -1  # the number of the last message that is in the snapshot, and kept no more
        self._form = form
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._folded: dict[tuple[int, str | None], dict[int, None]] = {}  # hashes by group and tier

    def add(self, number: int, payload: bytes) -> None:
        """Keep a message. Its number is the number of the last message plus 1."""
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > REPLAY_BYTES_MAX or len(self._kept) > REPLAY_MESSAGES_MAX:
            self.folded_number, oldest = self._kept.popleft()
            self._kept_bytes -= len(oldest)
            self._fold(self._form.events_of(oldest))

    def since(self, first: int, count: int) -> list[tuple[int, bytes]]:
        """Return up to `count` messages from number `first` on. That message must not be in the snapshot."""
        if not self._kept:
            return []
        skipped = max(first - self._kept[0][0], 0)
        return list(islice(self._kept, skipped, skipped + count))

    def snapshot(self) -> bytes:
        """Return one message that leaves the same blocks as the folded ones, for any subscriber."""
        events: list[Fields] = [{"type": ALL_BLOCKS_CLEARED}]
        for (group, owner), hashes in self._folded.items():
            rest = iter(hashes)
            while part := list(islice(rest, MESSAGE_KEYS_MAX)):
                events.append(self._form.event(False, np.array(part, ">u8"), group, owner))
                give_way()
        return self._form.encode(time.time(), events)

    def _fold(self, events: list[Fields]) -> None:
        """Add a message to the snapshot."""
        folded = self._folded
        for event in events:
            if event["type"] == ALL_BLOCKS_CLEARED:
                folded.clear()
                continue
            hashes = folded.setdefault((event["group_idx"], event.get("ownership")), {})
            if event["type"] == "BlockStored":
                hashes.update(dict.fromkeys(event["block_hashes"]))
            else:
                for each in event["block_hashes"]:
                    hashes.pop(each, None)
        while (excess := sum(map(len, folded.values())) - SNAPSHOT_KEYS_MAX) > 0:
            longest = max(folded.values(), key=len)
            for each in list(islice(longest, excess)):
                del longest[each]


@dataclass(slots=True)
class _Answer:
    client: bytes
    next_number: int
    end_number: int  # the number after the last message at the time of the request
    progress_s: float


class ReplayAnswers:
    """Answers requests at the replay socket, a `ROUTER` with `ROUTER_MANDATORY`.

    Args:
        next_number: Returns the number of the next message. It first publishes that all blocks are cleared, if nothing
            was published yet.
    """

    def __init__(self, socket: Any, topic: bytes, kept: KeptMessages, next_number: Callable[[], int]) -> None:
        self.requests = 0  # Any, above: a zmq.Socket
        self._socket = socket
        self._topic = topic
        self._kept = kept
        self._next_number = next_number
        self._answers: list[_Answer] = []
        self._is_moving = False

    def serve(self, wait_ms: int) -> None:
        """Go on with the answers; wait up to `wait_ms` for a request if the last pass sent no message."""
        wait_ms = 0 if self._is_moving else wait_ms
        if len(self._answers) >= ANSWERS_MAX:
            time.sleep(wait_ms / 1000)
        elif self._socket.poll(wait_ms):
            self._take_request()
        self._is_moving = False
        for answer in list(self._answers):
            if not self._go_on(answer):
                self._answers.remove(answer)

    def _take_request(self) -> None:
        frames = self._socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
            return
        self.requests += 1
        first, end = int.from_bytes(frames[2], "big"), self._next_number()
        # A number that no message has yet is an earlier process's. Then the clock was set back after its end.
        self._answers.append(_Answer(frames[0], first if first <= end else 0, end, time.monotonic()))

    def _go_on(self, answer: _Answer) -> bool:
        """Send a portion of an answer; return whether more of it is to be sent."""
        import zmq

        try:
            for number, payload in self._portion(answer):
                self._send(answer.client, self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload)
                answer.next_number, answer.progress_s = number + 1, time.monotonic()
                self._is_moving = True
                give_way()
            if answer.next_number < answer.end_number:
                return True
            self._send(answer.client, b"", _END, b"")
        except zmq.Again:  # the socket's queue for this subscriber is full
            return time.monotonic() - answer.progress_s < STALLED_S
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the subscriber has gone
                raise
        return False

    def _portion(self, answer: _Answer) -> list[tuple[int, bytes]]:
        if answer.next_number >= answer.end_number:
            return []
        if answer.next_number <= self._kept.folded_number:
            return [(self._kept.folded_number, self._kept.snapshot())]
        return self._kept.since(answer.next_number, min(_PORTION, answer.end_number - answer.next_number))

    def _send(self, client: bytes, topic: bytes, number: bytes, payload: bytes) -> None:
        import zmq

        self._socket.send_multipart((client, b"", topic, number, payload), zmq.NOBLOCK)
