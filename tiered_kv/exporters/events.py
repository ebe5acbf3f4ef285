"""Events: which tier has stored or removed which blocks, published by ZeroMQ in the form of vLLM's KV cache events.

A message has three frames: the topic, a sequence number (8 bytes, big-endian) and a batch in msgpack:

    [seconds since 1970, [event, ...], data-parallel rank]

An event is a map with the key `type`: BlockStored, BlockRemoved or AllBlocksCleared. The fields are those of
`vllm.distributed.kv_events` (vLLM 0.32 and 0.33); docs/how-to/events.md explains them.

A subscriber that missed messages sends a first number to the replay socket. It gets the kept messages from there on,
and then one with the number -1. If older ones are missing, a snapshot comes first: the blocks that these leave.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.stack_config import EventSettings
from tiered_kv.threads import give_way, start_thread

QUEUE_KEYS_MAX: Final = 1 << 16
"""Keys in the queue. Beyond it the oldest batches are dropped, except for the last step's."""
QUEUE_BATCHES_MAX: Final = 1 << 12
"""Batches in the queue, one for each step; likewise."""
MESSAGE_KEYS_MAX: Final = 512
"""Keys of one message, and how many are encoded at once while a scheduler may wait for the interpreter lock."""
SUBSCRIBER_MESSAGES_MAX: Final = 1000
"""Messages that wait for one slow subscriber; it loses further ones."""
PEER_MESSAGE_BYTES_MAX: Final = 4096
"""The largest frame from a peer: a subscription to a topic, or a request for a replay."""
REPLAY_BYTES_MAX: Final = 32 << 20
REPLAY_MESSAGES_MAX: Final = 10_000
SNAPSHOT_KEYS_MAX: Final = 1 << 20
"""Keys in a snapshot, of some 80 bytes. Beyond it the oldest are left out: not every tier reports what it removes."""

STEP_WAITS_MAX: Final = 3
"""Waits of a message while a scheduler's step runs: steps without an end delay it by 60 ms at most."""

_KEYS_A_BATCH: Final = 16
"""A batch costs the thread as much as so many keys more."""
_POLL_MS: Final = 20
_CLOSE_TIMEOUT_S: Final = 2.0
_LINGER_MS: Final = 500
_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_RANK: Final = 0
_GROUP_BYTES: Final = 4
_HASH_BYTES: Final = 8

_Fields = dict[str, Any]  # Any: as the fields of vLLM's events
_STORAGE: Final = "STORAGE"
"""The medium of secondary tiers, as in vLLM. Dynamo ignores media that it does not know."""
_UNKNOWN: Final[_Fields] = {
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 0,
    "lora_id": None,
    "lora_name": None,
}
"""Fields of vLLM's own events that tiers do not know. vLLM writes the same values for offloaded blocks."""

DESCRIPTORS: Final = 24
"""More than a publisher opens. libzmq ends the process if it gets none."""

_log = logging.getLogger(__name__)


