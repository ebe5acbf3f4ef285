"""LMCache's side of our adapter, over memory of its own; for the programs beside this."""

from __future__ import annotations

import dataclasses
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from tiered_kv_lmcache import TieredKVL2Adapter

WAIT_S = 60.0
ALIGN_BYTES = 4096
MEMORY_BYTES = 8 << 20
Entry = Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What an object of a group is made of."""

    sizes: tuple[tuple[int, ...], ...] = ((2, 4, 16, 32),)
    dtype: torch.dtype = torch.bfloat16

    @property
    def layout(self) -> MemoryLayoutDesc:
        return MemoryLayoutDesc([torch.Size(size) for size in self.sizes], [self.dtype for _ in self.sizes])

    @property
    def used_bytes(self) -> int:
        return sum(torch.Size(size).numel() * self.dtype.itemsize for size in self.sizes)


FULL = Shape()
ODD = Shape(((3, 7, 11), (5,)), torch.float32)
"""944 bytes, of which no page is a multiple."""


class Listener(L2AdapterListener):  # type: ignore[misc]  # LMCache is not there when types are checked
    """Notes what LMCache is told."""

    def __init__(self) -> None:
        self.stored: list[ObjectKey] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        assert len(keys) == len(sizes)
        self.stored += keys

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys


class Host:
    """Memory, an adapter over it, and LMCache's side of a task."""

    def __init__(
        self,
        tiers: Sequence[Entry],
        memory_bytes: int = MEMORY_BYTES,
        align_bytes: int = ALIGN_BYTES,
        **params: object,
    ) -> None:
        raw = torch.empty(memory_bytes + ALIGN_BYTES, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGN_BYTES
        self.memory = raw[start : start + memory_bytes]
        self.memory.random_(0, 256)
        self.used = 0
        self.listener = Listener()
        self.adapter = TieredKVL2Adapter(
            {"tiers": list(tiers), "namespace": {"revision": "1"}, **params},
            l1_memory_desc=L1MemoryDesc(self.memory.data_ptr(), memory_bytes, align_bytes),
        )
        self.adapter.register_listener(self.listener)

    def objects(self, count: int, shape: Shape = FULL) -> list[TensorMemoryObj]:
        """Return parts of the memory, as LMCache's allocator makes them."""
        found = []
        for _ in range(count):
            room = -(-shape.used_bytes // ALIGN_BYTES) * ALIGN_BYTES
            data = self.memory[self.used : self.used + shape.used_bytes]
            layout = shape.layout
            meta = MemoryObjMetadata(
                layout.shapes[0],
                layout.dtypes[0],
                self.used,
                room,
                1,
                fmt=MemoryFormat.KV_2LTD,
                shapes=layout.shapes,
                dtypes=layout.dtypes,
            )
            found.append(TensorMemoryObj(data, meta, parent_allocator=None))
            self.used += room
            assert self.used <= len(self.memory)
        return found

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> Any:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        return self._wait(self.adapter.get_store_event_fd(), lambda: self.adapter.pop_completed_store_tasks().get(task))

    def lookup(self, keys: Sequence[ObjectKey], shapes: Mapping[int, Shape] | None = None) -> list[bool]:
        told = {0: FULL} if shapes is None else shapes
        layouts = {group: shape.layout for group, shape in told.items()}
        task = self.adapter.submit_lookup_and_lock_task(list(keys), layouts)
        bits = self._wait(
            self.adapter.get_lookup_and_lock_event_fd(), lambda: self.adapter.query_lookup_and_lock_result(task)
        )
        return [bits.test(place) for place in range(len(keys))]

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        bits = self._wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        return [bits.test(place) for place in range(len(keys))]

    def _wait(self, fd: int, collect: Callable[[], Any]) -> Any:
        poll, end_s = select.poll(), time.monotonic() + WAIT_S
        poll.register(fd, select.POLLIN)
        while (result := collect()) is None:
            assert time.monotonic() < end_s, "a task did not end"
            if poll.poll(1000):
                consume_fd(fd)
        return result


@contextmanager
def host(*tiers: Entry, **params: Any) -> Iterator[Host]:
    opened = Host(tiers, **params)
    try:
        yield opened
    finally:
        opened.adapter.close()


def keys_of(count: int, name: str = "prompt", **fields: Any) -> list[ObjectKey]:
    told = {"model_name": "m", "kv_rank": 0x01000100, **fields}
    return [ObjectKey(chunk_hash=f"{name}-{number}".encode().rjust(32), **told) for number in range(count)]
