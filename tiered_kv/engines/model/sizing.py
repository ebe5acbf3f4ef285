"""The cache that a load needs: what memory and disk hold, when loading beats computing, and a stack that fits.

`tiered-kv size` calls `plan`. It only computes, on any thread. What must stay true: a stack whose sizes it chooses can
be validated and opened, and its disk holds every prompt of the load, also with the segments that nvme keeps free. A
size that was given is kept, and `problems` says if it does not suffice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.engines.model.layers import KVModel
from tiered_kv.engines.prefill_meter import TokenCost
from tiered_kv.tiering.pace import EngineCost

_BUDGETS: Final = 4
"""Into how many parts a tier's default budgets divide the primary tier: `store_budget` and `load_budget` have one."""
_DISK_SHARE: Final = 0.9
"""The share of a disk's capacity that holds blocks; the rest is for segments that are free, or being written."""
_HEADER_BYTES: Final = 4096
"""The most that a tier stores for a block beside its bytes."""
_DISK_BLOCKS: Final = 160
_DISK_BYTES: Final = 32 << 20
"""Room for those segments in a small directory: this many blocks and bytes. A segment may lack room for its last block,
and a small directory has 64 of them."""
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """What users ask for.

    Args:
        users: Users who have a conversation at the same time.
        context_tokens: Tokens of a prompt, with all that was said before.
        turn_gap_s: Seconds from a user's prompt to the same user's next one.
        hit_rate: Share of a prompt's tokens that an earlier prompt has brought; the others are computed in any case.
    """

    users: int
    context_tokens: int
    turn_gap_s: float
    hit_rate: float

    @property
    def prompts_per_s(self) -> float:
        return self.users / self.turn_gap_s


@dataclass(frozen=True, slots=True)
class Machine:
    """What is there; None for what nobody said.

    Args:
        memory_bytes: CPU memory for the primary tier.
        disk_bytes: Room on the disk.
        disk_bytes_per_s: What the disk reads.
        cost: What a token of a prompt costs the engine.
        path: The directory of the nvme tier.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    disk_bytes_per_s: int | None = None
    cost: TokenCost | None = None
    path: str = "/mnt/nvme0/kv-cache"


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity of a tier: its bytes, the prompts of the load that fit, and the reason for the size."""

    capacity_bytes: int
    prompts: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rates:
    """What a load asks for in a second. Of what an engine's costs decide, None if nobody said these.

    Args:
        prompts_per_s: Prompts of all users.
        load_bytes_per_s: What is loaded if every hit is served.
        disk_load_bytes_per_s: The part of it that memory does not serve, if users return in any order.
        store_bytes_per_s: New blocks.
        prefill_tokens_per_s: What the engine computes of such prompts.
        break_even_bytes_per_s: The rate from which loading such a prompt beats computing it.
        engine_share: The share of the engine's time that prompts take without a cache.
        engine_share_with_hits: The same with every hit.
    """

    prompts_per_s: float
    load_bytes_per_s: float
    disk_load_bytes_per_s: float
    store_bytes_per_s: float
    prefill_tokens_per_s: float | None = None
    break_even_bytes_per_s: float | None = None
    engine_share: float | None = None
    engine_share_with_hits: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A cache for a load: its sizes and rates, a stack without `block` and `namespace`, and what does not suffice."""

    block_tokens: int
    block_bytes: int
    prompt_bytes: int
    all_bytes: int
    memory: Capacity
    disk: Capacity | None
    rates: Rates
    stack: Mapping[str, Any]  # Any: as YAML
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The reasons for the values of `stack`, by the names of their settings with dots."""
    problems: tuple[str, ...] = ()


def plan(model: KVModel, block_tokens: int, load: Load, machine: Machine) -> Plan:
    """Return a cache for a load; with `machine.memory_bytes` or `disk_bytes` one within these bytes."""
    block_bytes = model.row_bytes(block_tokens)
    prompt_bytes = model.prompt_rows(load.context_tokens, block_tokens) * block_bytes
    all_bytes = prompt_bytes * load.users
    memory = _memory(prompt_bytes, block_bytes, load, machine)
    disk = None
    if machine.disk_bytes is not None or memory.prompts < load.users:
        disk = _disk(prompt_bytes, block_bytes, load, machine)
    rates = _rates(prompt_bytes, memory, load, machine)
    stack, reasons = _stack(prompt_bytes, memory, disk, load, machine)
    problems = tuple(_problems(prompt_bytes, memory, disk, rates, load, machine))
    return Plan(block_tokens, block_bytes, prompt_bytes, all_bytes, memory, disk, rates, stack, reasons, problems)


