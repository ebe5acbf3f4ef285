"""The suite for bad networks fails for tiers that break its promises, with the message that names the reason.

The test of docs/how-to/testing.md shows that it passes for `KeyValueTier`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from tests.support.faulty import Lie, LyingTier
from tests.support.key_value import LOOKUP_S, Connection, KeyValueServer, KeyValueTier, wire_name
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.proxy import Direction, FaultProxy
from tiered_kv.testing.rig import TierRig
from tiered_kv.testing.wire_faults import (
    ByteFault,
    ConnectionEnd,
    LastingFault,
    TierUnderWireFaults,
    WireBench,
    a_load,
    a_store,
)
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv.toolkit.record import HEADER_BYTES


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    with KeyValueServer() as server:
        yield server


class TrustingTier(KeyValueTier):
    """Skips the checksum."""

    def accepts(self, record: bytes, key: OffloadKey, block: memoryview) -> bool:
        is_whole = len(record) == HEADER_BYTES + self.block_bytes
        if is_whole:
            block[:] = record[HEADER_BYTES:]
        return is_whole


class KeepingTier(KeyValueTier):
    """Does not delete damaged blocks."""

    def drop(self, connection: Connection, key: OffloadKey, deadline: float) -> None:
        return


class RememberingTier(KeepingTier):
    """Answers lookups from an index of stored blocks, even after their loads have failed."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return True if key in self._stored else super().lookup(key, req_context)

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        outcome = super().store_blocks(keys, blocks)
        self._stored = self._stored | set(keys)
        return outcome

    _stored: frozenset[OffloadKey] = frozenset()


class ReusingTier(KeyValueTier):
    """Reuses connections after errors."""

    @contextlib.contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        connection = self._idle.pop() if self._idle else Connection(self._address, deadline)
        try:
            yield connection
        finally:
            self._idle.append(connection)


class PatientTier(KeyValueTier):
    """Waits for its server beyond the job's deadline."""

    def deadline(self) -> float:
        return time.monotonic() + 600.0


