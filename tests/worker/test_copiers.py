"""The copier within the CPU's memory, and the calls of the CUDA copier to fakes of torch and of the driver.

`test_copies.py` and `test_handlers.py` use a real device if there is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from tiered_kv.worker.cpu import CpuCopier, copy_runs
from tiered_kv.worker.cuda import SHORT_RUN_BYTES, CudaCopier, DriverCopies, _Attributes
from tiered_kv.worker.plan import CopyPlan

CUDA_ERROR_INVALID_VALUE = 1


class FakeCuda:
    """torch.cuda, with a log of the device's calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.has_failed = False

    def check(self) -> None:
        if self.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def current_stream(self, device: object) -> str:
        return "compute"

    def Stream(self, device: object) -> FakeStream:
        return FakeStream(self)

    def Event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)


class FakeStream:
    cuda_stream = 77

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def wait_stream(self, stream: str) -> None:
        self._cuda.check()
        self._cuda.log.append(f"wait for {stream}")

    def synchronize(self) -> None:
        self._cuda.check()
        self._cuda.log.append("synchronize")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self._cuda.log.append("event")

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._cuda.check()

    def elapsed_time(self, end: FakeEvent) -> float:
        self._cuda.check()
        return 2.5


def integer(value: Any) -> int:
    return int(value.value or 0)


class EachDriver:
    """A driver without batches."""

    def __init__(self, log: list[str], code: int = 0) -> None:
        self.log = log
        self.code = code

    def cuMemcpyAsync(self, destination: Any, source: Any, length: Any, stream: Any) -> int:
        self.log.append("copy")
        assert integer(stream) == FakeStream.cuda_stream
        if not self.code:
            ctypes.memmove(integer(destination), integer(source), integer(length))
        return self.code


class FirstBatchDriver(EachDriver):
    """The driver of CUDA 12.8."""

    def __init__(self, log: list[str], batch_code: int = 0) -> None:
        super().__init__(log)
        self.batch_code = batch_code

    def cuMemcpyBatchAsync(self, *arguments: Any) -> int:
        assert len(arguments) == 9
        return self.copy_batch(*arguments[:7], arguments[8])

    def copy_batch(self, *arguments: Any) -> int:
        destinations, sources, lengths, count, attributes, first_runs, num_attributes, stream = arguments
        self.log.append(f"batch of {count.value}")
        assert integer(stream) == FakeStream.cuda_stream
        assert (integer(num_attributes), first_runs._obj.value) == (1, 0)
        assert isinstance(attributes._obj, _Attributes)
        assert attributes._obj.source_access_order == 1
        assert ctypes.sizeof(_Attributes) == 24
        if not self.batch_code:
            words = ctypes.c_uint64 * count.value
            columns = [words.from_address(integer(each)) for each in (destinations, sources, lengths)]
            for destination, source, length in zip(*columns, strict=True):
                ctypes.memmove(destination, source, length)
        return self.batch_code


class SecondBatchDriver(FirstBatchDriver):
    """The driver of CUDA 13, which has both versions."""

    def cuMemcpyBatchAsync(self, *arguments: Any) -> int:
        raise AssertionError("the second version is there")

    def cuMemcpyBatchAsync_v2(self, *arguments: Any) -> int:
        return self.copy_batch(*arguments)


class FakeKernel:
    """Copies by memmove, or fails."""

    def __init__(self, cuda: FakeCuda, error: Exception | None = None) -> None:
        self._cuda = cuda
        self._error = error

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        assert isinstance(stream, FakeStream)
        self._cuda.log.append(f"kernel of {len(plan.lengths)}")
        self._cuda.check()
        if self._error is not None:
            raise self._error
        copy_runs(plan)


class Reversal:
    """A plan that reverses rows of 16 bytes, the first `num_long` of which are as many bytes as no short run has."""

    def __init__(self, num_runs: int, num_long: int = 0) -> None:
        row_bytes = SHORT_RUN_BYTES if num_long else 16
        self.lengths = np.full(num_runs, 16, dtype=np.int64)
        self.lengths[:num_long] = row_bytes
        self.source = np.random.default_rng(0).integers(0, 256, (num_runs, row_bytes), dtype=np.uint8)
        self.destination = np.zeros_like(self.source)
        at = np.arange(num_runs, dtype=np.int64) * row_bytes
        self.plan = CopyPlan(self.source.ctypes.data + at, self.destination.ctypes.data + at[::-1].copy(), self.lengths)

    def is_done(self) -> bool:
        expected = np.zeros_like(self.destination)
        for row, length in enumerate(self.lengths):
            expected[-1 - row, :length] = self.source[row, :length]
        return np.array_equal(self.destination, expected)


def test_many_small_runs_do_not_wait_for_an_engine_that_computes_in_python() -> None:
    reversal = Reversal(20_000)
    copier = CpuCopier("tiered-kv-test")
    began_s = time.perf_counter()
    copy = copier.submit(reversal.plan)
    turns = 0
    while not copy.has_ended():
        turns += 1  # holds the interpreter's lock until another thread asks for it
    # Runs that each waited for the lock would take 20,000 switch intervals, which is 100 s; a busy machine takes a few.
    assert time.perf_counter() - began_s < 4000 * sys.getswitchinterval()
    assert copy.seconds() is not None
    assert reversal.is_done()
    copier.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiered-kv-test")]


