"""A tier whose server is behind a fault proxy: faults to switch on, and checks of the tier around them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.testing.proxy import NO_FAULTS, Direction, FaultProxy, Faults
from tiered_kv.testing.rig import TierRig, make_keys

_POLL_S = 0.005


class ByteFault(Enum):
    """A fault at one byte of each connection."""

    FLIP = "one of its bits is flipped"
    CUT = "the connection ends after it"
    RESET = "the connection is reset after it"

    def at(self, offset: int) -> Faults:
        """Return the fault at byte `offset` of each connection, from now on."""
        if self is ByteFault.FLIP:
            return Faults(flip_at_byte=offset)
        return Faults(cut_after_bytes=offset, cut_by_reset=self is ByteFault.RESET)


class LastingFault(Enum):
    """A network on which nothing arrives until the fault ends."""

    STALL_TO_SERVER = "requests do not arrive"
    STALL_TO_CLIENT = "answers do not arrive"
    DEAD = "connections are reset, and new ones refused"
    SHORT_LIVED = "connections end as soon as a byte is sent"


class Blow(Enum):
    """What befalls the connections that are open, once: a reset, or that one direction is half-closed."""

    RESET = None
    NO_MORE_TO_SERVER = Direction.TO_SERVER
    NO_MORE_TO_CLIENT = Direction.TO_CLIENT


class WireBench:
    """A tier in a test, a network with faults, and the checks before, during and after a fault.

    Args:
        rig: Drives the tier, which is opened through the proxy.
        proxy: The network.
        job_timeout_s: The deadline of jobs while a fault is on, from their submission.
        grace_s: How much later than that a job may be reported, or a lookup answered.
        recovery_s: How long the tier may take to work again, and its jobs while no fault is on.
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
        self._is_whole_again()

    def new_keys(self, count: int) -> list[OffloadKey]:
        """Return keys that were not used before."""
        return make_keys(count, f"batch-{next(self._labels)}")

    def stored(self, count: int) -> list[OffloadKey]:
        """Return keys of blocks that the tier holds; no fault may be on."""
        keys = self.new_keys(count)
        self.until(lambda: self.rig.store(keys).success, "stores fail without any fault")
        self.until(lambda: self.rig.load(keys) == set(keys), "loads fail without any fault")
        return keys

    @contextlib.contextmanager
    def bad_wire(self, direction: Direction, faults: Faults) -> Iterator[None]:
        """Have faults on in a direction, and hold the tier to its deadlines, for the time of a `with` statement."""
        self.rig.job_timeout_s = self.job_timeout_s
        self.rig.wait_s = self.job_timeout_s + self._grace_s
        self.proxy.set_faults(direction, faults)
        try:
            yield
        finally:
            self._is_whole_again()

    def lasting(self, fault: LastingFault) -> contextlib.AbstractContextManager[None]:
        """Have a wire on which nothing arrives, for the time of a `with` statement."""
        match fault:
            case LastingFault.STALL_TO_CLIENT:
                return self.bad_wire(Direction.TO_CLIENT, Faults(stalls=True))
            case LastingFault.STALL_TO_SERVER:
                return self.bad_wire(Direction.TO_SERVER, Faults(stalls=True))
            case LastingFault.SHORT_LIVED:
                return self.bad_wire(Direction.TO_SERVER, Faults(cut_after_bytes=1, cut_by_reset=True))
            case LastingFault.DEAD:
                self.proxy.refuse_connections()
                self.proxy.reset_connections()
                return self.bad_wire(Direction.TO_SERVER, NO_FAULTS)

    def strike(self, blow: Blow) -> None:
        """Deal a blow to the connections that are open."""
        if blow is Blow.RESET:
            self.proxy.reset_connections()
        else:
            self.proxy.half_close(Direction(blow.value))

    def play(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> set[OffloadKey]:
        """Look keys up and load those that are found, as a request does; return the loaded keys.

        A block that was answered True and whose load fails is a miss for that request from then on.
        """
        asking = request or self.rig.new_request()
        found = self._found(keys, asking)
        if not found:
            return set()
        result = self.rig.wait([self.rig.submit_load(found, request=asking)])[0]
        loaded = self.rig.succeeded(result)
        again = self._found([key for key in found if key not in loaded], asking)
        assert not again, f"blocks {_hex(again)} could not be loaded, and are still answered True to that request"
        self.rig.tier.on_request_finished(asking)
        return loaded

    def expect_recovered(self, keys: Sequence[OffloadKey]) -> None:
        """Check that the tier works, and that blocks of `keys` which cannot be loaded are misses. Then store them all.

        Open connections may still fail from the fault, and cost a bounded number of further jobs.
        """
        self.until(self._works, "the tier does not work again, with no fault left")
        self.until(lambda: self._is_honest(keys), f"blocks of {_hex(keys)} cannot be loaded, and stay answered True")
        self.until(lambda: self.rig.store(keys).success, "blocks that were lost cannot be stored again")
        self.until(lambda: self.rig.load(keys) == set(keys), "blocks that were stored again cannot be loaded")

    def until(self, condition: Callable[[], object], complaint: str) -> None:
        """Return once `condition` holds."""
        end = time.monotonic() + self._recovery_s
        while not condition():
            assert time.monotonic() < end, complaint
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Shut the tier down, and check that it leaves no connection open."""
        self.rig.close()
        self.until(lambda: not self.proxy.open_connections, "connections are open after shutdown")

    def _found(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> list[OffloadKey]:
        answers = self.rig.lookup_all(keys, request)
        return [key for key, is_there in zip(keys, answers, strict=True) if is_there]

    def _works(self) -> bool:
        keys = self.new_keys(1)
        return self.rig.store(keys).success and self.rig.load(keys) == set(keys)

    def _is_honest(self, keys: Sequence[OffloadKey]) -> bool:
        loaded = self.play(keys)
        return not self._found([key for key in keys if key not in loaded])

    def _is_whole_again(self) -> None:
        self.rig.wait_s = self.rig.job_timeout_s = self._recovery_s
        self.proxy.refuse_connections(False)
        for direction in Direction:
            self.proxy.set_faults(direction, NO_FAULTS)


def _hex(keys: Sequence[OffloadKey]) -> list[str]:
    return [key.hex() for key in keys]
