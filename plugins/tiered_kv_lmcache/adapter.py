"""Our tiers as an L2 adapter of LMCache's server, and the translation of its keys to our keys.

LMCache's controllers call the adapter from two threads, and tasks end on the tiers' threads. `_lock` guards results and
sets. Every task ends, and only when no tier uses its objects any more.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from tiered_kv.base import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
from tiered_kv.config.entries import tier_type_of
from tiered_kv.direct import DirectTiers
from tiered_kv.engines.keywords import known_to_base
from tiered_kv.errors import ConfigError
from tiered_kv_lmcache.tier_set import Places, TierSet, read_settings

_log = logging.getLogger(__name__)
_RANK_BYTES = 8


class _Kind(Enum):
    STORE = "store"
    LOOKUP = "contains"
    LOAD = "load"


class _Work:
    """A task of LMCache, split into parts for sets of tiers. Any thread may call.

    When the last part has ended, `finish` is called with an answer for each of `size` keys. Without parts it is called
    at once.
    """

    def __init__(self, size: int, parts: int, finish: Callable[[list[bool]], None]) -> None:
        self._answers = [False] * size
        self._parts = parts
        self._finish = finish
        self._lock = threading.Lock()
        if not parts:
            finish(self._answers)

    def end_part(self, places: Sequence[int], answers: Sequence[bool]) -> None:
        """Note the answers for the keys at `places`."""
        with self._lock:
            for place, is_done in zip(places, answers, strict=True):
                self._answers[place] |= is_done
            self._parts -= 1
            is_last = not self._parts
        if is_last:
            self._finish(self._answers)


class TieredKVL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not there when types are checked
    """Stores objects of LMCache's L1 in our tiers, and loads them, without a copy.

    LMCache's controllers call it from two threads; no call waits. A task ends on a tier's thread, when no tier uses its
    objects any more. LMCache wants objects locked from lookup to load. Our tiers lock nothing: an object that was
    evicted in between is a miss of the load.

    Args:
        params: `adapter_params` of the configuration; see `AdapterSettings`.
        l1_memory_desc: Address and size of LMCache's L1.

    Raises:
        ConfigError: The parameters cannot be used, a library is missing, L1 is not in this process's memory, or the
            entry has a serde or an eviction.
    """

    def __init__(
        self, params: Mapping[str, object], l1_memory_desc: L1MemoryDesc | None = None, **unknown: object
    ) -> None:
        _check_entry()
        super().__init__(max_capacity_bytes=0, **known_to_base(TieredKVL2Adapter, unknown))  # the tiers evict
        self._settings = read_settings(params)
        if l1_memory_desc is None:
            raise ConfigError("LMCache's L1 is not in this process's memory, and the tiers read and write it in place")
        for tier in self._settings.tiers:
            tier_type_of(tier).load()  # now, so that a missing library is an error at the start
        self._l1 = l1_memory_desc
        self._notifiers = {kind: create_event_notifier() for kind in _Kind}
        self._numbers = itertools.count()
        """Numbers of the tasks."""
        self._places = Places(self._settings)
        self._lock = threading.Lock()  # guards the fields below; held for dictionary operations only
        self._results: dict[_Kind, dict[int, Any]] = {kind: {} for kind in _Kind}
        """Results that LMCache has not taken, by kind and by number of the task."""
        self._sets: dict[tuple[object, ...], TierSet] = {}
        """The tier sets, by model and layout."""
        self._is_closed = False
        self._was_asked_to_delete = False

    def get_store_event_fd(self) -> int:
        return self._fd(_Kind.STORE)

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._fd(_Kind.LOOKUP)

    def get_load_event_fd(self) -> int:
        return self._fd(_Kind.LOAD)

    def _fd(self, kind: _Kind) -> int:
        return int(self._notifiers[kind].fileno())

    # Stores and loads.

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        for each in objects:
            _clear_padding(each)
        return self._transfer(_Kind.STORE, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._results[_Kind.STORE] = self._results[_Kind.STORE], {}
        return done

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._transfer(_Kind.LOAD, keys, objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._take(_Kind.LOAD, task_id)

    def _transfer(self, kind: _Kind, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Split a task by the layouts of its objects, and give each part to the tiers of its layout."""
        number = next(self._numbers)
        parts: dict[TierSet, list[int]] = {}
        for place, (key, each) in enumerate(zip(keys, objects, strict=True)):
            meta = each.meta
            shapes, dtypes = meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]
            parts.setdefault(self._set_of(key.model_name, shapes, dtypes, meta.phy_size), []).append(place)
        names = [offload_key(key) for key in keys]
        work = _Work(len(keys), len(parts), partial(self._end_transfer, kind, number, keys, names, parts))
        for tier_set, places in parts.items():
            offsets = [objects[place].data_ptr - self._l1.ptr for place in places]
            part = [names[place] for place in places]
            task = partial(_begin, kind=kind, work=work, places=places, names=part, offsets=offsets)
            tier_set.use(task, stores=kind is _Kind.STORE)
        return number

    def _end_transfer(
        self,
        kind: _Kind,
        number: int,
        keys: list[ObjectKey],
        names: list[OffloadKey],
        parts: Mapping[TierSet, list[int]],
        answers: list[bool],
    ) -> None:
        """Report the blocks of an ended transfer to LMCache's listeners, and give LMCache its result."""
        done = {tier_set: [place for place in places if answers[place]] for tier_set, places in parts.items()}
        try:
            for tier_set, places in done.items():
                new = tier_set.learn([names[place] for place in places])
                stored = list(dict.fromkeys(keys[place] for place in places if names[place] in new))
                if stored:
                    self._notify_keys_stored(stored, [tier_set.block_bytes] * len(stored))
                    self._report_removed(tier_set, tier_set.too_many())
            loaded = [key for key, is_done in zip(keys, answers, strict=True) if is_done]
            if loaded and kind is _Kind.LOAD:
                self._notify_keys_accessed(loaded)
        finally:  # runs also if a listener of LMCache raises
            moved_bytes = sum(tier_set.block_bytes * len(places) for tier_set, places in done.items())
            result = L2StoreResult(all(answers), moved_bytes) if kind is _Kind.STORE else _bitmap(answers)
            self._put(kind, number, result)

    # Lookups.

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        number = next(self._numbers)
        parts: dict[TierSet, list[int]] = {}
        for place in in_prefix_order(keys):
            key = keys[place]
            for tier_set in self._sets_of(key.model_name, group_layout_descs.get(key.object_group_id)):
                parts.setdefault(tier_set, []).append(place)
        work = _Work(len(keys), len(parts), lambda answers: self._put(_Kind.LOOKUP, number, _bitmap(answers)))
        for tier_set, places in parts.items():
            part = [offload_key(keys[place]) for place in places]
            task = partial(_begin, kind=_Kind.LOOKUP, work=work, places=places, names=part)
            tier_set.use(task, stores=False)
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._take(_Kind.LOOKUP, task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        return  # nothing is locked

    def _sets_of(self, model: str, layout: MemoryLayoutDesc | None) -> list[TierSet]:
        """Return the sets that may have an object: the set of its `layout`, or all sets of its model if it has none."""
        if layout is not None and layout.shapes:
            sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)]
            align_bytes = self._l1.align_bytes
            return [self._set_of(model, layout.shapes, layout.dtypes, -(-sum(sizes) // align_bytes) * align_bytes)]
        with self._lock:
            return [each for each in self._sets.values() if each.model == model]

    # Sets of tiers.

    def _set_of(self, model: str, shapes: Sequence[Any], dtypes: Sequence[Any], block_bytes: int) -> TierSet:
        layout = (model, tuple(shapes), tuple(dtypes), block_bytes)
        with self._lock:
            found = self._sets.get(layout)
            if found is None:
                found = TierSet(
                    model,
                    _text_of(shapes, dtypes),
                    block_bytes,
                    self._settings,
                    (self._l1.ptr, self._l1.size),
                    self._places,
                    self._report_removed,
                )
                if self._is_closed:
                    found.close()  # the tasks of the set end with misses
                else:
                    self._sets[layout] = found
            return found

    def _report_removed(self, tier_set: TierSet, keys: Sequence[OffloadKey]) -> None:
        removed = [object_key(key, tier_set.model) for key in tier_set.forget(keys)]
        if removed:
            self._notify_keys_deleted(removed, [tier_set.block_bytes] * len(removed))

    # Results, status, the end.

    def _put(self, kind: _Kind, number: int, result: Any) -> None:
        with self._lock:
            if not self._is_closed:
                results = self._results[kind]
                # LMCache collects all ended stores at once, so that one notice is enough for them.
                is_notified = kind is _Kind.STORE and bool(results)
                results[number] = result
                if not is_notified:
                    self._notifiers[kind].notify()

    def _take(self, kind: _Kind, number: int) -> Any:
        with self._lock:
            return self._results[kind].pop(number, None)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Do nothing but log once: the tiers delete no single block, and evict by themselves."""
        if not self._was_asked_to_delete:
            self._was_asked_to_delete = True
            _log.warning(
                "LMCache asked to delete %d objects: our tiers delete none one by one; see docs/how-to/lmcache.md",
                len(keys),
            )

    def report_status(self) -> dict[str, Any]:
        """Return the state and the counters of all tiers. The adapter is healthy while it is open."""
        with self._lock:
            sets = list(self._sets.values())
        return {
            "is_healthy": not self._is_closed,
            "type": type(self).__name__,
            "sets": [each.status() for each in sets],
        }

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            sets = list(self._sets.values())
        for each in [*sets, *self._notifiers.values()]:
            each.close()


def _check_entry() -> None:
    """Raise ConfigError if the entry of the new adapter has a serde, or an eviction, which would have no effect.

    LMCache hands an adapter its parameters only. The whole configuration is a variable of the function that makes it.
    """
    frame = sys._getframe()
    while frame.f_code.co_name != "_create_plugin_adapter":
        if frame.f_back is None:
            return
        frame = frame.f_back
    config = frame.f_locals.get("config")
    found = getattr(config, "serde_config", None)
    if found is not None:
        raise ConfigError(
            f"found a serde of type '{found.type}'. It stores objects of another layout than LMCache looks up, so none "
            'would ever be found. Leave it out; to compress, write a \'codec\' at a tier, such as "codec": "zstd"',
            location="serde",
        )
    if getattr(config, "eviction_config", None) is not None:
        raise ConfigError(
            "LMCache would evict from the tiers, which delete no single object and evict by themselves. Leave it out, "
            "and write a 'capacity' at each tier",
            location="eviction",
        )


def _begin(
    tiers: DirectTiers | None,
    *,
    kind: _Kind,
    work: _Work,
    places: list[int],
    names: list[OffloadKey],
    offsets: list[int] | None = None,
) -> None:
    """Start a part of a task. It fails if `tiers` is None, or if the tiers refuse it. A lookup has no `offsets`."""
    end = partial(work.end_part, places)
    if tiers is not None:
        arguments = [names] if offsets is None else [names, offsets]
        try:
            getattr(tiers, kind.value)(*arguments, end)
            return
        except Exception as error:  # LMCache gets its answer, whatever is raised
            _log.error("%s of %d objects: %s: %s", kind.value, len(names), type(error).__name__, error)
    end([False] * len(names))


def _text_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """Return arrays as text, such as "bfloat16 2x4x256x512"."""
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def _bitmap(answers: Sequence[bool]) -> Bitmap:
    bits = Bitmap(len(answers))
    for place, is_set in enumerate(answers):
        if is_set:
            bits.set(place)
    return bits


def _clear_padding(each: MemoryObj) -> None:
    """Zero the bytes between an object and the end of its place in L1: they may be another object's bytes."""
    used = each.get_size()
    padding = each.get_physical_size() - used
    if padding > 0:
        ctypes.memset(each.data_ptr + used, 0, padding)


def offload_key(key: ObjectKey) -> OffloadKey:
    """Return the key of an LMCache object in the tiers of its model.

    The group index of our key is LMCache's object group, and its hash is:

        length of the chunk's hash (1 byte) || hash || rank (8 bytes, big-endian) || salt (UTF-8)

    The model's name is not in it: each model has its own tiers.
    """
    chunk_hash = key.chunk_hash
    rank = key.kv_rank.to_bytes(_RANK_BYTES, "big")
    return make_offload_key(
        bytes((len(chunk_hash),)) + chunk_hash + rank + key.cache_salt.encode(), key.object_group_id
    )


def object_key(key: OffloadKey, model: str) -> ObjectKey:
    """Return the key of LMCache from which `offload_key` made `key`."""
    text = get_offload_block_hash(key)
    rank_at = 1 + text[0]
    salt_at = rank_at + _RANK_BYTES
    return ObjectKey(
        chunk_hash=text[1:rank_at],
        model_name=model,
        kv_rank=int.from_bytes(text[rank_at:salt_at], "big"),
        object_group_id=get_offload_group_idx(key),
        cache_salt=text[salt_at:].decode(),
    )


def in_prefix_order(keys: Sequence[ObjectKey]) -> list[int]:
    """Return the places of `keys`, sorted by group and within a group by the prompt's chunks.

    LMCache looks up all chunks of one rank, then all of the next. A tier that searches a prefix by parts needs all
    ranks of a chunk before the next chunk.
    """
    chunks_before: Counter[tuple[int, int]] = Counter()
    order = []
    for place, key in enumerate(keys):
        row = (key.object_group_id, key.kv_rank)
        order.append((key.object_group_id, chunks_before[row], place))
        chunks_before[row] += 1
    return [place for _, _, place in sorted(order)]
