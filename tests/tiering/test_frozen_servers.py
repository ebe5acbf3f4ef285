"""Servers that stop answering, with their connections open: the scheduler does not notice, and gets its tiers back.

redis-server and moto's server are stopped with SIGSTOP for half a minute while a scheduler goes on with its steps over
five tiers. The kernel goes on to take what is sent to them, until its buffers are full: nothing fails, all of it hangs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import pytest

import tiered_kv
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.counters import count_of
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server

__all__ = ["moto_bucket", "moto_server", "redis_server"]

BLOCK_BYTES = 16 << 10
PRIMARY_BLOCKS = 1024
REQUEST_BLOCKS = 8
REQUESTS_OPEN = 6
OWN_BLOCKS = 400
"""Blocks that one tier alone has, for each tier."""
MODEL_STEP_S = 0.01
"""What a step of the model takes, in which the scheduler sleeps."""

FROZEN_S = 30.0
CALL_LIMIT_S = 0.005
WAIT_LIMIT_S = 0.5
"""Of one wait. For a frozen server it would be a second at least: that long redis takes to give up connecting."""
HELD_UP_MAX_S = 0.4
"""How much of one wait is put down to other threads, at most. With the limit it stays below such a wait."""
WAITS_LIMIT_S = 1.5
"""Of all waits together, in half a minute."""
BACK_LIMIT_S = 120.0
"""It takes a breaker's cool-down and a few jobs: seconds. A tier that is given up for good never comes back."""
WARM_LIMIT_S = 240.0
FILL_LIMIT_S = 240.0
DRAIN_LIMIT_S = 120.0

TIERS = ("nvme", "fs", "redis", "s3")
FROZEN_TIERS = ("redis", "s3")
LOOKUP_TIMEOUT_S = 2.0
JOB_TIMEOUT_S = 4.0
REQUEST_LIMIT_S = len(FROZEN_TIERS) * (LOOKUP_TIMEOUT_S + JOB_TIMEOUT_S) + 8.0
"""At worst a request waits for a lookup and a load in each frozen tier; the rest is for the steps between, which a busy
machine holds up. One that waits for a frozen server itself waits for as long as that is frozen."""

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


@contextlib.contextmanager
def ahead_of_others(*server_pids: int) -> Iterator[None]:
    """Run this process, and then the servers, before ordinary programs, where that is permitted."""
    normal = os.sched_param(0)
    try:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))  # threads that are started now inherit it
            for pid in server_pids:
                os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
        gc.collect()
        gc.freeze()  # as engines do: a full collection over all that pytest has imported takes 100 ms
        yield
    finally:
        gc.unfreeze()
        for pid in (0, *server_pids):
            os.sched_setscheduler(pid, os.SCHED_OTHER, normal)


class CallClock:
    """Times calls, and tells those that waited from those that the machine held up.

    The promise is about waiting for storage. On a machine that others use, too, a call takes long now and then because
    its thread was ready to run and had no processor. The kernel counts that time for each thread, in `schedstat`
    (https://docs.kernel.org/scheduler/sched-stats.html), and it is taken off. If the thread that has the interpreter is
    preempted, the others wait for it, and then perhaps for the next one that gets it: so where a call waited, what the
    other threads of this process were kept from running is taken off as well, but no more than `HELD_UP_MAX_S`: on a
    busy machine many threads stand in line while the call waits for something else. What a hypervisor takes no kernel
    sees; it looks like computing. To be used by the thread that made it.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.long_calls: list[tuple[float, str]] = []
        """Calls that took longer than the limit, computing included: seconds, and the method."""
        self.waits: list[tuple[float, str]] = []
        """Calls that did nothing for longer than the limit."""
        self._queued_before_ns: dict[str, int] = {}
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def forget(self) -> None:
        """Begin anew."""
        self.calls = 0
        self.long_calls.clear()
        self.waits.clear()

    def begin_step(self) -> None:
        """Note how long every thread has been kept from running so far."""
        self._queued_before_ns = _queued_by_thread_ns()

    def call(
        self, method: Callable[Arguments, Returned], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Returned:
        queued_ns, cpu_s, begin_s = self._queued_ns(), time.thread_time(), time.perf_counter()
        returned = method(*args, **kwargs)
        took_s = time.perf_counter() - begin_s
        cpu_s = time.thread_time() - cpu_s
        took_s -= (self._queued_ns() - queued_ns) / 1e9
        self.calls += 1
        if took_s > CALL_LIMIT_S and (took_s := took_s - self._kept_from_running_s()) > CALL_LIMIT_S:
            self.long_calls.append((took_s, method.__name__))
            if (waited_s := took_s - cpu_s) > CALL_LIMIT_S:
                self.waits.append((waited_s, method.__name__))
        return returned

    def assert_no_call_waited(self) -> None:
        # A thread that gets the interpreter after others waits for a multiple of `sys.getswitchinterval()`, 5 ms. That
        # may befall a few calls, more of them the busier the machine is, and is soon over; a call that waits for a
        # server waits for seconds.
        assert len(self.waits) <= self.calls // 1000, self.waits
        assert all(waited_s < WAIT_LIMIT_S for waited_s, _ in self.waits), self.waits
        assert sum(waited_s for waited_s, _ in self.waits) < WAITS_LIMIT_S, self.waits
        assert len(self.long_calls) <= self.calls // 1000, self.long_calls

    def close(self) -> None:
        os.close(self._schedstat)

    def _queued_ns(self) -> int:
        return int(os.pread(self._schedstat, 80, 0).split()[1])

    def _kept_from_running_s(self) -> float:
        """Return how long the other threads of this process have been kept from running since the step began.

        `HELD_UP_MAX_S` at most.
        """
        before, now = self._queued_before_ns, _queued_by_thread_ns()
        del now[str(threading.get_native_id())]
        return min(HELD_UP_MAX_S, sum(ns - before.get(thread, 0) for thread, ns in now.items()) / 1e9)


def _queued_by_thread_ns() -> dict[str, int]:
    queued_ns = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            queued_ns[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1])
    return queued_ns


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt on its way.

    Args:
        context: How the manager knows it.
        keys: Its blocks.
        is_new: Whether nobody has its blocks, so that they are to be stored.
        begun_s: When it was begun, by `time.monotonic()`.
    """

    context: ReqContext
    keys: list[OffloadKey]
    is_new: bool
    begun_s: float = field(default_factory=time.monotonic)


