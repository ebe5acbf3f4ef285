"""The choice between driver and kernel for the short runs of a layout, measured once when its handlers are opened.

`open_handlers` calls it, on the worker's thread. A copy engine takes microseconds for each run. So pages of 16 KiB were
loaded at a twelfth of the bus's rate (H200). The kernel is faster, but takes some of the model's multiprocessors. So it
copies only in the directions in which it pays, and only after it has copied a pattern without an error.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered_kv.base import TransferType
from tiered_kv.config.units import format_bytes
from tiered_kv.worker.cuda import SHORT_RUN_BYTES, CudaCopier, Kernel, load_driver
from tiered_kv.worker.plan import LOAD, STORE, BlockLayout, CopyPlan

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_CUDA_SUCCESS = 0
_WORD_BYTES_MAX = 16
_GAIN_MIN = 1.1
"""The driver's time, as a multiple of the kernel's, from which the kernel is worth its multiprocessors."""
_SAMPLE_BYTES = 8 << 20
_SAMPLE_PAGES_MAX = 512
_ROUNDS = 4

Seconds = dict[TransferType, tuple[float, float]]
"""The driver's time and the kernel's time, for each direction."""


class KernelCopies:
    """Submits plans to the kernel of `kernel.py`.

    Args:
        device: The CUDA device.
        word_bytes: 1, 2, 4, 8 or 16; divides all addresses and lengths. The kernel is compiled once for each value.

    Raises:
        ImportError: Triton is not installed.
        ValueError: Triton interprets kernels, and does not compile them.
    """

    def __init__(self, device: torch.device, word_bytes: int) -> None:
        from tiered_kv.worker import kernel

        if not kernel.is_compiled():  # it would read the device's addresses as the CPU's
            raise ValueError("TRITON_INTERPRET is set")
        self._launch = kernel.launch
        self._device = device
        self._word_bytes = word_bytes

    def copy(self, plan: CopyPlan, stream: Any) -> None:  # Any: torch.cuda.Stream
        import torch

        columns = (plan.sources, plan.destinations, plan.lengths)
        if any(int(np.bitwise_or.reduce(column)) % self._word_bytes for column in columns):
            raise ValueError(f"a run is not aligned to {self._word_bytes} bytes")
        even = even_out(plan)
        # torch keeps both copies of the arrays until the stream has used them.
        runs = torch.empty((3, len(even.lengths)), dtype=torch.int64, pin_memory=True)
        np.stack([even.sources, even.destinations, even.lengths], out=runs.numpy())
        with torch.cuda.stream(stream):
            on_device = runs.to(self._device, non_blocking=True)
            self._launch(on_device, int(even.lengths.max()), self._word_bytes)


def even_out(plan: CopyPlan) -> CopyPlan:
    """Return a plan that copies the same bytes, by at most twice as many runs, none much longer than the mean.

    The kernel spends on each run as much as on the longest. Longer runs are cut into parts of whole words.
    """
    mean_bytes = int(plan.lengths.mean())
    limit_bytes = -(-mean_bytes // _WORD_BYTES_MAX) * _WORD_BYTES_MAX
    if int(plan.lengths.max()) <= 2 * limit_bytes:
        return plan
    num_parts = -(-plan.lengths // limit_bytes)
    run = np.repeat(np.arange(len(num_parts)), num_parts)
    begin = limit_bytes * (np.arange(len(run)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts))
    lengths = np.minimum(plan.lengths[run] - begin, limit_bytes)
    return CopyPlan(plan.sources[run] + begin, plan.destinations[run] + begin, lengths)


def choose_kernels(
    device: torch.device,
    layout: BlockLayout,
    region_address: int,
    *,
    open_kernel: Callable[[torch.device, int], Kernel] = KernelCopies,
    measure: Callable[[torch.device, int, Kernel], Seconds] | None = None,
    driver: Any = None,  # Any: ctypes' functions
) -> dict[TransferType, Kernel]:
    """Return the kernel for each direction in which it copies short runs faster than the driver.

    The device is the thread's current one. A failure here is no error: the driver then copies all runs.

    Args:
        region_address: The address of the region, which is pinned.
        open_kernel, measure, driver: The parts that tests replace.
    """
    pages = np.concatenate([group.pieces["bytes"].ravel() for group in layout.groups])
    pages = pages[pages < SHORT_RUN_BYTES]
    if not pages.size:
        return {}
    page_bytes = int(np.sort(pages)[pages.size // 2])
    try:
        kernel = open_kernel(device, word_bytes_of(layout))
        seconds = (measure or measure_both)(device, page_bytes, kernel)
        # The measurement comes first: it has made the device's context the context of this thread.
        if not _is_mapped(driver or load_driver(), region_address):
            raise ValueError("the device cannot address the region")
    except Exception as error:  # Triton's compiler and launcher raise anything
        _log.info("the driver copies pages of any size: no kernel: %s: %s", type(error).__name__, error)
        return {}
    chosen = {kind: kernel for kind, (by_driver, by_kernel) in seconds.items() if by_driver > _GAIN_MIN * by_kernel}
    for kind, (by_driver, by_kernel) in seconds.items():
        _log.info(
            "pages of %s from %s to %s: the %s copies them (the kernel is %.2f times as fast as the driver)",
            format_bytes(page_bytes),
            *kind,
            "kernel" if kind in chosen else "driver",
            by_driver / by_kernel,
        )
    return chosen


def word_bytes_of(layout: BlockLayout) -> int:
    """Return the largest power of two, 16 at most, that divides all addresses and lengths of the layout's plans."""
    bits = _WORD_BYTES_MAX | layout.part_address | layout.row_bytes
    for group in layout.groups:
        for name in ("address", "stride", "bytes", "row_offset", "row_stride"):
            bits |= int(np.bitwise_or.reduce(group.pieces[name], axis=None))
    return bits & -bits


