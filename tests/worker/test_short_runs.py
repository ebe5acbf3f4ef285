"""A kernel copies short runs in the directions in which it is faster, and only where it works."""

from __future__ import annotations

import logging
from typing import Any, cast

import numpy as np
import pytest

from tests.worker.test_copiers import Reversal
from tiered_kv.worker.cuda import SHORT_RUN_BYTES, Kernel
from tiered_kv.worker.plan import LOAD, PIECE, STORE, BlockLayout, CopyPlan, GroupLayout
from tiered_kv.worker.short_runs import KernelCopies, Seconds, choose_kernels, word_bytes_of

DEVICE = cast("Any", "cuda:0")
REGION_ADDRESS = 1 << 40
FASTER: Seconds = {LOAD: (12.0, 1.0), STORE: (2.0, 1.0)}


class Mapping:
    """A driver, and where it maps the region for the device: moved by so many bytes, or not at all."""

    def __init__(self, moved_bytes: int = 0, code: int = 0) -> None:
        self._moved_bytes = moved_bytes
        self._code = code

    def cuMemHostGetDevicePointer_v2(self, on_device: Any, address: Any, flags: Any) -> int:
        assert flags.value == 0
        on_device._obj.value = address.value + self._moved_bytes
        return self._code


class Stack:
    """What `choose_kernels` asks, and how often."""

    def __init__(
        self, seconds: Seconds | Exception = FASTER, *, opens: bool = True, mapping: Mapping | None = None
    ) -> None:
        self.seconds = seconds
        self.opens = opens
        self.mapping = mapping or Mapping()
        self.opened: list[int] = []
        self.measured: list[int] = []

    def open(self, device: object, word_bytes: int) -> Kernel:
        assert device is DEVICE
        self.opened.append(word_bytes)
        if not self.opens:
            raise ImportError("No module named 'triton'")
        return cast("Kernel", self)

    def copy(self, plan: CopyPlan, stream: object) -> None:
        raise AssertionError("only the measurement copies")

    def measure(self, device: object, page_bytes: int, kernel: Kernel) -> Seconds:
        self.measured.append(page_bytes)
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return self.seconds

    def choose(self, layout: BlockLayout) -> dict[Any, Kernel]:
        return choose_kernels(
            DEVICE, layout, REGION_ADDRESS, open_kernel=self.open, measure=self.measure, driver=self.mapping
        )


def layout(*groups: list[int], address: int = 1 << 30, part_address: int = REGION_ADDRESS) -> BlockLayout:
    """Return a layout of groups, each of refs with so many bytes a page."""

    def pieces(pages: list[int]) -> Any:
        found = [(address, size, size, sum(pages[:ref]), size, True) for ref, size in enumerate(pages)]
        return np.array(found, PIECE).reshape(-1, 1)

    return BlockLayout(tuple(GroupLayout(pieces(pages), 4) for pages in groups), 1, part_address, 1 << 21, 8)


def test_the_faster_way_is_chosen_for_each_direction(caplog: pytest.LogCaptureFixture) -> None:
    stack = Stack({LOAD: (12.0, 1.0), STORE: (1.0, 0.95)})
    with caplog.at_level(logging.INFO):
        assert stack.choose(layout([16 << 10] * 3)) == {LOAD: stack}, "the store's gain is not worth multiprocessors"
    assert (stack.opened, stack.measured) == ([16], [16 << 10])
    assert [record.message for record in caplog.records] == [
        "pages of 16KiB from CPU to GPU: the kernel copies them (the kernel is 12.00 times as fast as the driver)",
        "pages of 16KiB from GPU to CPU: the driver copies them (the kernel is 1.05 times as fast as the driver)",
    ]


def test_long_pages_are_not_measured() -> None:
    stack = Stack()
    assert stack.choose(layout([SHORT_RUN_BYTES], [])) == {}
    assert not stack.opened
    assert stack.choose(layout([SHORT_RUN_BYTES] * 3, [4096])) == {LOAD: stack, STORE: stack}
    assert stack.measured == [4096], "of the short ones"


@pytest.mark.parametrize(
    ("stack", "reason"),
    [
        (Stack(opens=False), "ImportError: No module named 'triton'"),
        (Stack(OSError("no compiler")), "OSError: no compiler"),
        (Stack(mapping=Mapping(code=1)), "ValueError: the device cannot address the region"),
        (Stack(mapping=Mapping(moved_bytes=4096)), "ValueError: the device cannot address the region"),
    ],
    ids=["no triton", "no compiler", "not mapped", "mapped elsewhere"],
)
def test_the_driver_copies_where_the_kernel_does_not_work(
    caplog: pytest.LogCaptureFixture, stack: Stack, reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert stack.choose(layout([4096])) == {}
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message.endswith(reason)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16, 32])
def test_a_word_divides_all_that_a_plan_can_have(unit: int) -> None:
    wanted = min(unit, 16)
    assert word_bytes_of(layout([64, 64 + unit])) == wanted
    assert word_bytes_of(layout([64], address=1024 + unit)) == wanted
    assert word_bytes_of(layout([64], part_address=1024 + unit)) == wanted


def test_a_run_that_is_not_of_whole_words_is_refused() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    plan = Reversal(3).plan
    for moved in (
        CopyPlan(plan.sources + 8, plan.destinations, plan.lengths),
        CopyPlan(plan.sources, plan.destinations + 8, plan.lengths),
        CopyPlan(plan.sources, plan.destinations, plan.lengths - 8),
    ):
        with pytest.raises(ValueError, match="not aligned to 16 bytes"):
            KernelCopies(DEVICE, 16).copy(moved, None)


def test_the_interpreter_gets_no_addresses_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("tiered_kv.worker.kernel.is_compiled", lambda: False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        KernelCopies(DEVICE, 16)
