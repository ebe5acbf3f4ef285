"""Checks of a tier with its server behind a bad network, as a pytest class that a tier's author subclasses.

    class TestMyTierUnderWireFaults(TierUnderWireFaults):
        @pytest.fixture
        def server_address(self, my_server: MyServer) -> tuple[str, int]:
            return "127.0.0.1", my_server.port

        @pytest.fixture
        def open_tier(self, proxy: FaultProxy) -> OpenTier:
            return lambda spec, view: MyTier(spec, view, "mine", host=proxy.host, port=proxy.port)

pytest runs the checks on one thread, which acts as the scheduler's. `docs/how-to/testing.md` lists the promises that
must stay true, and what each check proves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import ClassVar

import pytest

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import TierError
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.proxy import NO_FAULTS, Direction, FaultProxy, Faults
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys

_HEAD_OFFSETS = (0, 1, 4, 10, 25, 60, 110, 180, 300)
"""Places near the beginning of an exchange, in bytes."""
_TRANSFER_S = 0.5
"""Seconds that a slowed transfer takes, so that a fault comes in the middle of it."""
_LOOKUPS_MAX = 100
_POLL_S = 0.005
_DESCRIPTORS = "/proc/self/fd"


class ByteFault(Enum):
    """A fault at one byte of each connection."""

    FLIP = "one of its bits is flipped"
    CUT = "the connection ends after it"
    RESET = "the connection is reset after it"

    def at(self, offset: int) -> Faults:
        if self is ByteFault.FLIP:
            return Faults(flip_at_byte=offset)
        return Faults(cut_after_bytes=offset, cut_by_reset=self is ByteFault.RESET)


class LastingFault(Enum):
    """A network on which no exchange succeeds until the fault ends. `DEAD` resets and refuses connections."""

    STALL_TO_SERVER = (Direction.TO_SERVER, Faults(stalls=True))
    STALL_TO_CLIENT = (Direction.TO_CLIENT, Faults(stalls=True))
    DEAD = (Direction.TO_SERVER, NO_FAULTS)
    SHORT_LIVED = (Direction.TO_SERVER, Faults(cut_after_bytes=1, cut_by_reset=True))


class ConnectionEnd(Enum):
    """A single end of all open connections: a reset, or the half-close of one direction."""

    RESET = None
    NO_MORE_TO_SERVER = Direction.TO_SERVER
    NO_MORE_TO_CLIENT = Direction.TO_CLIENT


class WireBench:
    """A tier behind a network with faults, and the checks before, during and after a fault.

    `TierUnderWireFaults` explains the arguments, in seconds.
    """

    def __init__(
        self, rig: TierRig, proxy: FaultProxy, *, job_timeout_s: float, grace_s: float, recovery_s: float
    ) -> None:
        self.rig = rig
        self.proxy = proxy
        self.job_timeout_s = job_timeout_s
        self._grace_s = grace_s
        self._recovery_s = recovery_s
        self._labels = itertools.count()
        self._end_faults()

    def new_keys(self, count: int) -> list[OffloadKey]:
        return make_keys(count, f"batch-{next(self._labels)}")

    def stored(self, count: int) -> list[OffloadKey]:
        """Store new blocks without faults, and return their keys."""
        keys = self.new_keys(count)
        self.until(lambda: self.rig.store(keys).success, "stores fail without any fault")
        self.until(lambda: self.rig.load(keys) == set(keys), "loads fail without any fault")
        return keys

    @contextlib.contextmanager
    def bad_wire(self, direction: Direction, faults: Faults) -> Iterator[None]:
        """Switch faults on in one direction, and enforce the tier's deadlines, within a `with` statement."""
        self.rig.job_timeout_s = self.job_timeout_s
        self.rig.wait_s = self.job_timeout_s + self._grace_s
        self.proxy.set_faults(faults, direction)
        try:
            yield
        finally:
            self._end_faults()

    def lasting(self, fault: LastingFault) -> contextlib.AbstractContextManager[None]:
        """Switch a lasting fault on within a `with` statement."""
        if fault is LastingFault.DEAD:
            self.proxy.refuse_connections()
            self.proxy.reset_connections()
        return self.bad_wire(*fault.value)

    def end_connections(self, end: ConnectionEnd) -> None:
        if end is ConnectionEnd.RESET:
            self.proxy.reset_connections()
        else:
            self.proxy.half_close(Direction(end.value))

    def play(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> set[OffloadKey]:
        """Look keys up and load the found blocks, as a request does; return the loaded keys.

        A block whose load fails must be a miss for that request from then on.
        """
        request = request or self.rig.new_request()
        found = self._found(keys, request)
        if not found:
            return set()
        result = self.rig.wait([self.rig.submit_load(found, request=request)])[0]
        loaded = self.rig.succeeded(result)
        again = self._found([key for key in found if key not in loaded], request)
        assert not again, f"blocks {_hex(again)} could not be loaded, and are still answered True to that request"
        self.rig.tier.on_request_finished(request)
        return loaded

    def expect_recovered(self, keys: Sequence[OffloadKey]) -> None:
        """Check that the tier works, that lost blocks of `keys` are misses, and that all blocks can be stored again.

        On connections that the fault left open, further jobs may fail; each check may take `recovery_s`.
        """
        self.until(self._works, "the tier does not work again, with no fault left")
        self.until(lambda: self._misses_lost(keys), f"blocks of {_hex(keys)} cannot be loaded, and stay answered True")
        self.until(lambda: self.rig.store(keys).success, "blocks that were lost cannot be stored again")
        self.until(lambda: self.rig.load(keys) == set(keys), "blocks that were stored again cannot be loaded")

    def until(self, condition: Callable[[], object], complaint: str) -> None:
        """Return once `condition` holds; fail with `complaint` if that takes longer than `recovery_s`."""
        end = time.monotonic() + self._recovery_s
        while not condition():
            assert time.monotonic() < end, complaint
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Shut the tier down, and check that it closes all connections."""
        self.rig.close()
        self.until(lambda: not self.proxy.open_connections, "connections are open after shutdown")

    def _found(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> list[OffloadKey]:
        answers = self.rig.lookup_all(keys, request)
        return [key for key, is_there in zip(keys, answers, strict=True) if is_there]

    def _works(self) -> bool:
        keys = self.new_keys(1)
        return self.rig.store(keys).success and self.rig.load(keys) == set(keys)

    def _misses_lost(self, keys: Sequence[OffloadKey]) -> bool:
        loaded = self.play(keys)
        return not self._found([key for key in keys if key not in loaded])

    def _end_faults(self) -> None:
        self.rig.wait_s = self.rig.job_timeout_s = self._recovery_s
        self.proxy.refuse_connections(False)
        self.proxy.set_faults(NO_FAULTS)


Exchange = Callable[[WireBench], tuple[list[OffloadKey], Callable[[], object]]]
"""Prepares an exchange with the server; returns its keys, and a callable that performs it."""


def a_lookup(bench: WireBench) -> tuple[list[OffloadKey], Callable[[], object]]:
    keys = [*bench.stored(1), *bench.new_keys(1)]
    return keys, lambda: bench.play(keys)


def a_load(bench: WireBench) -> tuple[list[OffloadKey], Callable[[], object]]:
    keys, request = bench.stored(1), bench.rig.new_request()
    for _ in range(_LOOKUPS_MAX):  # before the exchange, so that only the load uses the network
        if all(bench.rig.lookup_all(keys, request)):
            break
        request = bench.rig.new_request()  # on a busy machine a late answer is a miss
    else:
        pytest.fail("blocks that were stored are not found, without any fault")
    return keys, lambda: bench.play(keys, request)


def a_store(bench: WireBench) -> tuple[list[OffloadKey], Callable[[], object]]:
    keys = bench.new_keys(1)
    return keys, lambda: bench.rig.store(keys)


class TierUnderWireFaults:
    """Subclass it as `Test...`, and define the fixtures `server_address` and `open_tier`.

    Configure the tier with timeouts longer than `job_timeout_s`: the checks test the deadlines of its jobs. Give it a
    shorter `lookup_timeout`, and no cache of answers.

    Attributes:
        block_bytes, num_blocks: The shape of the region.
        job_timeout_s: Seconds from a job's submission to its deadline, during a fault.
        grace_s: Seconds after its deadline in which the tier may still report a job.
        recovery_s: Seconds after a fault in which the tier must work again.
        shutdown_limit_s: Seconds that `shutdown` may take on a dead network.
    """

    block_bytes: ClassVar[int] = 4096
    num_blocks: ClassVar[int] = 512
    job_timeout_s: ClassVar[float] = 0.5
    grace_s: ClassVar[float] = 1.0
    recovery_s: ClassVar[float] = 15.0
    shutdown_limit_s: ClassVar[float] = 6.0

    def offsets(self, fault: ByteFault, exchange_bytes: int) -> set[int]:
        """Return the offsets in an exchange at which to try a fault: in its first line, headers, middle and tail."""
        tail = (exchange_bytes // 2, exchange_bytes - 150, exchange_bytes - 60, exchange_bytes - 3, exchange_bytes - 1)
        return {offset for offset in (*_HEAD_OFFSETS, *tail) if 0 <= offset < exchange_bytes}

    @pytest.fixture
    def server_address(self) -> tuple[str, int]:
        """Return host and port of the server."""
        raise NotImplementedError("a subclass of TierUnderWireFaults defines the fixture 'server_address'")

    @pytest.fixture
    def open_tier(self, proxy: FaultProxy) -> OpenTier:
        """Return a callable that opens the tier on the server behind `proxy`."""
        raise NotImplementedError("a subclass of TierUnderWireFaults defines the fixture 'open_tier'")

    @pytest.fixture
    def proxy(self, server_address: tuple[str, int]) -> Iterator[FaultProxy]:
        """Return the network; check after the test that no thread or descriptor is left."""
        threads, descriptors = set(threading.enumerate()), len(os.listdir(_DESCRIPTORS))
        with FaultProxy(server_address) as proxy:
            yield proxy

        def is_nothing_left() -> bool:
            return set(threading.enumerate()) <= threads and len(os.listdir(_DESCRIPTORS)) <= descriptors

        wait_until(is_nothing_left, self.shutdown_limit_s, what="the end of all threads and descriptors of the tier")

    @pytest.fixture
    def bench(self, open_tier: OpenTier, proxy: FaultProxy) -> Iterator[WireBench]:
        rig = TierRig(open_tier, num_blocks=self.num_blocks, block_bytes=self.block_bytes, wait_s=self.recovery_s)
        bench = WireBench(
            rig, proxy, job_timeout_s=self.job_timeout_s, grace_s=self.grace_s, recovery_s=self.recovery_s
        )
        yield bench
        bench.close()

    # -- at one byte -------------------------------------------------------------------------------

    @pytest.mark.parametrize("exchange", [a_lookup, a_load, a_store])
    @pytest.mark.parametrize("fault", ByteFault)
    @pytest.mark.parametrize("direction", Direction)
    def test_a_fault_at_any_byte_costs_a_miss_at_most(
        self, bench: WireBench, direction: Direction, fault: ByteFault, exchange: Exchange
    ) -> None:
        before = _fault_count(bench.proxy)
        for offset in sorted(self.offsets(fault, _bytes_of(exchange, bench, direction))):
            keys, run = exchange(bench)
            with bench.bad_wire(direction, fault.at(offset)):
                run()
            bench.expect_recovered(keys)
        assert _fault_count(bench.proxy) > before, "no fault occurred: the exchange does not go through the proxy"

    # -- while it lasts ----------------------------------------------------------------------------

    @pytest.mark.parametrize("fault", LastingFault)
    def test_on_a_dead_wire_jobs_end_by_their_deadline_and_lookups_are_answered(
        self, bench: WireBench, fault: LastingFault
    ) -> None:
        kept, fresh = bench.stored(8), bench.new_keys(8)
        with bench.lasting(fault):
            jobs = [bench.rig.submit_load(kept), bench.rig.submit_store(fresh), bench.rig.submit_load(kept)]
            bench.play(kept + fresh)
            bench.rig.wait(jobs)
        bench.expect_recovered(kept + fresh)

    @pytest.mark.parametrize("fault", LastingFault)
    def test_a_reset_holds_whatever_the_wire_does(self, bench: WireBench, fault: LastingFault) -> None:
        keys = bench.stored(8)
        with bench.lasting(fault):
            if not bench.rig.tier.reset_cache():
                pytest.skip("the tier cannot reset: the manager stops using it then")
            bench.rig.epoch = 1  # the bytes of the earlier epoch are wrong from now on
            bench.play(keys)
            bench.rig.store(keys[:4])
        bench.play(keys)
        bench.expect_recovered(keys)
        bench.rig.reopen()
        bench.play(keys)

    @pytest.mark.parametrize("fault", LastingFault)
    def test_shutdown_on_a_dead_wire_is_bounded(self, bench: WireBench, fault: LastingFault) -> None:
        kept = bench.stored(8)
        with bench.lasting(fault):
            bench.rig.submit_load(kept)
            bench.rig.submit_store(bench.new_keys(8))
            bench.rig.tier.lookup(kept[0], bench.rig.new_request())
            begin = time.monotonic()
            bench.rig.tier.shutdown()
            took_s = time.monotonic() - begin
        assert took_s < self.shutdown_limit_s

    def test_a_tier_may_be_opened_on_a_dead_wire(self, bench: WireBench) -> None:
        keys = bench.stored(4)
        with bench.lasting(LastingFault.DEAD):
            try:
                bench.rig.reopen()
            except TierError:  # the tier may also refuse to open
                is_open = False
            else:
                is_open = True
                bench.play(keys)
        if not is_open:
            bench.rig.reopen()
        bench.expect_recovered(keys)

    # -- amid transfers ----------------------------------------------------------------------------

    @pytest.mark.parametrize("end", ConnectionEnd)
    def test_connections_may_end_between_transfers(self, bench: WireBench, end: ConnectionEnd) -> None:
        kept = bench.stored(8)
        for _ in range(3):
            bench.end_connections(end)
            bench.expect_recovered(kept)

    @pytest.mark.parametrize("end", ConnectionEnd)
    @pytest.mark.parametrize("direction", Direction)
    def test_connections_may_end_amid_transfers(
        self, bench: WireBench, direction: Direction, end: ConnectionEnd
    ) -> None:
        kept, fresh = bench.stored(32), bench.new_keys(32)
        name = f"bytes_{direction.value}"
        moved = bench.proxy.counts()[name] + 2 * self.block_bytes
        bench.proxy.set_faults(Faults(bytes_per_s=32 * self.block_bytes / _TRANSFER_S), direction)
        jobs = [bench.rig.submit_load(kept), bench.rig.submit_store(fresh)]
        bench.until(lambda: bench.proxy.counts()[name] >= moved, "no transfer goes through the proxy")
        bench.end_connections(end)
        bench.proxy.set_faults(NO_FAULTS, direction)
        bench.rig.wait(jobs)
        bench.expect_recovered(kept + fresh)


def _bytes_of(exchange: Exchange, bench: WireBench, direction: Direction) -> int:
    """Return the size of an exchange in one direction, on an open connection."""
    name = f"bytes_{direction.value}"
    _, run = exchange(bench)
    before = bench.proxy.counts()[name]
    run()
    return bench.proxy.counts()[name] - before


def _fault_count(proxy: FaultProxy) -> int:
    counts = proxy.counts()
    return counts["flipped"] + counts["cut"]


def _hex(keys: Sequence[OffloadKey]) -> list[str]:
    return [key.hex() for key in keys]