def measure_both(device: torch.device, page_bytes: int, kernel: Kernel) -> Seconds:
    """Return the least times of the driver and the kernel, for a few MiB of scattered pages in memory of its own.

    Raises:
        ValueError: The kernel copies wrong bytes.
        Exception: Any exception of the kernel or torch.
    """
    import torch

    num_pages = max(2, min(_SAMPLE_PAGES_MAX, _SAMPLE_BYTES // page_bytes))
    random = np.random.default_rng(0)  # NumPy's generator, so that the model's random numbers stay the same
    pattern = torch.from_numpy(random.integers(0, 256, num_pages * page_bytes, dtype=np.uint8))
    on_cpu = torch.empty(pattern.shape, dtype=torch.uint8, pin_memory=True).copy_(pattern)
    on_device = torch.zeros_like(on_cpu, device=device)
    cpu_pages = on_cpu.data_ptr() + page_bytes * np.arange(num_pages, dtype=np.int64)
    device_pages = on_device.data_ptr() + page_bytes * random.permutation(num_pages)
    lengths = np.full(num_pages, page_bytes, dtype=np.int64)
    plans = {LOAD: CopyPlan(cpu_pages, device_pages, lengths), STORE: CopyPlan(device_pages, cpu_pages, lengths)}

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    kernel.copy(plans[LOAD], stream)  # compiles it
    stream.synchronize()
    on_cpu.zero_()
    kernel.copy(plans[STORE], stream)
    stream.synchronize()
    if not torch.equal(on_cpu, pattern):
        raise ValueError("it copies wrong bytes")
    by_driver, by_kernel = CudaCopier(device), CudaCopier(device, kernel=kernel)
    return {kind: (_least_seconds(by_driver, plan), _least_seconds(by_kernel, plan)) for kind, plan in plans.items()}


def _least_seconds(copier: CudaCopier, plan: CopyPlan) -> float:
    copies = [copier.submit(plan) for _ in range(_ROUNDS)]  # the device need not wait for the second to be submitted
    for copy in copies:
        copy.wait()
    seconds = [copy.seconds() for copy in copies]
    if None in seconds:
        raise ValueError("a copy failed")
    return min(each for each in seconds if each is not None)


def _is_mapped(driver: Any, address: int) -> bool:  # Any: ctypes' functions
    """Return whether kernels may use the address of page-locked memory as it is."""
    on_device = ctypes.c_uint64(0)
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(on_device), ctypes.c_void_p(address), ctypes.c_uint(0))
    return bool(code == _CUDA_SUCCESS and on_device.value == address)
