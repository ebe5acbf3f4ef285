"""How long a step of the scheduler takes."""

from __future__ import annotations

import time

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.stack import Stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.manager import TieringOffloadingManager

PROBE_KEYS = 512

_DRAIN_LIMIT_S = 10.0


class Probe:
    """A step of 512 lookups that are answered by the primary tier, and the end of the step, with its time.

    The blocks stay pinned until it is closed. The manager's thread.

    Args:
        stack: The stack.
    """

    def __init__(self, stack: Stack) -> None:
        self._manager: TieringOffloadingManager = stack.manager
        self._keys: list[OffloadKey] = make_keys(PROBE_KEYS, "probe")
        self._owner = ReqContext("probe-owner")
        self._count = 0
        output = self._manager.prepare_store(self._keys, self._owner)
        assert output is not None, "the primary tier is empty"
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        stack.region.array[output.store_spec.block_ids] = np.uint8(0)
        self._manager.complete_store(output.keys_to_store, self._owner)
        self._manager.prepare_load(self._keys, self._owner)
        self._manager.drain_jobs(_DRAIN_LIMIT_S)

    def step(self) -> tuple[float, float]:
        """Make the step, and return the seconds that it took, and those of the processor's time."""
        context = ReqContext(f"probe-{self._count}")
        self._count += 1
        lookup = self._manager.lookup
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        for key in self._keys:
            lookup(key, context)
        self._manager.on_schedule_end()
        return time.perf_counter() - began_s, time.thread_time() - began_cpu_s

    def close(self) -> None:
        """Unpin the blocks."""
        self._manager.complete_load(self._keys, self._owner)
        self._manager.on_request_finished(self._owner)