class Scheduler:
    """Drives a stack's manager as an engine does; times every call, and compares every byte that is loaded.

    Args:
        stack: The stack.
        own: Blocks that only one tier has, by the tier's name.
    """

    def __init__(self, stack: tiered_kv.Stack, own: dict[str, list[OffloadKey]]) -> None:
        self.clock = CallClock()
        self.hits: Counter[str] = Counter()
        self.answered_s: list[float] = []
        """How long each request waited for its prefix."""
        self._manager = stack.manager
        self._rows = np.asarray(stack.kv_view)
        self._own = own
        self._open: list[Request] = []
        self._begun = 0
        self._steps = 0

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Go on with steps; return whether `condition` came true before the time was over."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= end:
                return False
            while len(self._open) < REQUESTS_OPEN:
                self._open.append(self._next())
                self.clock.call(self._manager.on_new_request, self._open[-1].context)
            self._step()
        return True

    def finish(self) -> None:
        """Bring the open requests to their end."""
        end = time.monotonic() + REQUEST_LIMIT_S
        while self._open:
            assert time.monotonic() < end, f"{len(self._open)} requests do not end"
            self._step()

    def counter(self, *path: str) -> int:
        return count_of(self.clock.call(self._manager.counters), *path)

    def _step(self) -> None:
        self.clock.begin_step()
        self._open = [request for request in self._open if not self._advance(request)]
        self.clock.call(self._manager.on_schedule_end)
        self.clock.call(self._manager.take_events)
        self._steps += 1
        if self._steps % 100 == 0:  # as somebody who watches would ask for them
            self.clock.call(self._manager.counters)
        time.sleep(MODEL_STEP_S)

    def _next(self) -> Request:
        """Return a new prompt, and after it one that a single tier has, each tier in its turn."""
        number, context = self._begun, ReqContext(f"request-{self._begun}")
        self._begun += 1
        if number % 2 == 0:
            return Request(context, make_keys(REQUEST_BLOCKS, f"prompt-{number}"), is_new=True)
        turn, tier = divmod(number // 2, len(TIERS))
        first = turn * REQUEST_BLOCKS % OWN_BLOCKS
        return Request(context, self._own[TIERS[tier]][first : first + REQUEST_BLOCKS], is_new=False)

    def _advance(self, request: Request) -> bool:
        """Ask for a request's prefix; once that is known load or store it. Return whether the request has ended."""
        answers = self.clock.call(self._manager.lookup_many, request.keys, request.context)
        prefix_blocks = [*answers, False].index(False)
        if None in answers[:prefix_blocks]:
            return False
        self.answered_s.append(time.monotonic() - request.begun_s)
        if prefix_blocks:
            self._load(request.keys[:prefix_blocks], request.context)
        elif request.is_new:
            self._store(request.keys, request.context)
        self.clock.call(self._manager.touch, request.keys, request.context)
        self.clock.call(self._manager.on_request_finished, request.context)
        return True

    def _load(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        spec = self.clock.call(self._manager.prepare_load, keys, context)
        for key, row in zip(keys, spec.block_ids.tolist(), strict=True):
            self.hits[self._manager.hit_tier(key, context)] += 1
            assert self._rows[row].tobytes() == block_content(key, BLOCK_BYTES), "wrong bytes"
        self.clock.call(self._manager.complete_load, keys, context)

    def _store(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        output = self.clock.call(self._manager.prepare_store, keys, context)
        assert output is not None, "the frozen tiers have taken the primary tier"
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        for key, row in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
            self._rows[row] = np.frombuffer(block_content(key, BLOCK_BYTES), dtype=np.uint8)
        self.clock.call(self._manager.complete_store, output.keys_to_store, context)


@pytest.fixture
def entries(
    redis_server: RedisServer, moto_server: S3Server, moto_bucket: str, tmp_path: Path
) -> list[dict[str, object]]:
    """The YAML entries of the secondary tiers, in the order of `TIERS`."""
    return [
        {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"},
        {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "64MiB"},
        {"type": "redis", "url": redis_server.url},
        moto_server.settings(moto_bucket, store_budget="1MiB"),
    ]


def stack_of(entries: Sequence[dict[str, object]], **limits: object) -> dict[str, object]:
    return {
        "version": 1,
        "namespace": {"model": "frozen"},
        "block": {"bytes": BLOCK_BYTES, "tokens": 16},
        "primary": {"capacity": PRIMARY_BLOCKS * BLOCK_BYTES},
        "secondary": [{**entry, **limits} for entry in entries],
    }


def fill(entry: dict[str, object]) -> list[OffloadKey]:
    """Store blocks in one tier alone, as another stack with the same namespace would; return their keys."""
    tier = str(entry["type"])
    keys = make_keys(OWN_BLOCKS, f"only in {tier}")
    blocks = np.array([np.frombuffer(block_content(key, BLOCK_BYTES), dtype=np.uint8) for key in keys])
    with tiered_kv.open_stack(stack_of([entry])) as stack:
        stack.put(keys, blocks, timeout=FILL_LIMIT_S)
        assert stack.flush(timeout=FILL_LIMIT_S)
        assert stack.counters()[tier]["stored_blocks_total"] > OWN_BLOCKS // 2
    return keys


@pytest.mark.slow
@pytest.mark.trust("frozen-servers")
def test_frozen_servers_hold_up_nobody_and_are_used_again(
    entries: list[dict[str, object]], redis_server: RedisServer, moto_server: S3Server
) -> None:
    limits = {"lookup_timeout": LOOKUP_TIMEOUT_S, "job_timeout": JOB_TIMEOUT_S}
    with contextlib.ExitStack() as at_end:
        at_end.enter_context(ahead_of_others(redis_server.pid, moto_server.pid))
        own = {str(entry["type"]): fill(entry) for entry in entries}
        stack = at_end.enter_context(tiered_kv.open_stack(stack_of(entries, **limits)))
        scheduler = Scheduler(stack, own)
        at_end.callback(scheduler.clock.close)
        assert scheduler.run_until(lambda: all(scheduler.hits[name] for name in TIERS), WARM_LIMIT_S), scheduler.hits

        for server in (redis_server, moto_server):
            server.freeze()
            at_end.callback(server.thaw)
        scheduler.hits.clear()
        scheduler.clock.forget()
        scheduler.run_until(lambda: False, FROZEN_S)
        scheduler.clock.assert_no_call_waited()
        assert max(scheduler.answered_s) < REQUEST_LIMIT_S
        assert min(scheduler.hits[name] for name in ("nvme", "fs")) > 0, "the other tiers go on"

        stored = {name: scheduler.counter(name, "stored_blocks_total") for name in FROZEN_TIERS}
        scheduler.hits.clear()
        for server in (redis_server, moto_server):
            server.thaw()
        for name in FROZEN_TIERS:
            is_back = partial(_is_back, scheduler, name, stored[name])
            assert scheduler.run_until(is_back, BACK_LIMIT_S), (name, scheduler.hits, stack.counters()[name])
        scheduler.finish()
        assert max(scheduler.answered_s) < REQUEST_LIMIT_S

        assert stack.manager.drain_jobs(DRAIN_LIMIT_S), "not every job is reported"
        for name in FROZEN_TIERS:
            assert scheduler.counter(name, "expired_jobs_total") == scheduler.counter(name, "late_jobs_total")
            assert scheduler.counter(name, "quarantined_bytes") == 0
            assert scheduler.counter(name, "tier", "corrupt_blocks_total") == 0


def _is_back(scheduler: Scheduler, tier: str, stored_blocks: int) -> bool:
    """Return whether blocks have been loaded from the tier, and more than `stored_blocks` are stored in it."""
    return scheduler.hits[tier] > 0 and scheduler.counter(tier, "stored_blocks_total") > stored_blocks
