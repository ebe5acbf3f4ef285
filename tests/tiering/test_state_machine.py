"""Whole stacks against a dictionary, in any order of events."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.faults import FailingTier, HangingTier, HeldJobsTier, RaisingTier
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.testing.gate import Gate
from tiered_kv.testing.model import StackUnderTest
from tiered_kv.testing.prompt import PromptTier
from tiered_kv.testing.state_machine import OpenStack, make_state_machine
from tiered_kv.testing.watch import RowLedger, WatchedTier
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.limits import TierLimits
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.tier import FsTier
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.tier import NvmeTier

BLOCK_NAME_LETTERS = 32
"""Length of the name of a block's file of the fs tier: its digest in hexadecimal."""
NUM_BLOCKS = 16
BLOCK_BYTES = 512


class ResettableTier(FourMethodTier):
    """The smallest tier, and a reset."""

    def reset_cache(self) -> bool:
        self.blocks.clear()
        return True


MakeTier = Callable[[TierSpec, memoryview, Path], SecondaryTierManager]


def smallest(spec: TierSpec, view: memoryview, directory: Path) -> SecondaryTierManager:
    return FourMethodTier(spec, view, spec.name)


def smallest_with_reset(spec: TierSpec, view: memoryview, directory: Path) -> SecondaryTierManager:
    return ResettableTier(spec, view, spec.name)


def memory(spec: TierSpec, view: memoryview, directory: Path) -> SecondaryTierManager:
    # Room for fewer blocks than the chats have.
    return MemoryTier(spec, view, spec.name, MemorySettings(capacity=24 * (BLOCK_BYTES + 128)))


def nvme(spec: TierSpec, view: memoryview, directory: Path) -> SecondaryTierManager:
    settings = NvmeSettings(path=str(directory / spec.name), capacity=1 << 20, segment=64 << 10, threads=2)
    return NvmeTier(spec, view, spec.name, settings)


def fs(spec: TierSpec, view: memoryview, directory: Path) -> SecondaryTierManager:
    settings = FsSettings(path=str(directory / spec.name), capacity=1 << 20, threads=2)
    return FsTier(spec, view, spec.name, settings)


def open_stack_over(*make_tiers: MakeTier, policy: str = "lru") -> OpenStack:
    """Return an opener of stacks with tiers that can be made to fail, to hang and to lose bytes."""

    def open_stack(directory: Path) -> StackUnderTest:
        clock, ledger = ManualClock(), RowLedger()
        region = PrimaryRegion(NUM_BLOCKS, BLOCK_BYTES)
        tiers: list[SecondaryTierManager] = []
        faults: dict[str, Callable[[bool], None]] = {}
        for number, make_tier in enumerate(make_tiers):
            name, gate = f"tier-{number}", Gate()
            tier = make_tier(TierSpec(name, BLOCK_BYTES), region.kv_view, directory)
            failing = FailingTier(PromptTier(tier))
            tiers.append(WatchedTier(HeldJobsTier(failing, gate), ledger))
            faults[f"{name} hangs"] = partial(switch_gate, gate)
            faults[f"{name} fails"] = partial(setattr, failing, "failing")
        manager = TieringOffloadingManager(
            CPUOffloadingManager(CPUBackend(region), policy),
            tiers,
            tier_limits=[
                TierLimits(store_budget_bytes=8 * BLOCK_BYTES, fill_on_promotion=number == 0)
                for number in range(len(tiers))
            ],
            clock=clock,
        )
        return StackUnderTest(manager, clock, faults, partial(corrupt_files, directory), ledger)

    return open_stack


def open_stack_over_blocking_tier(directory: Path) -> StackUnderTest:
    """Open a stack with a tier whose methods block and raise, so that the manager gives it a thread of its own."""
    clock, gate = ManualClock(), Gate()
    region = PrimaryRegion(NUM_BLOCKS, BLOCK_BYTES)
    raising = RaisingTier(smallest_with_reset(TierSpec("blocking", BLOCK_BYTES), region.kv_view, directory))
    manager = TieringOffloadingManager(
        CPUOffloadingManager(CPUBackend(region)),
        [HangingTier(raising, gate)],
        tier_limits=[TierLimits(store_budget_bytes=8 * BLOCK_BYTES)],
        clock=clock,
    )
    return StackUnderTest(
        manager, clock, {"calls hang": partial(switch_gate, gate), "calls raise": partial(setattr, raising, "raising")}
    )


def switch_gate(gate: Gate, hangs: bool) -> None:
    (gate.close if hangs else gate.open)()


def corrupt_files(directory: Path) -> None:
    """Flip a byte in every stretch of nvme's segments, and of fs's block files, that holds anything."""
    block_files = (path for path in directory.rglob("*") if len(path.name) == BLOCK_NAME_LETTERS and path.is_file())
    for segment in (*directory.rglob("segment-*.kv"), *block_files):
        damaged = bytearray(segment.read_bytes())
        for at in range(0, len(damaged), 256):
            if any(damaged[at : at + 256]):
                damaged[at] ^= 0x01
        with segment.open("r+b") as file:
            file.write(damaged)


def run(open_stack: OpenStack, examples: int) -> None:
    """Play `examples` random histories of a stack."""
    run_state_machine_as_test(
        make_state_machine(open_stack),
        settings=hypothesis.settings(max_examples=examples, stateful_step_count=50),
    )


EVERY_STACK = {
    "no tier, lru": open_stack_over(),
    "no tier, arc": open_stack_over(policy="arc"),
    "smallest tier": open_stack_over(smallest),
    "smallest tier with reset, lru": open_stack_over(smallest_with_reset),
    "smallest tier with reset, arc": open_stack_over(smallest_with_reset, policy="arc"),
    "blocking tier": open_stack_over_blocking_tier,
    "memory": open_stack_over(memory),
    "nvme": open_stack_over(nvme),
    "fs": open_stack_over(fs),
    "memory over nvme": open_stack_over(memory, nvme),
    "nvme over fs": open_stack_over(nvme, fs),
}


@pytest.mark.parametrize("name", EVERY_STACK)
def test_a_stack_keeps_its_promises_in_any_order_of_events(name: str) -> None:
    run(EVERY_STACK[name], examples=25)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_STACK)
def test_a_stack_keeps_its_promises_in_many_orders_of_events(name: str) -> None:
    run(EVERY_STACK[name], examples=int(os.environ.get("TIERED_KV_EXAMPLES", "150")))
