"""Values of any length up to a block, for programs: embeddings, features of images, states that are no block.

`Stack.values` and `HostStack.values` return a view of the stack, and a program calls it on any thread. A value is
framed in a block of its own, with its length and a checksum, so that every tier stores it as any block. `Values` is a
part of `BlockFacade`, and calls its steps. What must stay true: a `get` returns the bytes of the `put` of this key,
or None; no engine's block is taken for a value, and no value for a block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from tiered_kv.base import OffloadKey, get_offload_block_hash, make_offload_key
from tiered_kv.stack.buffers import Blocks, bytes_in
from tiered_kv.stack.calls import PAUSE_MIN_S, HintsAsGiven, M, end_of
from tiered_kv.stack.facade import BlockFacade
from tiered_kv.system.log_limit import LogLimit

if TYPE_CHECKING:
    from tiered_kv.stack.buffers import AnyBuffer

_log = logging.getLogger(__name__)
_limit = LogLimit()

GROUP: Final = int.from_bytes(b"valu", "big")
"""The KV cache group of the keys of values. Engines count their groups from 0."""
_MAGIC: Final = b"TKVval1\0"
_LENGTH_BYTES: Final = 8
HEADER_BYTES: Final = 32
"""The magic, the length of the value, and the digest of key, length and value. `docs/reference/formats.md` has it."""


class Values:
    """The values of a stack. Any thread of its process may call the methods.

    A key is bytes of any length, of your own making; a value and a block may have the same key. A key is for one value:
    a `put` of a stored key keeps the value that is stored. So name a value by its content, or put a version into the
    key.

    Each value takes a whole block, whatever its length.
    """

    def __init__(self, stack: BlockFacade[Any]) -> None:  # Any: the stack's manager, which is not used here
        self._stack = stack

    @property
    def bytes_max(self) -> int:
        """The length of the longest value."""
        return max(0, self._stack.region.block_bytes - HEADER_BYTES)

    @property
    def epoch(self) -> int:
        """As of `Stack.epoch`."""
        return self._stack.epoch

    def put(self, key: bytes, value: AnyBuffer, *, timeout: float = 10.0, hints: HintsAsGiven = None) -> bool:
        """Store a value, if the key has none; see `put_many`. Return whether the key has a value now."""
        return self.put_many({key: value}, timeout=timeout, hints=hints) == 1

    def put_many(
        self,
        values: Mapping[bytes, AnyBuffer],
        *,
        timeout: float = 10.0,
        hints: HintsAsGiven = None,
        epoch: int | None = None,
    ) -> int:
        """Store the values of keys that have none yet.

        Args:
            values: By key. A value is any contiguous buffer, numpy array, or tensor of torch on the CPU, of at most
                `bytes_max` bytes. It must not change before `put_many` returns.
            timeout: Seconds to wait, in all, for room.
            hints: As of `Stack.put`.
            epoch: As of `Stack.put`.

        Returns:
            How many of the first values are stored now. It is less than `len(values)` if no room could be made in time,
            0 if `hints` skip the store, or if a reset has ended `epoch`.

        Raises:
            TypeError, ValueError: A key is not bytes, or a value is not a buffer, or is too long.
        """
        stack = self._stack
        began = stack.epoch if epoch is None else epoch
        keys = self._keys_of(values)
        frames = _Frames(keys, [self._checked(value) for value in values.values()], stack.region.block_bytes)
        end_s = end_of(timeout)
        return stack._run(lambda: stack._put(keys, frames, end_s, hints, began))

    def get(self, key: bytes, timeout: float = 1.0, *, hints: HintsAsGiven = None) -> bytes | None:
        """Return the value of a key, or None if it has none, or none that comes in time; see `get_many`."""
        return self.get_many([key], timeout, hints=hints)[0]

    def get_many(
        self, keys: Sequence[bytes], timeout: float = 1.0, *, hints: HintsAsGiven = None
    ) -> list[bytes | None]:
        """Return the value of each key, or None. A key without a value hides no other key.

        Args:
            keys: In any order.
            timeout: Seconds to wait, in all, for secondary tiers, and for room while other calls take it.
            hints: As of `Stack.put`.

        Raises:
            TypeError: A key is not bytes.
        """
        offload_keys, end_s = self._keys_of(keys), end_of(timeout)
        found: dict[OffloadKey, bytes] = {}
        present, absent = self._stack._run(lambda: self._split(list(dict.fromkeys(offload_keys)), end_s))
        while present:
            part = present[: self._stack._batch_blocks if time.monotonic() < end_s else 1]
            loaded = self._load(part, end_s, hints, found)
            present = present[loaded + (loaded < len(part)) :]  # a value that does not come hides no other
        for first in range(0, len(absent), self._stack._batch_blocks):
            self._load(absent[first : first + self._stack._batch_blocks], end_s, hints, found)  # it counts the misses
        return [found.get(key) for key in offload_keys]

    def contains(self, key: bytes, timeout: float = 1.0) -> bool:
        """Return whether a tier has the value of a key; see `Stack.contains`."""
        keys, end_s = self._keys_of([key]), end_of(timeout)
        present, _ = self._stack._run(lambda: self._split(keys, end_s, asks_one=True))
        return bool(present)

    def _keys_of(self, keys: Iterable[bytes]) -> list[OffloadKey]:
        blocks = self._stack._keys_of(list(keys))
        return [make_offload_key(get_offload_block_hash(key), GROUP) for key in blocks]

    def _split(
        self, keys: list[OffloadKey], end_s: float, *, asks_one: bool = False
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Return the keys that a tier has, and the others, also those of which no tier says it in time."""
        if len(keys) == 1 and not asks_one:
            return keys, []
        stack, stored = self._stack, set[OffloadKey]()
        with stack._request("contains", None) as context:
            for first in range(0, len(keys), stack._batch_blocks):
                asked, pause_s = keys[first : first + stack._batch_blocks], PAUSE_MIN_S
                while asked:
                    with stack._lock:
                        stack._raise_if_closed()
                        answers = stack._manager.contains_many(asked, context)
                        stack._manager.on_schedule_end()
                    stored.update(key for key, answer in zip(asked, answers, strict=True) if answer)
                    asked = [key for key, answer in zip(asked, answers, strict=True) if answer is None]
                    if asked and time.monotonic() >= end_s:
                        break
                    if asked:
                        pause_s = stack._pause(pause_s)
        return [key for key in keys if key in stored], [key for key in keys if key not in stored]

    def _load(
        self, keys: Sequence[OffloadKey], end_s: float, hints: HintsAsGiven, found: dict[OffloadKey, bytes]
    ) -> int:
        """Load the longest available prefix of a batch of keys into `found`; return its length."""
        stack = self._stack
        rows = np.empty((len(keys), stack.region.block_bytes), np.uint8)
        ask = stack._manager.lookup_prefix
        loaded = stack._run(lambda: stack._prefix("get", keys, end_s, hints, ask, rows))
        for row, key in zip(rows, keys[:loaded], strict=False):
            value = _value(row, key)
            if value is not None:
                found[key] = value
        return loaded

    def _checked(self, value: AnyBuffer) -> Blocks:
        content = bytes_in(value, "value")
        if content.size > self._stack.region.block_bytes - HEADER_BYTES:
            raise ValueError(
                f"a value has at most {self.bytes_max} bytes here, found {content.size}: raise block.bytes, or cut the "
                "value into several"
            )
        return content


