"""Whole stacks against a dictionary, in any order of events."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.support.disk_use import damage_files
from tests.support.entries import damage_objects, s3_entry
from tests.support.fake_azure import FakeAzure
from tests.support.fake_gcs import FakeGCS
from tests.support.fake_s3 import FakeS3
from tests.support.faulty import FourMethodTier, Gate, HangingTier, HeldJobsTier
from tests.support.redis_servers import RedisServer
from tests.support.s3_servers import S3Server
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.testing.control import ManualClock
from tiered_kv.testing.faults import FailingTier, PromptTier
from tiered_kv.testing.model import RowLedger, StackUnderTest, WatchedTier
from tiered_kv.testing.proxy import NO_FAULTS, Direction, FaultProxy, Faults
from tiered_kv.testing.state_machine import OpenStack, make_state_machine
from tiered_kv.tiering.audit.audit import AuditRules
from tiered_kv.tiering.audit.manager import AuditedManager
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.tier import FsTier
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.tier import NvmeTier

NUM_BLOCKS = 16
NAMESPACE = bytes(range(16))
BLOCK_BYTES = 512
AUDIT = AuditRules(share=0.5, tolerance=0.0)
REDIS_EXAMPLES = 20
S3_EXAMPLES = 5
WIRE_FAULTS = {
    "answers do not arrive": (Direction.TO_CLIENT, Faults(stalls=True)),
    "answers are cut off": (Direction.TO_CLIENT, Faults(cut_after_bytes=700)),
    "answers are damaged": (Direction.TO_CLIENT, Faults(flip_at_byte=300)),
    "requests are cut off": (Direction.TO_SERVER, Faults(cut_after_bytes=900, cut_by_reset=True)),
    "requests are damaged": (Direction.TO_SERVER, Faults(flip_at_byte=800)),
}


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


Corrupt = Callable[[Path], None]
"""Damages what the tiers of the stack over a directory have stored."""


def open_stack_over(
    *make_tiers: MakeTier,
    policy: str = "lru",
    corrupt: Corrupt | None = None,
    wire: FaultProxy | None = None,
    audit: AuditRules | None = None,
) -> OpenStack:
    """Return an opener of stacks with tiers that can be made to fail, to hang and to lose bytes."""

    def open_stack(directory: Path) -> StackUnderTest:
        clock, ledger = ManualClock(), RowLedger()
        region = PrimaryRegion(NUM_BLOCKS, BLOCK_BYTES)
        tiers: list[SecondaryTierManager] = []
        faults: dict[str, Callable[[bool], None]] = {}
        for number, make_tier in enumerate(make_tiers):
            name, gate = f"tier-{number}", Gate()
            tier = make_tier(TierSpec(name, BLOCK_BYTES, NAMESPACE), region.kv_view, directory)
            failing = FailingTier(PromptTier(tier))
            tiers.append(WatchedTier(HeldJobsTier(failing, gate), ledger))
            faults[f"{name} hangs"] = partial(switch_gate, gate)
            faults[f"{name} fails"] = partial(setattr, failing, "failing")
        manager = (partial(AuditedManager, audit) if audit else TieringOffloadingManager)(
            PrimaryRows(CPUBackend(region), policy),
            tiers,
            settings=[
                TierSettings(type=f"tier-{number}", store_budget=8 * BLOCK_BYTES, fill_on_promotion=number == 0)
                for number in range(len(tiers))
            ],
            clock=clock,
        )
        if wire is not None:
            for name, (direction, fault) in WIRE_FAULTS.items():
                faults[name] = partial(switch_wire, wire, direction, fault)
        return StackUnderTest(manager, clock, faults, partial(corrupt or damage_files, directory), ledger)

    return open_stack


def open_stack_over_blocking_tier(directory: Path) -> StackUnderTest:
    """Open a stack with a tier whose methods block and raise, so that it runs on a separate thread."""
    clock, gate = ManualClock(), Gate()
    region = PrimaryRegion(NUM_BLOCKS, BLOCK_BYTES)
    blocking = HangingTier(
        smallest_with_reset(TierSpec("blocking", BLOCK_BYTES, NAMESPACE), region.kv_view, directory), gate
    )
    manager = TieringOffloadingManager(
        PrimaryRows(CPUBackend(region)),
        [blocking],
        settings=[TierSettings(type="tier", store_budget=8 * BLOCK_BYTES)],
        clock=clock,
    )
    return StackUnderTest(
        manager, clock, {"calls hang": partial(switch_gate, gate), "calls raise": partial(setattr, blocking, "raising")}
    )


def switch_gate(gate: Gate, hangs: bool) -> None:
    (gate.close if hangs else gate.open)()


def switch_wire(wire: FaultProxy, direction: Direction, faults: Faults, on: bool) -> None:
    wire.set_faults(faults if on else NO_FAULTS, direction)


def run(open_stack: OpenStack, examples: int) -> None:
    """Play `examples` random histories of a stack."""
    run_state_machine_as_test(
        make_state_machine(open_stack),
        settings=hypothesis.settings(max_examples=examples, stateful_step_count=50),
    )


EVERY_STACK = {
    "no tier, lru": open_stack_over(),
    "no tier, arc": open_stack_over(policy="arc"),
    "no tier, density": open_stack_over(policy="density"),
    "smallest tier": open_stack_over(smallest),
    "smallest tier with reset, lru": open_stack_over(smallest_with_reset),
    "smallest tier with reset, arc": open_stack_over(smallest_with_reset, policy="arc"),
    "blocking tier": open_stack_over_blocking_tier,
    "memory": open_stack_over(memory),
    "memory, density": open_stack_over(memory, policy="density"),
    "nvme": open_stack_over(nvme),
    "fs": open_stack_over(fs),
    "memory over nvme": open_stack_over(memory, nvme),
    "nvme over fs": open_stack_over(nvme, fs),
    "no tier, audited": open_stack_over(audit=AUDIT),
    "memory, audited": open_stack_over(memory, audit=AUDIT),
    "memory over nvme, audited": open_stack_over(memory, nvme, policy="arc", audit=AUDIT),
}


@pytest.mark.one_quick(2)
@pytest.mark.parametrize("name", EVERY_STACK)
def test_a_stack_keeps_its_promises_in_any_order_of_events(name: str) -> None:
    run(EVERY_STACK[name], examples=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_STACK)
def test_a_stack_keeps_its_promises_in_many_orders_of_events(name: str) -> None:
    run(EVERY_STACK[name], examples=int(os.environ.get("TIERED_KV_EXAMPLES", "150")))


# Stacks over servers.


def namespace_of(directory: Path, spec: TierSpec) -> TierSpec:
    """Return the spec with a namespace of the directory's own, so that histories do not see each other's blocks."""
    return replace(spec, namespace_digest=hashlib.blake2b(str(directory).encode(), digest_size=16).digest())


def redis_at(port: int, **settings: object) -> MakeTier:
    pytest.importorskip("redis", reason="redis-py is not installed")
    from tiered_kv_redis.settings import RedisSettings
    from tiered_kv_redis.tier import RedisTier

    checked = RedisSettings.model_validate({"url": f"redis://127.0.0.1:{port}", "connections": 2, **settings})
    return lambda spec, view, directory: RedisTier(namespace_of(directory, spec), view, spec.name, checked)


def s3_at(server: S3Server, bucket: str, **settings: object) -> MakeTier:
    from tiered_kv_s3.settings import S3Settings
    from tiered_kv_s3.tier import S3Tier

    checked = S3Settings.model_validate(s3_entry(server, bucket, connections=2, **settings))
    return lambda spec, view, directory: S3Tier(namespace_of(directory, spec), view, spec.name, checked)


def damage_redis(server: RedisServer) -> Corrupt:
    return lambda directory: server.damage("tkv1:*", HEADER_BYTES)


def damage_bucket(server: S3Server, bucket: str) -> Corrupt:
    return lambda directory: damage_objects(server, bucket, "/blocks/")


@pytest.mark.slow
@pytest.mark.parametrize("is_wire_bad", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_stack_over_redis_keeps_its_promises(redis_server: RedisServer, is_wire_bad: bool) -> None:
    corrupt = damage_redis(redis_server)
    if not is_wire_bad:
        run(open_stack_over(redis_at(redis_server.port), corrupt=corrupt), examples=REDIS_EXAMPLES)
        return
    timeouts = {"timeout": "50ms", "connect_timeout": "50ms", "lookup_timeout": "50ms"}
    with FaultProxy(("127.0.0.1", redis_server.port)) as wire:
        tier = redis_at(wire.port, **timeouts)
        run(open_stack_over(tier, corrupt=corrupt, wire=wire), examples=REDIS_EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("is_wire_bad", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_stack_over_s3_keeps_its_promises(moto_server: S3Server, moto_bucket: str, is_wire_bad: bool) -> None:
    corrupt = damage_bucket(moto_server, moto_bucket)
    if not is_wire_bad:
        run(open_stack_over(s3_at(moto_server, moto_bucket), corrupt=corrupt), examples=S3_EXAMPLES)
        return
    timeouts = {"job_timeout": "200ms", "request_timeout": "100ms", "lookup_timeout": "100ms", "attempts": 2}
    with FaultProxy(moto_server.address) as wire:
        tier = s3_at(moto_server, moto_bucket, endpoint_url=f"http://{wire.host}:{wire.port}", **timeouts)
        run(open_stack_over(tier, corrupt=corrupt, wire=wire), examples=S3_EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("server_class", [FakeGCS, FakeAzure], ids=["gcs", "azure"])
def test_a_stack_over_a_cloud_s_objects_keeps_its_promises(server_class: type[FakeS3]) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")

    with server_class() as server:
        server.has_mark = False
        entry = {**server.entry, "connections": 2}

        def corrupt(directory: Path) -> None:
            for name, data in list(server.objects.items()):
                if "/blocks/" in name:
                    server.objects[name] = data[:-1] + bytes([data[-1] ^ 1])

        def make(spec: TierSpec, view: memoryview, directory: Path) -> SecondaryTierManager:
            return SecondaryTierFactory.create(namespace_of(directory, spec), view, entry)

        run(open_stack_over(make, corrupt=corrupt), examples=S3_EXAMPLES)


@pytest.mark.slow
def test_a_stack_over_redis_and_s3_keeps_its_promises(
    redis_server: RedisServer, moto_server: S3Server, moto_bucket: str
) -> None:
    tiers = redis_at(redis_server.port), s3_at(moto_server, moto_bucket)
    run(open_stack_over(nvme, *tiers, corrupt=damage_redis(redis_server)), examples=S3_EXAMPLES)