class EventPublisher:
    """Publishes the events of a stack on its own thread.

    The manager's thread calls `publish` and `clear`, which append to a queue. In `publish_address` and
    `replay_address`, which is empty without a replay socket, a port `*` is replaced by its number.

    Raises:
        MissingExtraError: pyzmq or msgspec is not installed.
        ConfigError: An address cannot be used.
    """

    def __init__(self, settings: EventSettings) -> None:
        try:
            import msgspec
            import zmq
        except ImportError:
            raise MissingExtraError("'events'", "events", location="events") from None
        self._topics = [each.encode() for each in settings.topic]
        self._encode, self._decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
        self._encoded = msgspec.Raw
        self._queue: deque[tuple[int, float, Sequence[OffloadingEvent] | None]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        # The blocks that the messages up to a number leave, which are kept no more: hashes by group and tier.
        self._folded_number = -1
        self._folded: dict[tuple[int, str | None], dict[int, None]] = {}
        # Written by the manager's thread.
        self._next_batch = self._queued_keys = self._dropped_batches = 0
        self._last_clear = -1
        # Written by the publisher's thread. The keys of the queue are the queued ones without the taken ones.
        self._next_taken = self._taken_keys = self._invalid_batches = 0
        self._next_number = self._kept_bytes = self._sent_messages = self._replay_requests = 0
        self._is_closing = threading.Event()
        _check_descriptors(DESCRIPTORS)
        self._context = zmq.Context()
        try:
            self._publisher, self.publish_address = self._bound(zmq.PUB, "publish", settings.publish)
            self._replayer, self.replay_address = None, ""
            if settings.replay is not None:
                self._replayer, self.replay_address = self._bound(zmq.ROUTER, "replay", settings.replay)
            self._thread = start_thread(self._run, "tiered-kv-events")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    # The manager's thread.

    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        """Queue events, whose keys must not change; drop the oldest batches of a queue that is too long."""
        self._queued_keys += _keys_of(events)
        self._append(events)
        queue = self._queue
        while len(queue) > 1 and (
            self._queued_keys - self._taken_keys > QUEUE_KEYS_MAX or len(queue) > QUEUE_BATCHES_MAX
        ):
            try:
                _, _, dropped = self._queue.popleft()
            except IndexError:  # the publisher has just taken it
                break
            self._queued_keys -= _keys_of(dropped or ())
            self._dropped_batches += 1

    def clear(self) -> None:
        """Queue the removal of all blocks."""
        self._last_clear = self._next_batch
        self._append(None)

    def _append(self, events: Sequence[OffloadingEvent] | None) -> None:
        self._queue.append((self._next_batch, time.time(), events))
        self._next_batch += 1

    def snapshot(self) -> dict[str, int]:
        return {
            "event_messages_total": self._sent_messages,
            "dropped_event_batches_total": self._dropped_batches + self._invalid_batches,
            "event_replay_requests_total": self._replay_requests,
        }

    def close(self) -> None:
        """Publish the queue, and end the thread; waits for two seconds at most."""
        self._is_closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    # The publisher's thread.

    def _bound(self, kind: int, setting: str, address: str) -> tuple[Any, str]:  # Any: a zmq.Socket
        import zmq

        socket = self._context.socket(kind)
        socket.linger = _LINGER_MS
        socket.sndhwm = SUBSCRIBER_MESSAGES_MAX if kind == zmq.PUB else 2 * REPLAY_MESSAGES_MAX
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
                self._serve_replay()
                self._send_queue()
            self._send_queue()
        except Exception as error:
            _log.error("events are published no more", exc_info=error)
        finally:
            self._context.destroy()

    def _send_queue(self) -> None:
        room = 0
        while self._queue:
            if room <= 0:
                self._wait_for_the_step()
                room = MESSAGE_KEYS_MAX
            try:
                batch, time_s, events = self._queue.popleft()
            except IndexError:  # the manager's thread has just dropped it
                return
            self._next_number += batch - self._next_taken  # dropped batches leave a gap in the numbers
            if self._next_taken <= self._last_clear < batch:  # one of them was a reset, which nothing repeats
                self._next_number -= 1
                self._send(time_s, [{"type": "AllBlocksCleared"}])
            self._next_taken = batch + 1
            if events is None:
                self._send(time_s, [{"type": "AllBlocksCleared"}])
                continue
            self._taken_keys += _keys_of(events)
            room -= _keys_of(events) + _KEYS_A_BATCH
            for number, message in enumerate(self._messages(events)):
                if number:
                    self._wait_for_the_step()
                self._send(time_s, message)

    def _wait_for_the_step(self) -> None:
        for _ in range(STEP_WAITS_MAX):
            if not self._is_closing.is_set():
                give_way(_POLL_MS / 1000)

    def _messages(self, events: Sequence[OffloadingEvent]) -> Iterator[list[_Fields]]:
        """Yield the events of each message, at most `MESSAGE_KEYS_MAX` keys."""
        message: list[_Fields] = []
        room = MESSAGE_KEYS_MAX
        for event in events:
            for start, stop in _cuts(len(event.keys), room):
                owner = None if event.medium == CPULoadStoreSpec.medium() else event.medium
                try:
                    for group, hashes in hashes_of(event.keys[start:stop]).items():
                        message.append(self._event(event.removed, hashes, group, owner))
                except (TypeError, ValueError, IndexError):  # a third-party tier's event without valid keys
                    self._invalid_batches += 1
                room -= stop - start
                if not room:
                    yield message
                    message, room = [], MESSAGE_KEYS_MAX
        if message:
            yield message

    def _event(self, is_removed: bool, hashes: NDArray[np.uint64], group: int, owner: str | None) -> _Fields:
        where = {"medium": CPULoadStoreSpec.medium()} if owner is None else {"medium": _STORAGE, "ownership": owner}
        about = {"block_hashes": self._encoded(_packed(hashes)), "group_idx": group, **where}
        return {"type": "BlockRemoved", **about} if is_removed else {"type": "BlockStored", **about, **_UNKNOWN}

    def _send(self, time_s: float, events: list[_Fields]) -> None:
        payload = self._encode([time_s, events, _RANK])
        number = self._next_number
        self._next_number += 1
        for topic in self._topics:
            self._publisher.send_multipart((topic, _frame(number), payload))
        self._sent_messages += 1
        if self._replayer is None:
            return
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > REPLAY_BYTES_MAX or len(self._kept) > REPLAY_MESSAGES_MAX:
            number, oldest = self._kept.popleft()
            self._kept_bytes -= len(oldest)
            if number != self._folded_number + 1:  # batches were dropped, which may have removed blocks
                self._folded.clear()
            self._folded_number = number
            self._fold(oldest)

    def _fold(self, payload: bytes) -> None:
        """Add a message to the snapshot."""
        folded = self._folded
        for event in self._decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
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

    def _snapshot_message(self) -> bytes:
        """Return one message that leaves what the folded ones leave, whatever a subscriber knew."""
        events: list[_Fields] = [{"type": "AllBlocksCleared"}]
        for (group, owner), hashes in self._folded.items():
            rest = iter(hashes)
            while part := list(islice(rest, MESSAGE_KEYS_MAX)):
                events.append(self._event(False, np.array(part, ">u8"), group, owner))
                give_way()
        return self._encode([time.time(), events, _RANK])

    def _serve_replay(self) -> None:
        """Answer a request for a replay, or wait up to `_POLL_MS` for one."""
        if self._replayer is None:
            self._is_closing.wait(_POLL_MS / 1000)
            return
        if not self._replayer.poll(_POLL_MS):
            return
        frames = self._replayer.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        self._replay_requests += 1
        missing = [(self._folded_number, self._snapshot_message())] if first <= self._folded_number else []
        for number, payload in (*missing, *self._kept):
            if number >= first:
                self._replayer.send_multipart((client, b"", self._topics[0], _frame(number), payload))
                give_way()
        self._replayer.send_multipart((client, b"", b"", _END, b""))


def hashes_of(keys: Sequence[OffloadKey]) -> dict[int, NDArray[np.uint64]]:
    """Return the blocks' names in events, by KV cache group: the last 64 bits of each hash, as in vLLM's events."""
    length = len(keys[0])
    if length >= _HASH_BYTES + _GROUP_BYTES and set(map(len, keys)) == {length}:
        # The usual case, in C: the scheduler may wait for the interpreter's lock.
        table = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, length)[:, -_HASH_BYTES - _GROUP_BYTES :]
        groups = np.ascontiguousarray(table[:, _HASH_BYTES:]).view(">u4")[:, 0]
        if (groups == groups[0]).all():
            return {int(groups[0]): np.ascontiguousarray(table[:, :_HASH_BYTES]).view(">u8")[:, 0]}
    by_group: dict[int, list[int]] = {}
    for key in keys:
        block_hash = int.from_bytes(key[-_HASH_BYTES - _GROUP_BYTES : -_GROUP_BYTES], "big")
        by_group.setdefault(int.from_bytes(key[-_GROUP_BYTES:], "big"), []).append(block_hash)
    return {group: np.array(hashes, ">u8") for group, hashes in by_group.items()}


def _packed(hashes: NDArray[np.uint64]) -> bytes:
    """Return hashes as an array of msgpack."""
    packed = np.empty(len(hashes), [("type", "u1"), ("hash", ">u8")])
    packed["type"], packed["hash"] = 0xCF, hashes  # 0xCF: eight bytes of an unsigned number follow
    return b"\xdd" + len(hashes).to_bytes(4, "big") + packed.tobytes()


def _check_descriptors(count: int) -> None:
    """Raise `OSError` if this process cannot open so many."""
    with ExitStack() as closing:
        for _ in range(count):
            closing.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _keys_of(events: Iterable[OffloadingEvent]) -> int:
    return sum(len(event.keys) for event in events)


def _cuts(end: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of the range up to `end`: the first up to `room` long, the others up to `MESSAGE_KEYS_MAX`."""
    start = 0
    while start < end:
        stop = min(start + room, end)
        yield start, stop
        start, room = stop, MESSAGE_KEYS_MAX


def _frame(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")
