"""Copies between a CUDA device and page-locked CPU memory.

A handler of `handlers.py` submits plans, on the engine's thread, and asks for their ends. A direction's jobs run in the
order of their submission, on a side stream of their own, in parallel with the model's work. A job has ended
when the event after its copies has occurred.

If the driver has cuMemcpyBatchAsync (CUDA 12.8), one call copies all runs of a job. Otherwise each run is a call. torch
owns streams and events. The driver is called directly, because torch has no batched copy. A kernel copies short runs
where it is faster than the driver (`short_runs.py`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiered_kv.errors import ConfigError
from tiered_kv.worker.plan import CopyPlan

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_DRIVER = "libcuda.so.1"
_CUDA_SUCCESS = 0
_SRC_ACCESS_ORDER_STREAM = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM of cuda.h: sources are read in the stream's order."""
SHORT_RUN_BYTES = 128 << 10
"""The driver copies runs of this length or more as fast as the bus allows."""


class Kernel(Protocol):
    """Copies short runs in the place of the driver."""

    def copy(self, plan: CopyPlan, stream: Any) -> None:  # Any: torch.cuda.Stream
        """Submit all runs of a plan, at least one, to a stream. Any exception means that no run will be copied."""


class CudaCopier:
    """Copies on a side stream of one device; tests give stand-ins for `torch.cuda` and the driver.

    `kernel` copies the runs shorter than `SHORT_RUN_BYTES`, until it fails.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        kernel: Kernel | None = None,
        cuda: Any = None,  # Any: torch.cuda is a module
        driver: Any = None,  # Any: ctypes' functions
    ) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._driver = DriverCopies(driver or load_driver())
        self._kernel = kernel
        self._events: list[Any] = []
        """Timing events to be used again."""

    def submit(self, plan: CopyPlan) -> CudaCopy:
        short, others = _split(plan) if self._kernel is not None else (None, plan)
        begin, end = self._event(), self._event()
        try:
            with self._cuda.device(self._device):
                # A store reads blocks that submitted work may still write. A load overwrites blocks that work
                # submitted earlier may still read, or clear.
                self._stream.wait_stream(self._cuda.current_stream(self._device))
                begin.record(self._stream)
                has_begun = self._driver.copy(others, self._stream.cuda_stream) and self._copy_short(short)
                end.record(self._stream)
        except RuntimeError as error:  # the device has failed, and runs no work any more
            _log.warning("the CUDA device takes no copies: %s", error)
            has_begun = False
        return CudaCopy(begin, end, has_begun, (short, others), self._events)

    def close(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:  # the device has failed, and runs no copies any more
            _log.warning("the CUDA device failed before its copies had ended: %s", error)

    def _copy_short(self, plan: CopyPlan | None) -> bool:
        if self._kernel is None or plan is None or not len(plan.lengths):
            return True
        try:
            self._kernel.copy(plan, self._stream)
            return True
        except Exception as error:  # the compiler and the launcher may raise anything
            _log.warning("the copy kernel failed, the driver copies from now on: %s: %s", type(error).__name__, error)
            self._kernel = None
            return self._driver.copy(plan, self._stream.cuda_stream)

    def _event(self) -> Any:  # Any: torch.cuda.Event
        return self._events.pop() if self._events else self._cuda.Event(enable_timing=True)


class CudaCopy:
    """A plan on the side stream, between two events. `seconds` gives the events back to `events`.

    If the driver did not take all runs (`has_begun` is False), it may still copy some: the end is awaited nevertheless.
    The plans are kept until then, in case the driver reads their arrays late.
    """

    def __init__(self, begin: Any, end: Any, has_begun: bool, plans: object, events: list[Any]) -> None:
        self._begin = begin
        self._end = end
        self._has_failed = not has_begun
        self._plans = plans
        self._events = events

    def has_ended(self) -> bool:
        try:
            return bool(self._end.query())
        except RuntimeError as error:  # the device has failed, and all work on it
            self._fail(error)
            return True

    def wait(self) -> None:
        try:
            self._end.synchronize()
        except RuntimeError as error:
            self._fail(error)

    def seconds(self) -> float | None:
        if self._has_failed:
            return None
        try:
            elapsed_s = float(self._begin.elapsed_time(self._end)) / 1e3
        except RuntimeError as error:  # the device failed after `has_ended` was called
            self._fail(error)
            return None
        self._events += [self._begin, self._end]
        return elapsed_s

    def _fail(self, error: RuntimeError) -> None:
        if not self._has_failed:
            _log.warning("a copy on the CUDA device failed: %s", error)
        self._has_failed = True


class _Location(ctypes.Structure):
    """CUmemLocation of cuda.h."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class DriverCopies:
    """Submits plans by the fastest call of the driver's library, `libcuda.so.1`."""

    def __init__(self, driver: Any) -> None:  # Any: ctypes' functions
        self._driver = driver
        # Version 2 (CUDA 13) has no argument for the index of the copy that could not be submitted.
        second = getattr(driver, "cuMemcpyBatchAsync_v2", None)
        self._batch: Any = second or getattr(driver, "cuMemcpyBatchAsync", None)
        self._is_first_version = second is None

    def copy(self, plan: CopyPlan, stream: int) -> bool:
        """Submit all runs of a plan to a stream, and return whether the driver accepted them."""
        if not len(plan.lengths):
            return True
        if self._batch is not None:
            code = self._copy_batch(plan, stream)
            if code == _CUDA_SUCCESS:
                return True
            _log.warning("cuMemcpyBatchAsync failed (CUDA error %d); runs are copied one by one from now on", code)
            self._batch = None
        return self._copy_each(plan, stream)

    def _copy_batch(self, plan: CopyPlan, stream: int) -> int:
        attributes = _Attributes(source_access_order=_SRC_ACCESS_ORDER_STREAM)
        first_run, failed_run = ctypes.c_size_t(0), ctypes.c_size_t(0)
        arguments = [
            ctypes.c_void_p(plan.destinations.ctypes.data),
            ctypes.c_void_p(plan.sources.ctypes.data),
            ctypes.c_void_p(plan.lengths.ctypes.data),
            ctypes.c_size_t(len(plan.lengths)),
            ctypes.byref(attributes),
            ctypes.byref(first_run),
            ctypes.c_size_t(1),
        ]
        if self._is_first_version:
            arguments.append(ctypes.byref(failed_run))
        return int(self._batch(*arguments, ctypes.c_void_p(stream)))

    def _copy_each(self, plan: CopyPlan, stream: int) -> bool:
        copy, stream_pointer = self._driver.cuMemcpyAsync, ctypes.c_void_p(stream)
        runs = np.stack([plan.destinations, plan.sources, plan.lengths], axis=1).tolist()
        for destination, source, length in runs:
            code = copy(ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(length), stream_pointer)
            if code != _CUDA_SUCCESS:
                _log.warning("cuMemcpyAsync failed: CUDA error %d", code)
                return False
        return True


def _split(plan: CopyPlan) -> tuple[CopyPlan, CopyPlan]:
    """Return a plan of the short runs, and a plan of all other runs."""
    is_short = plan.lengths < SHORT_RUN_BYTES
    if is_short.all():
        return plan, _where(plan, ~is_short)
    return _where(plan, is_short), _where(plan, ~is_short)


def _where(plan: CopyPlan, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> CopyPlan:
    return CopyPlan(plan.sources[chosen], plan.destinations[chosen], plan.lengths[chosen])


@functools.cache
def load_driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise ConfigError(f"copies to and from a GPU need NVIDIA's driver: {error}") from error
