"""Messages: published events in the form of vLLM's KV cache events.

A message's batch is `[seconds since 1970, [event, ...], data-parallel rank]` in msgpack. An event is a map with the key
`type`: BlockStored, BlockRemoved or AllBlocksCleared. The fields come from `vllm.distributed.kv_events` (vLLM 0.32 and
0.33); docs/how-to/events.md explains them. The publisher's thread makes all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.errors import MissingExtraError
from tiered_kv.mediums import CPULoadStoreSpec

MESSAGE_KEYS_MAX: Final = 512
"""Limit of the keys of one message. They are encoded at once, while a scheduler may wait for the interpreter lock."""
ALL_BLOCKS_CLEARED: Final = "AllBlocksCleared"

_RANK: Final = 0
_GROUP_BYTES: Final = 4
_HASH_BYTES: Final = 8

Fields = dict[str, Any]  # Any: as the fields of vLLM's events
_STORAGE: Final = "STORAGE"
"""The medium of secondary tiers, as in vLLM. Dynamo ignores media that it does not know."""
_UNKNOWN: Final[Fields] = {
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 0,
    "lora_id": None,
    "lora_name": None,
}
"""Fields of vLLM's own events that tiers do not know. vLLM writes the same values for offloaded blocks."""


class MessageForm:
    """Turns events into messages, and a message into its events.

    Raises:
        MissingExtraError: msgspec is not installed.
    """

    def __init__(self) -> None:
        try:
            import msgspec
        except ImportError:
            raise MissingExtraError("'events'", "events", location="events") from None
        self.invalid_batches = 0  # parts of events without valid keys
        self._encode, self._decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
        self._encoded = msgspec.Raw

    def encode(self, time_s: float, events: Sequence[Fields]) -> bytes:
        return self._encode([time_s, events, _RANK])

    def events_of(self, payload: bytes) -> list[Fields]:
        events: list[Fields] = self._decode(payload)[1]
        return events

    def messages(self, events: Iterable[OffloadingEvent]) -> Iterator[list[Fields]]:
        """Yield the events of each message, at most `MESSAGE_KEYS_MAX` keys."""
        message: list[Fields] = []
        room = MESSAGE_KEYS_MAX
        for event in events:
            for start, stop in _cuts(len(event.keys), room):
                owner = None if event.medium == CPULoadStoreSpec.medium() else event.medium
                try:
                    for group, hashes in hashes_of(event.keys[start:stop]).items():
                        message.append(self.event(event.removed, hashes, group, owner))
                except (TypeError, ValueError, IndexError):  # a third-party tier's event without valid keys
                    self.invalid_batches += 1
                room -= stop - start
                if not room:
                    yield message
                    message, room = [], MESSAGE_KEYS_MAX
        if message:
            yield message

    def event(self, is_removed: bool, hashes: NDArray[np.uint64], group: int, owner: str | None) -> Fields:
        where = {"medium": CPULoadStoreSpec.medium()} if owner is None else {"medium": _STORAGE, "ownership": owner}
        about = {"block_hashes": self._encoded(_packed(hashes)), "group_idx": group, **where}
        return {"type": "BlockRemoved", **about} if is_removed else {"type": "BlockStored", **about, **_UNKNOWN}


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


def _cuts(end: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield parts of the range up to `end`: the first part has up to `room` keys, each further up to
    `MESSAGE_KEYS_MAX`."""
    start = 0
    while start < end:
        stop = min(start + room, end)
        yield start, stop
        start, room = stop, MESSAGE_KEYS_MAX