def copier(cuda: FakeCuda, driver: object, kernel: FakeKernel | None = None) -> CudaCopier:
    return CudaCopier(cast("Any", "cuda:0"), kernel=kernel, cuda=cuda, driver=driver)


@pytest.mark.parametrize(
    ("driver_type", "copies"),
    [(EachDriver, ["copy"] * 3), (FirstBatchDriver, ["batch of 3"]), (SecondBatchDriver, ["batch of 3"])],
)
def test_a_job_waits_for_the_compute_stream_and_is_one_batch(driver_type: type[EachDriver], copies: list[str]) -> None:
    cuda = FakeCuda()
    reversal = Reversal(3)
    copy = copier(cuda, driver_type(cuda.log)).submit(reversal.plan)
    assert cuda.log == ["wait for compute", "event", *copies, "event"]
    assert reversal.is_done()
    copy.wait()
    assert copy.has_ended()
    assert copy.seconds() == 0.0025


def test_a_driver_that_refuses_batches_is_asked_for_one_copy_after_the_other_from_then_on() -> None:
    cuda = FakeCuda()
    reversal = Reversal(2)
    driver = DriverCopies(FirstBatchDriver(cuda.log, batch_code=CUDA_ERROR_INVALID_VALUE))
    assert driver.copy(reversal.plan, FakeStream.cuda_stream)
    assert driver.copy(reversal.plan, FakeStream.cuda_stream)
    assert cuda.log == ["batch of 2", "copy", "copy", "copy", "copy"]
    assert reversal.is_done()


def test_a_job_that_the_driver_refuses_is_reported_failed_after_its_end() -> None:
    cuda = FakeCuda()
    copy = copier(cuda, EachDriver(cuda.log, code=CUDA_ERROR_INVALID_VALUE)).submit(Reversal(2).plan)
    assert cuda.log == ["wait for compute", "event", "copy", "event"]
    assert copy.has_ended()
    assert copy.seconds() is None


def test_a_kernel_copies_the_short_runs_of_a_job_and_the_driver_the_others() -> None:
    cuda = FakeCuda()
    device = copier(cuda, SecondBatchDriver(cuda.log), FakeKernel(cuda))
    for num_runs, num_long, copies in ((3, 0, ["kernel of 3"]), (3, 1, ["batch of 1", "kernel of 2"])):
        reversal = Reversal(num_runs, num_long)
        copy = device.submit(reversal.plan)
        assert cuda.log == ["wait for compute", "event", *copies, "event"]
        assert reversal.is_done()
        assert copy.seconds() == 0.0025
        cuda.log.clear()
    reversal = Reversal(2, 2)
    device.submit(reversal.plan)
    device.submit(Reversal(0).plan)
    assert cuda.log == ["wait for compute", "event", "batch of 2", "event", "wait for compute", "event", "event"]
    assert reversal.is_done()


def test_after_a_kernel_failed_the_driver_copies_everything(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda()
    device = copier(cuda, SecondBatchDriver(cuda.log), FakeKernel(cuda, TypeError("out of resources")))
    for copies in (["batch of 1", "kernel of 2", "batch of 2"], ["batch of 3"]):
        reversal = Reversal(3, 1)
        copy = device.submit(reversal.plan)
        assert cuda.log == ["wait for compute", "event", *copies, "event"]
        assert reversal.is_done()
        assert copy.seconds() == 0.0025
        cuda.log.clear()
    assert [record.message for record in caplog.records] == [
        "the copy kernel failed, the driver copies from now on: TypeError: out of resources"
    ]


def test_a_job_whose_kernel_and_driver_fail_is_reported_failed() -> None:
    cuda = FakeCuda()
    driver = EachDriver(cuda.log, code=CUDA_ERROR_INVALID_VALUE)
    copy = copier(cuda, driver, FakeKernel(cuda, TypeError("out of resources"))).submit(Reversal(2).plan)
    assert copy.has_ended()
    assert copy.seconds() is None


@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_device_that_fails_ends_its_jobs_as_failed(has_kernel: bool) -> None:
    cuda = FakeCuda()
    device = copier(cuda, SecondBatchDriver(cuda.log), FakeKernel(cuda) if has_kernel else None)
    copy = device.submit(Reversal(2).plan)
    cuda.has_failed = True
    late = device.submit(Reversal(2).plan)
    for each in (copy, late):
        each.wait()
        assert each.has_ended()
        assert each.seconds() is None
    device.close()


def test_a_device_that_fails_between_a_job_s_end_and_its_report_fails_the_job() -> None:
    cuda = FakeCuda()
    copy = copier(cuda, SecondBatchDriver(cuda.log)).submit(Reversal(2).plan)
    assert copy.has_ended()
    cuda.has_failed = True
    assert copy.seconds() is None