def _memory(prompt_bytes: int, block_bytes: int, load: Load, machine: Machine) -> Capacity:
    each = rounded_bytes(prompt_bytes)
    if machine.memory_bytes is not None:
        capacity, reason = machine.memory_bytes, "as given"
    else:
        load_s = load.hit_rate * prompt_bytes / machine.disk_bytes_per_s if machine.disk_bytes_per_s else 0.0
        at_once = max(1, math.ceil(load.prompts_per_s * load_s))
        least = _BUDGETS * at_once * prompt_bytes
        every = load.users * prompt_bytes
        if every <= least:
            capacity, reason = every, f"{load.users:,} prompts of {each}, which is every user's"
        else:
            capacity = least
            reason = (
                f"the least: a quarter, the load budget, holds {_prompts(at_once)} of {each} on the way from the disk"
            )
        capacity = _rounded(max(capacity, 2 * block_bytes))
    return Capacity(capacity, capacity // prompt_bytes, reason)


def _disk(prompt_bytes: int, block_bytes: int, load: Load, machine: Machine) -> Capacity:
    free_bytes = _DISK_BLOCKS * block_bytes + _DISK_BYTES
    stored_bytes = prompt_bytes // block_bytes * (block_bytes + _HEADER_BYTES)
    wanted = _rounded(math.ceil(load.users * stored_bytes / _DISK_SHARE) + free_bytes)
    reason = f"{load.users:,} prompts of {rounded_bytes(prompt_bytes)}, and a tenth for segments that are free"
    if machine.disk_bytes is not None and machine.disk_bytes < wanted:
        wanted, reason = machine.disk_bytes, "as given"
    return Capacity(wanted, max(0, int(_DISK_SHARE * (wanted - free_bytes))) // stored_bytes, reason)


def _rates(prompt_bytes: int, memory: Capacity, load: Load, machine: Machine) -> Rates:
    bytes_per_s = load.prompts_per_s * prompt_bytes
    loads, missing = load.hit_rate * bytes_per_s, max(0.0, 1 - memory.prompts / load.users)
    rates = Rates(load.prompts_per_s, loads, loads * missing, bytes_per_s - loads)
    if machine.cost is None:
        return rates
    cost = EngineCost(*machine.cost)  # of blocks of one token
    hits = int(load.hit_rate * load.context_tokens)
    whole_s, rest_s = cost.of(load.context_tokens), cost.of(load.context_tokens - hits, hits)
    return replace(
        rates,
        prefill_tokens_per_s=load.context_tokens / whole_s,
        break_even_bytes_per_s=prompt_bytes / whole_s,
        engine_share=load.prompts_per_s * whole_s,
        engine_share_with_hits=load.prompts_per_s * rest_s,
    )


def _stack(
    prompt_bytes: int, memory: Capacity, disk: Capacity | None, load: Load, machine: Machine
) -> tuple[dict[str, Any], dict[str, str]]:
    stack: dict[str, Any] = {"primary": {"capacity": format_bytes(memory.capacity_bytes)}}
    reasons = {"primary.capacity": memory.reason}
    if disk is None:
        return stack, reasons
    entry = {"type": "nvme", "path": machine.path, "capacity": format_bytes(disk.capacity_bytes)}
    reasons["secondary.0.path"] = "a directory on the disk; one process owns it"
    reasons["secondary.0.capacity"] = disk.reason
    new_bytes = math.ceil((1 - load.hit_rate) * prompt_bytes)
    for name, wanted, what in (
        ("load_budget", prompt_bytes, "a prompt"),
        ("store_budget", new_bytes, "what is new in a prompt"),
    ):
        share = memory.capacity_bytes // _BUDGETS
        if wanted > share:  # as much as it takes, and never more than half of the memory
            given = min(_rounded(wanted), memory.capacity_bytes // 2)
            entry[name] = format_bytes(given)
            reasons[f"secondary.0.{name}"] = f"{what} has {rounded_bytes(wanted)}, more than a quarter of the memory"
    return {**stack, "secondary": [entry]}, reasons


def _problems(
    prompt_bytes: int, memory: Capacity, disk: Capacity | None, rates: Rates, load: Load, machine: Machine
) -> Iterator[str]:
    if disk is not None and 2 * prompt_bytes > memory.capacity_bytes:
        yield (
            f"memory is too small: half of {rounded_bytes(memory.capacity_bytes)} must hold a prompt of "
            f"{rounded_bytes(prompt_bytes)} on its way from the disk, so longer prompts are loaded in part"
        )
    if disk is not None and max(disk.prompts, memory.prompts) < load.users:
        yield (
            f"the disk is too small: {rounded_bytes(disk.capacity_bytes)} hold {_prompts(disk.prompts)} of "
            f"{rounded_bytes(prompt_bytes)}, and {load.users:,} users have one each"
        )
    rate, least = machine.disk_bytes_per_s, rates.break_even_bytes_per_s
    if disk is not None and rate is not None and least is not None and rate < least:
        yield (
            f"the disk is too slow: it reads {per_s(rate)}, and the break-even is {per_s(least)}, so the engine "
            "computes a part of the blocks sooner than they come"
        )
    if disk is not None and rate is not None and rate < rates.disk_load_bytes_per_s:
        yield (
            f"the disk is too slow for so many users: they ask for {per_s(rates.disk_load_bytes_per_s)}, and it reads "
            f"{per_s(rate)}; more memory takes a part of that"
        )
    if rates.engine_share_with_hits is not None and rates.engine_share_with_hits > 1:
        share = f"{rates.engine_share_with_hits:.0%}"
        yield f"the engine is too slow: also with every hit, the new tokens take {share} of its time"


def per_s(rate: float) -> str:
    """Return a rate for people; GB is 1e9 bytes, as `tiered-kv bench` counts."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count:,} prompts"


def _rounded(size_bytes: int) -> int:
    """Round up to whole GiB, or MiB for small sizes."""
    unit = _GIB if size_bytes >= 8 * _GIB else _MIB
    return -(-size_bytes // unit) * unit