class RaisingTier(KeyValueTier):
    """Raises errors of the network from its methods."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        with self.connection(time.monotonic() + LOOKUP_S) as connection:
            return connection.ask(b"HAS %b\n" % wire_name(key), time.monotonic() + LOOKUP_S) == b"1"


class UnforgettingTier(KeyValueTier):
    """Reports a reset that it does not perform."""

    def reset_cache(self) -> bool:
        return True


class LeavingTier(KeyValueTier):
    """Does not close its connections."""

    left: ClassVar[list[Connection]] = []

    def close(self) -> None:
        self.left.extend(self._idle)


class SulkingTier(KeyValueTier):
    """Fails all stores after the first failure."""

    has_failed = False

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        if self.has_failed:
            return Outcome((), "unavailable")
        try:
            return super().store_blocks(keys, blocks)
        except OSError:
            self.has_failed = True
            raise


WAIT_S = 30.0
RECOVERY_S, RECOVERY_BRIEF_S = 30.0, 3.0
"""How long a check waits for a faultless step, and for the step that the tier never performs."""
FOUND_BY_WAITING = ("stay answered True", "does not work again", "were not reported", "open after shutdown")


class FaultBench(WireBench):
    """Waits briefly for the step that fails with the message `says`, and long for all others."""

    def __init__(self, rig: TierRig, proxy: FaultProxy, says: str) -> None:
        self._says = says
        grace_s = RECOVERY_BRIEF_S if says in FOUND_BY_WAITING else RECOVERY_S
        super().__init__(rig, proxy, job_timeout_s=0.3, grace_s=grace_s, recovery_s=RECOVERY_S)

    def until(self, condition: Callable[[], object], complaint: str) -> None:
        if self._says in FOUND_BY_WAITING and self._says in complaint:
            wait_until(condition, RECOVERY_BRIEF_S, what=complaint)
        else:
            super().until(condition, complaint)


Check = Callable[[TierUnderWireFaults, WireBench], None]
MakeTier = Callable[[object, memoryview, tuple[str, int]], SecondaryTierManager]
OpenBench = Callable[..., WireBench]


def liar(lie: Lie) -> MakeTier:
    return lambda spec, view, address: LyingTier(KeyValueTier(spec, view, address), lie)


def flip(direction: Direction) -> Check:
    exchange = a_store if direction is Direction.TO_SERVER else a_load
    return lambda suite, bench: suite.test_a_fault_at_any_byte_costs_a_miss_at_most(
        bench, direction, ByteFault.FLIP, exchange
    )


def stall(suite: TierUnderWireFaults, bench: WireBench) -> None:
    suite.test_on_a_dead_wire_jobs_end_by_their_deadline_and_lookups_are_answered(bench, LastingFault.STALL_TO_CLIENT)


def die(suite: TierUnderWireFaults, bench: WireBench) -> None:
    suite.test_on_a_dead_wire_jobs_end_by_their_deadline_and_lookups_are_answered(bench, LastingFault.DEAD)


def close(suite: TierUnderWireFaults, bench: WireBench) -> None:
    bench.stored(2)
    bench.close()


FAULTS: list[tuple[str, MakeTier, Check, str]] = [
    ("skips the checksum, on what is sent", TrustingTier, flip(Direction.TO_SERVER), "wrong bytes"),
    ("skips the checksum, on what comes", TrustingTier, flip(Direction.TO_CLIENT), "wrong bytes"),
    ("keeps damaged blocks", KeepingTier, flip(Direction.TO_SERVER), "stay answered True"),
    ("does not learn from loads", RememberingTier, flip(Direction.TO_SERVER), "still answered True"),
    (
        "reuses a connection that was cut",
        ReusingTier,
        lambda suite, bench: suite.test_connections_may_end_between_transfers(bench, ConnectionEnd.RESET),
        "does not work again",
    ),
    ("waits beyond the deadline", PatientTier, stall, "were not reported"),
    ("reports twice", liar(Lie.REPORTS_TWICE), stall, "reported twice"),
    (
        "resets nothing",
        UnforgettingTier,
        lambda suite, bench: suite.test_a_reset_holds_whatever_the_wire_does(bench, LastingFault.DEAD),
        "wrong bytes",
    ),
    ("leaves connections open", LeavingTier, close, "open after shutdown"),
    ("never tries again", SulkingTier, die, "does not work again"),
]


def close_what_is_left() -> None:
    while LeavingTier.left:
        LeavingTier.left.pop().close()


@pytest.fixture
def open_bench(server: KeyValueServer, closing: contextlib.ExitStack) -> OpenBench:
    proxy = closing.enter_context(FaultProxy(("127.0.0.1", server.port)))

    def open_(make_tier: MakeTier, says: str = "") -> WireBench:
        def open_tier(spec: object, view: memoryview) -> SecondaryTierManager:
            return make_tier(spec, view, (proxy.host, proxy.port))

        rig = TierRig(open_tier, num_blocks=128, block_bytes=512, wait_s=WAIT_S)
        closing.callback(close_what_is_left)
        closing.callback(rig.close)
        return FaultBench(rig, proxy, says)

    return open_


@pytest.mark.parametrize(
    ("make_tier", "check", "says"),
    [
        pytest.param(*fault[1:], id=fault[0], marks=[pytest.mark.slow] if fault[3] in FOUND_BY_WAITING else [])
        for fault in FAULTS
    ],
)
def test_a_tier_that_breaks_a_promise_is_found(
    open_bench: OpenBench, make_tier: MakeTier, check: Check, says: str
) -> None:
    bench = open_bench(make_tier, says)
    with pytest.raises(AssertionError) as failure:
        check(TierUnderWireFaults(), bench)
    assert says in str(failure.value)


def test_a_tier_whose_methods_raise_is_found(open_bench: OpenBench) -> None:
    bench = open_bench(RaisingTier)
    with pytest.raises(ConnectionError):
        die(TierUnderWireFaults(), bench)
