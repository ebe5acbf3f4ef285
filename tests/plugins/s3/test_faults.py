"""Whatever the server does, a load gives right bytes or a miss, by the job's deadline, with a counted reason."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.support.fake_s3 import WAIT_S, FakeS3, OpenRig, open_rig, server
from tests.support.stacks import block_hashes, stack_of
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.record import digest_of

pytest.importorskip("boto3", reason="boto3 is not installed")

__all__ = ["open_rig", "server"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", ["slow_down", "throttled", "error_500", "chunked_503", "reset", "close", "garbage"])
def test_a_passing_fault_is_retried(server: FakeS3, open_rig: OpenRig, fault: str) -> None:
    rig = open_rig()
    keys = make_keys(2)
    server.faults["PUT"] += [fault]
    assert rig.store(keys).success
    server.faults["HEAD"] += [fault]
    assert all(rig.lookup(key) for key in keys)
    server.faults["GET"] += [fault, fault]
    assert rig.load(keys) == set(keys)
    assert rig.tier.stats()["retried_requests_total"] >= 3


@pytest.mark.parametrize("fault", ["truncate", "stall", "flip"])
def test_a_body_that_is_cut_off_stalled_or_wrong_is_read_again(server: FakeS3, open_rig: OpenRig, fault: str) -> None:
    stalls = fault == "stall"
    rig = open_rig(request_timeout=0.2, attempts=100) if stalls else open_rig()
    keys = make_keys(2)
    rig.store(keys)
    server.faults["GET"] += [fault]
    assert rig.load(keys) == set(keys)
    assert server.count("GET") == 3 or (stalls and server.count("GET") > 3)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("slow_down", "slow_down"),
        ("throttled", "slow_down"),
        ("error_500", "unavailable"),
        ("reset", "broken"),
        ("truncate", "broken"),
        ("stall", "timeout"),
        ("denied", "denied"),
        ("no_bucket", "no_bucket"),
        ("expired", "credentials_expired"),
        ("moved", "moved"),
    ],
)
def test_a_lasting_fault_fails_the_load_with_its_reason_and_ends_with_it(
    server: FakeS3, open_rig: OpenRig, fault: str, reason: str
) -> None:
    (key,) = make_keys(1)
    assert open_rig().store([key]).success
    rig = open_rig(attempts=3, **({"request_timeout": 0.2} if fault == "stall" else {}))
    server.always["GET"] = fault
    (result,) = rig.wait([rig.submit_load([key])])
    assert (result.success, result.reason) == (False, reason)
    server.always.clear()
    wait_until(lambda: rig.load([key]) == {key}, what="the end of the fault")


def test_bodies_that_stall_are_failures_of_the_bucket_although_it_answers_lookups(
    server: FakeS3, open_rig: OpenRig
) -> None:
    """A network that drops long packets does that."""
    keys = make_keys(2)
    assert open_rig().store(keys).success
    rig = open_rig(attempts=1, request_timeout=1)
    server.always["GET"] = "stall"
    load = rig.submit_load(keys[:1])
    wait_until(lambda: server.count("GET"), what="the request for the block")
    assert rig.lookup(keys[1])
    (result,) = rig.wait([load])
    assert (result.success, result.reason) == (False, "timeout")


def test_retries_end_with_the_job(server: FakeS3, open_rig: OpenRig) -> None:
    (key,) = make_keys(1)
    assert open_rig().store([key]).success
    rig = open_rig(attempts=100, job_timeout=0.3, request_timeout=0.5)
    for fault in ("stall", "slow_down"):
        server.always["GET"] = fault
        begin = time.monotonic()
        assert rig.load([key]) == set()
        assert time.monotonic() - begin < 15.0


def test_a_store_that_is_refused_is_not_answered_as_there(server: FakeS3, open_rig: OpenRig) -> None:
    rig = open_rig(presence_ttl=60)
    keys = make_keys(2)
    server.always["PUT"] = "denied"
    (result,) = rig.wait([rig.submit_store(keys)])
    assert (result.success, result.reason, rig.succeeded(result)) == (False, "denied", set())
    assert not any(rig.lookup(key) for key in keys)


def test_lookups_that_fail_are_misses_that_the_breaker_sees(server: FakeS3, open_rig: OpenRig) -> None:
    rig = open_rig(attempts=2)
    keys = make_keys(2)
    rig.store(keys)
    server.always["HEAD"] = "error_500"
    assert not any(rig.lookup(key) for key in keys)
    assert rig.tier.lookup_failures >= 2
    server.always.clear()
    assert all(rig.lookup(key) for key in keys)


@pytest.mark.parametrize("fault", ["error_500", "stall", "denied"])
def test_one_object_that_always_fails_costs_its_own_blocks_and_opens_no_breaker(server: FakeS3, fault: str) -> None:
    """Ten prompts of eight blocks, more than the primary tier has; the fourth block of one of them is bad."""
    prompts = [make_keys(8, f"prompt {number}") for number in range(10)]
    blocks = np.zeros((8, 512), np.uint8)
    entry = {**server.entry, "request_timeout": "1s", "lookup_timeout": "10s", "job_timeout": "10s", "attempts": 2}
    with open_stack(stack_of(entry, blocks=8, block_bytes=512)) as stack:
        for keys in prompts:
            assert stack.put(block_hashes(keys), blocks, timeout=WAIT_S) == 8
            assert stack.flush(WAIT_S)
        server.bad_objects[digest_of(prompts[5][3]).hex()] = fault
        found = sum(stack.get(block_hashes(keys), blocks, WAIT_S) for _ in range(5) for keys in prompts)
        assert found >= 0.9 * 5 * (9 * 8 + 3)
        counters = stack.counters()["s3"]
        assert (counters["breaker_opened_total"], counters["tier"]["unanswered_blocks_total"] > 0) == (0, True)
        server.always["HEAD"] = server.always["GET"] = fault
        server.bad_objects.clear()

        def has_opened() -> bool:
            for keys in prompts:
                stack.get(block_hashes(keys), blocks, WAIT_S)
            return count_of(stack.counters(), "s3", "breaker_opened_total") > 0

        wait_until(has_opened, what="the breaker's opening where nothing is answered")
