"""Copies within the CPU's memory."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from tiered_kv.worker.handlers import HostCopier
from tiered_kv.worker.plan import CopyPlan


class Shuffle:
    """A plan that moves each of some runs elsewhere."""

    def __init__(self, num_runs: int, run_bytes: int) -> None:
        random = np.random.default_rng(num_runs)
        self.source = random.integers(0, 256, (num_runs, run_bytes), dtype=np.uint8)
        self.destination = np.zeros_like(self.source)
        self.order = random.permutation(num_runs)
        self.plan = CopyPlan(
            self.source.ctypes.data + self.order * run_bytes,
            self.destination.ctypes.data + np.arange(num_runs) * run_bytes,
            np.full(num_runs, run_bytes, dtype=np.int64),
        )

    def is_done(self) -> bool:
        return np.array_equal(self.destination, self.source[self.order])


def test_many_small_runs_do_not_wait_for_an_engine_that_computes_in_python() -> None:
    shuffle = Shuffle(20_000, 64)
    copier = HostCopier("tiered-kv-test")
    began = time.perf_counter()
    copy = copier.submit(shuffle.plan)
    turns = 0
    while not copy.has_ended():
        turns += 1  # never lets go of the interpreter's lock by itself
    # Runs that each waited for the lock would take 20,000 switch intervals, which is 100 s; a busy machine takes a few.
    assert time.perf_counter() - began < 4000 * sys.getswitchinterval()
    assert copy.seconds() is not None
    assert shuffle.is_done()
    copier.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiered-kv-test")]