class ValueFacade(BlockFacade[M]):
    """The part of a stack that stores and loads blocks and values by key."""

    @property
    def values(self) -> Values:
        """The values of any length up to a block that the stack stores, beside the blocks."""
        return Values(self)


class _Frames:
    """The blocks of values, each made when it is asked for."""

    def __init__(self, keys: Sequence[OffloadKey], contents: Sequence[Blocks], block_bytes: int) -> None:
        self._keys, self._contents, self._block_bytes = keys, contents, block_bytes

    def __getitem__(self, part: slice) -> Blocks:
        keys = self._keys[part]
        rows = np.empty((len(keys), self._block_bytes), np.uint8)
        for row, key, content in zip(rows, keys, self._contents[part], strict=True):
            _frame(row, key, content)
        return rows


def _frame(row: Blocks, key: OffloadKey, content: Blocks) -> None:
    """Write a value into its block; the block is zero behind it."""
    length = int(content.size).to_bytes(_LENGTH_BYTES, "little")
    row[HEADER_BYTES : HEADER_BYTES + content.size] = content
    row[HEADER_BYTES + content.size :] = 0
    head = _MAGIC + length + _digest(key, length, row[HEADER_BYTES : HEADER_BYTES + content.size])
    row[:HEADER_BYTES] = np.frombuffer(head, np.uint8)


def _value(row: Blocks, key: OffloadKey) -> bytes | None:
    """Return the value in a block; None if the block has none of this key."""
    head = row[:HEADER_BYTES].tobytes()
    length = head[len(_MAGIC) : len(_MAGIC) + _LENGTH_BYTES]
    size = int.from_bytes(length, "little")
    if head.startswith(_MAGIC) and size <= len(row) - HEADER_BYTES:
        content = row[HEADER_BYTES : HEADER_BYTES + size]
        if head[len(_MAGIC) + _LENGTH_BYTES :] == _digest(key, length, content):
            return content.tobytes()
    if _limit.take() is not None:
        _log.warning("a block under the key of a value is no value of it, and counts as absent: %s", key.hex())
    return None


def _digest(key: OffloadKey, length: bytes, content: Blocks) -> bytes:
    digest = xxhash.xxh3_128(len(key).to_bytes(_LENGTH_BYTES, "little") + key + length)
    digest.update(content.data)
    return digest.digest()
