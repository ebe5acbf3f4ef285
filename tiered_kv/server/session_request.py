"""A request of an engine, as its host's server knows it, and the index that finds its rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.server import protocol

RUN_MIN: Final = 16
"""Rows that end a search if fewer follow each other: then to look at each key is as fast."""


@dataclass(slots=True, eq=False)
class SessionRequest:
    """A request of an engine."""

    number: int
    context: ReqContext
    epoch: int
    """The namespace's when it began, as the engine knew it."""
    is_known: bool = False
    """Whether the manager knows it."""
    codes: list[int] = field(default_factory=list)
    """For each key its row, or a code of the protocol."""
    unsplit: list[tuple[bytes, int]] = field(default_factory=list)
    """The last keys, and how many, message by message: if all are found, they are never split."""
    _keys: list[OffloadKey] = field(default_factory=list)
    answered: int = 0
    """Keys before this one have their final codes."""
    leased: dict[int, None] = field(default_factory=dict)
    is_ahead: bool = False
    """Whether it waits in the engine's queue."""
    prefetched: int = 0
    """Keys before this one are ready, or were given to the manager's prefetch."""
    told: list[int] = field(default_factory=list)
    """The codes that were last sent, from `answered` on, if they were not all final."""
    promoting: int = 0
    """How many of its blocks were being promoted when it was last looked up."""
    unanswered: int = 0
    """How many of its keys had no final code then."""
    asked_to: int = 0
    """Where looking its keys up again goes on."""

    @property
    def keys(self) -> list[OffloadKey]:
        for packed, count in self.unsplit:
            self._keys += protocol.split_keys(packed, count)
        self.unsplit.clear()
        return self._keys

    def unsplit_from(self, first: int) -> list[tuple[bytes, int]]:
        """Return the messages whose keys are those from `first` on; none if these have been split."""
        at = len(self._keys)
        for index, (_, count) in enumerate(self.unsplit):
            if at == first:
                return self.unsplit[index:]
            at += count
        return []


class ReadyBlocks(Protocol):
    """What `RowIndex` reads of a `CPUOffloadingManager`."""

    blocks: dict[OffloadKey, CPUBlock]
    epoch: int


class RowIndex:
    """Remembers the key of each row, and the row that followed it in the last prefix. Owned by the server's thread.

    To find 512 keys in a dictionary that has left the processor's cache takes 0.2 ms, and an engine's step waits. Here
    the first key's row leads to the others. That is a guess. It holds for a row that has the key that is asked for, and
    still the generation of the note: a row gets another when it is freed.

    Args:
        primary: The primary tier. After a reset, which rows in use outlast with their generation, nothing is noted.
        generations: The generation of each row.
    """

    def __init__(self, primary: ReadyBlocks, generations: memoryview) -> None:
        self._primary = primary
        self._generations = generations
        self._following = array("I", bytes(generations.nbytes))
        self._keys: np.ndarray[Any, np.dtype[np.void]] = np.zeros(0, np.void(0).dtype)
        self._last = 0
        self._epoch = -1
        self._clear_after_reset()

    def note(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Note that ready blocks are in these rows."""
        self._clear_after_reset()
        if not len(self._keys):
            self._keys = np.zeros(len(self._generations), f"V{len(keys[0])}")
        if set(map(len, keys)) == {self._keys.itemsize}:  # engines of a namespace have keys of one length
            index = np.array(rows, np.uint32)
            self._keys[index] = np.frombuffer(b"".join(keys), self._keys.dtype)
            self._noted[index] = self._current()[index]
            for row, following in pairwise(rows):
                self._following[row] = following
            if not self._following[self._last]:
                self._following[self._last] = rows[0]  # an engine stores a prompt part by part
            self._last = rows[-1]

    def find_all(self, parts: Iterable[tuple[bytes, int]]) -> list[int]:
        """Return the rows of ready blocks: of all keys, or of some at their beginning.

        Args:
            parts: Keys of one length, one behind the other, and how many they are.
        """
        self._clear_after_reset()
        rows: list[int] = []
        for packed, count in parts:
            found = self._find(packed, count)
            rows += found
            if len(found) < count:
                break
        return rows

    def _find(self, packed: bytes, count: int) -> list[int]:
        rows: list[int] = []
        size = self._keys.itemsize
        while len(packed) == count * size > 0:
            block = self._primary.blocks.get(OffloadKey(packed[:size]))
            if block is None or block.ref_cnt < 0:
                break
            row, following = block.block_id, self._following
            if rows:
                following[rows[-1]] = row
            guess = [row, *[row := following[row] for _ in range(count - 1)]]
            index = np.frombuffer(array("I", guess), np.uint32)
            keys = self._keys.take(index)
            is_noted = self._noted.take(index) == self._current().take(index)
            if is_noted.all() and keys.tobytes() == packed:
                return rows + guess
            is_noted &= keys == np.frombuffer(packed, keys.dtype)
            found = int(is_noted.argmin())
            rows += guess[:found]
            packed, count = packed[found * size :], count - found
            if found < RUN_MIN:
                break
        return rows

    def _clear_after_reset(self) -> None:
        if self._epoch != self._primary.epoch:
            self._epoch = self._primary.epoch
            self._noted = self._current() - np.uint32(1)

    def _current(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.frombuffer(self._generations, np.uint32)  # not kept: it would keep the memory
