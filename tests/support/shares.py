"""Requests of several tenants through tiers without memory, and what each tenant finds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tests.support.stacks import stack_of
from tiered_kv.base import ReqContext, make_offload_key
from tiered_kv.config.stack_config import load_config
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.shared_rows import primary_rows
from tiered_kv.hints import HINTS_KEY
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv.workload.request import ChatWorkload, Request
from tiered_kv.workload.simulation import Server
from tiered_kv_nvme.directory import DIRECTORY_RESERVE_BYTES, SEGMENT_RESERVE_BYTES

BLOCK_BYTES = 4096  # in the tiers below a primary tier
QUIET, FLOODING = "quiet", "flooding"
Asked = tuple[str, tuple[int, ...]]
"""A tenant, and the blocks of its prompt."""


class NoMemory(PrimaryRegion):
    """A region of this size without memory."""

    def __init__(self, num_blocks: int, block_bytes: int = 8) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes

    def close(self) -> bool:
        return True

    def unlink(self) -> None:
        pass


def context_of(tenant: str, number: int) -> ReqContext:
    return ReqContext(f"{tenant}-{number}", {HINTS_KEY: {"tenant": tenant}} if tenant else None)


def found_by_tenant(
    asked: Iterable[Asked], policy: str, num_blocks: int, limits: Mapping[str, str] | None
) -> tuple[Counter[str], Counter[str]]:
    """Return how many blocks each tenant asks for, and how many of them it finds."""
    rows = primary_rows(CPUBackend(NoMemory(num_blocks)), policy, limits)
    numbers = itertools.count()
    manager = TieringOffloadingManager(rows, clock=lambda: next(numbers) / 1000)
    blocks, hits = Counter[str](), Counter[str]()
    for number, (tenant, ids) in enumerate(asked):
        context = context_of(tenant, number)
        manager.on_new_request(context)
        keys = [make_offload_key(each.to_bytes(8, "big"), 0) for each in ids]
        found = next((at for at, key in enumerate(keys) if not manager.lookup(key, context)), len(keys))
        blocks[tenant] += len(keys)
        hits[tenant] += found
        if found:
            manager.prepare_load(keys[:found], context)
            manager.complete_load(keys[:found], context)
        for first in range(found, len(keys), 32):
            output = manager.prepare_store(keys[first : first + 32], context)
            if output is None:  # a prompt that is longer than the tier
                assert limits is None, "a share refuses nothing"
                break
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        manager.on_schedule_end()
    manager.shutdown()
    return blocks, hits


def memory_of(num_blocks: int) -> dict[str, object]:
    """Return the entry of a memory tier of so many blocks."""
    return {"type": "memory", "capacity": num_blocks * (BLOCK_BYTES + HEADER_BYTES)}


def nvme_of(num_blocks: int, *, segment_blocks: int = 16) -> dict[str, object]:
    """Return the entry of an nvme tier of so many blocks, where a batch's header takes a block's room."""
    segment_bytes = (segment_blocks + 4) * BLOCK_BYTES
    capacity = num_blocks // segment_blocks * (segment_bytes + SEGMENT_RESERVE_BYTES) + DIRECTORY_RESERVE_BYTES
    return {"type": "nvme", "path": "/unused", "segment": segment_bytes, "capacity": capacity}


def found_below(
    asked: Iterable[Asked],
    num_blocks: int,
    limits: Mapping[str, str] | None,
    *,
    tier_of: Callable[[int], dict[str, object]] = memory_of,
    primary_blocks: int = 160,
) -> tuple[Counter[str], Counter[str]]:
    """As `found_by_tenant`, for a tier with these limits below a small primary tier without."""
    entry = {**tier_of(num_blocks), "store_budget": "1GiB", **({} if limits is None else {"limits": limits})}
    config = stack_of(entry, blocks=primary_blocks, block_bytes=BLOCK_BYTES)
    replay = Server(load_config(config), {}, lambda: 0.0).replay
    blocks, hits = Counter[str](), Counter[str]()
    for tenant, ids in asked:
        before = sum(replay.tally.hits.values())
        replay.admit(Request(0, 16 * len(ids), 16, ids, hints={"tenant": tenant}))
        while replay.running:
            replay.step()
        blocks[tenant] += len(ids)
        hits[tenant] += sum(replay.tally.hits.values()) - before
    return blocks, hits


def quiet_requests(chats: int = 60, *, active_chats: int = 12) -> list[tuple[int, ...]]:
    """Return the prompts of the quiet tenant: chats of several turns."""
    return [each.hash_ids for each in ChatWorkload(seed=1, chats=chats, active_chats=active_chats).requests()]


def flood(times: int, *, is_chatting: bool) -> Iterator[tuple[int, ...]]:
    """Yield so many prompts of the flooding tenant: chats, which hit too, or prompts that never return."""
    if is_chatting:
        chats = ChatWorkload(seed=2, chats=times // 8 + 1, active_chats=64)
        yield from itertools.islice((each.hash_ids for each in chats.requests()), times)
    else:
        for number in range(times):
            yield tuple(range(number * 40 + 1, number * 40 + 41))


def flooded(quiet: Sequence[tuple[int, ...]], flooding: Iterator[tuple[int, ...]], times: int) -> Iterator[Asked]:
    """Yield each prompt of the quiet tenant behind so many of the flooding one."""
    for ids in quiet:
        yield from ((FLOODING, each) for each in itertools.islice(flooding, times))
        yield QUIET, ids
