"""Alerts, over a real Prometheus: stacks that each have one fault, and one that is sound."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.prometheus import OF_THE_MACHINE, WAIT_S, Prometheus, missing_prometheus, wait_for
from tests.support.stacks import Register, stack_of
from tiered_kv.base import OffloadKey
from tiered_kv.facade import Blocks
from tiered_kv.observe.step_timer import EVERY_STEPS
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.faults import HeldJobsTier
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.testing.gate import Gate
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.server_process import free_port
from tiered_kv.tiering.base import JobMetadata

BLOCK_BYTES = 4096
BLOCKS = 16
NUMBERS = itertools.count()
SLOW_LOAD_S = 1.2
SLOW_STEP_S = 0.008
STACKS: dict[str, dict[str, object]] = {
    "sound": {"secondary": [{"type": "memory", "capacity": "1MiB"}]},
    "TieredKVTierStopped": {"secondary": [{"type": "unforgetting"}]},
    "TieredKVAuditDifference": {"audit": 0.5},
    "TieredKVSlowLoads": {"secondary": [{"type": "held"}]},
    "TieredKVSlowSteps": {"secondary": [{"type": "blocking"}]},
    "TieredKVWrittenInVain": {"secondary": [{"type": "memory", "capacity": "256KiB"}]},
    "TieredKVNoHits": {},
}
"""The settings of each stack, by the alert that it shall have; test_monitoring.py has the other alerts."""


class UnforgettingTier(FourMethodTier):
    """Cannot reset, and the manager knows at once."""

    is_nonblocking = True


class BlockingTier(FourMethodTier):
    """Blocks the scheduler's thread when it is given blocks."""

    is_nonblocking = True

    def submit_store(self, job_metadata: JobMetadata) -> None:
        time.sleep(SLOW_STEP_S)
        super().submit_store(job_metadata)


@pytest.fixture
def ports(gate: Gate, register: Register) -> dict[str, int]:
    """Where each stack listens."""

    class HeldTier(HeldJobsTier):
        def __init__(self, spec: Any, view: memoryview, tier_type: str) -> None:  # Any: as the interface
            super().__init__(FourMethodTier(spec, view, tier_type), gate)

    for name, tier in (("held", HeldTier), ("blocking", BlockingTier), ("unforgetting", UnforgettingTier)):
        register(name, tier)
    return {name: free_port() for name in STACKS}


@pytest.fixture
def stacks(ports: Mapping[str, int], closing: ExitStack) -> dict[str, Stack]:
    """The stacks, which this thread is the engine of."""
    common = stack_of(blocks=BLOCKS, block_bytes=BLOCK_BYTES)
    listening = {name: {"metrics": {"listen": f"127.0.0.1:{port}"}} for name, port in ports.items()}
    return {
        name: closing.enter_context(open_stack({**common, **listening[name], **settings}))
        for name, settings in STACKS.items()
    }


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_prometheus()), reason=missing_prometheus() or "it is")
def test_a_stack_with_one_fault_has_the_alert_of_it_alone(
    ports: Mapping[str, int], stacks: Mapping[str, Stack], gate: Gate, tmp_path: Path, closing: ExitStack
) -> None:
    prometheus = closing.enter_context(Prometheus(tmp_path, *ports.values()))

    def firing() -> dict[str, set[str]]:
        serve(stacks["sound"])
        return {name: prometheus.firing(port) - (OF_THE_MACHINE - {name}) for name, port in ports.items()}

    def firing_meanwhile() -> dict[str, set[str]]:
        """Let what makes its series as it happens happen again and again: only then it grows between two scrapes."""
        assert stacks["TieredKVNoHits"].get(new_keys(4), zeros(4)) == 0
        change_weights(stacks["TieredKVAuditDifference"])
        return firing()

    wait_for(lambda: list(prometheus.query("sum(up)").values()), [float(len(ports))])
    wait_for(firing, {name: set[str]() for name in ports})
    stacks["TieredKVTierStopped"].manager.reset_cache()  # its tier cannot
    put(stacks["TieredKVTierStopped"], 1)
    load_slowly(stacks["TieredKVSlowLoads"], gate)
    for number in range(2 * EVERY_STEPS):
        put(stacks["TieredKVSlowSteps"], 1)
        for _ in range(number % 3):  # one step each, so that those that are timed are now this, now that step of a put
            stacks["TieredKVSlowSteps"].flush(WAIT_S)
    for _ in range(20):
        put(stacks["TieredKVWrittenInVain"], BLOCKS)
    wait_for(firing_meanwhile, {name: {name} - {"sound"} for name in ports})


def serve(stack: Stack) -> None:
    """Find blocks in a secondary tier."""
    keys = put(stack, BLOCKS)
    put(stack, BLOCKS)
    assert stack.get(keys, zeros(BLOCKS), timeout=WAIT_S) == BLOCKS


def change_weights(stack: Stack) -> None:
    """Compute the same blocks again and again, and differently. The half of the requests that is audited finds none."""
    keys = put(stack, BLOCKS // 2)
    for number in range(20):
        stack.get(keys, zeros(BLOCKS // 2))
        stack.put(keys, zeros(BLOCKS // 2) + number)


def load_slowly(stack: Stack, gate: Gate) -> None:
    """Let blocks come from a tier when nobody waits for them any more, and find them then."""
    keys = put(stack, BLOCKS // 2)
    put(stack, BLOCKS)
    gate.close()
    assert stack.get(keys, zeros(len(keys)), timeout=SLOW_LOAD_S) == 0
    gate.open()
    assert stack.get(keys, zeros(len(keys)), timeout=WAIT_S) == len(keys)


def put(stack: Stack, count: int) -> list[OffloadKey]:
    """Store new blocks, and return their keys."""
    keys = new_keys(count)
    assert stack.put(keys, zeros(count), timeout=WAIT_S) == count
    assert stack.flush(WAIT_S)
    return keys


def new_keys(count: int) -> list[OffloadKey]:
    return make_keys(count, f"prompt-{next(NUMBERS)}")


def zeros(count: int) -> Blocks:
    return np.zeros((count, BLOCK_BYTES), np.uint8)
