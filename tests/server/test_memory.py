"""The memory that a server shares with its engines: sealed, in huge pages, not for forked children."""

from __future__ import annotations

import errno
import faulthandler
import fcntl
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.forks import fork
from tests.support.kernels import MACHINES, give_transparent, write_machine
from tests.support.stacks import stack_of
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError
from tiered_kv.server import allocation, memory
from tiered_kv.server.generations import Generations, map_generations
from tiered_kv.server.memory import HostRegion, map_host_region
from tiered_kv.stack.open import open_stack
from tiered_kv.system import collapse
from tiered_kv.system.collapse import huge_bytes
from tiered_kv.system.huge_pages import HugePages
from tiered_kv.system.limits import Limit, Limits
from tiered_kv.testing.control import wait_until

ROWS, ROW_BYTES = 6, 5000
needs_collapse = pytest.mark.skipif(
    bool(collapse.refusal(Limits().collapsed_size())), reason="this kernel makes no huge pages on request"
)


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with closing(HostRegion(ROWS, ROW_BYTES)) as opened:
        yield opened


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_an_engine_and_the_server_see_the_same_rows(region: HostRegion) -> None:
    with closing(map_host_region(region.fd, ROWS, ROW_BYTES)) as mapped:
        mapped.array[2] = 7
        assert region.array[2].tobytes() == bytes([7]) * ROW_BYTES
        region.kv_view[ROWS - 1, ROW_BYTES - 1] = 9
        assert mapped.flat[ROWS * ROW_BYTES - 1] == 9
        assert not mapped.array[0].any()


def test_an_engine_keeps_the_rows_of_a_server_that_has_ended() -> None:
    region = HostRegion(ROWS, ROW_BYTES)
    region.array[1] = 3
    with closing(map_host_region(region.fd, ROWS, ROW_BYTES)) as mapped:
        assert region.close()
        assert region.close(), "closing twice does nothing"
        assert mapped.array[1].all()


@pytest.mark.parametrize("size_bytes", [0, 4096, 1 << 20])
def test_nobody_changes_the_size_of_the_rows(region: HostRegion, size_bytes: int) -> None:
    fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size_bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(fd)


def test_python_has_no_page_to_free_when_it_unmaps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    region = HostRegion(4, 1 << 20)
    mapped = map_host_region(region.fd, 4, 1 << 20)
    mapped.array[:] = 1
    region.close()
    resident: list[int] = []
    close = PrimaryRegion.close

    def close_and_look(region: PrimaryRegion) -> bool:
        with open("/proc/self/smaps") as smaps:
            rows = smaps.read().partition("tiered-kv-rows")[2]
        resident.append(int(rows.partition("Rss:")[2].split()[0]))
        is_closed = close(region)
        resident.append(allocated_bytes(mapped.fd) - (4 << 20))
        return is_closed

    monkeypatch.setattr(PrimaryRegion, "close", close_and_look)
    assert mapped.close()
    assert resident == [0, 0], "the pages were not unmapped before, or freed before other threads could run"


def test_more_memory_than_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"primary\.capacity: the rows need 1PiB of memory, and .* are free"):
        HostRegion(1 << 20, 1 << 30)


def test_a_server_waits_for_memory_that_engines_still_map(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1, 1, 1 << 20])
    monkeypatch.setattr(Limits, "free_memory", lambda *_, **__: [Limit(next(free), "a fake")])
    HostRegion(1, 1 << 20, wait_s=60.0).close()
    assert next(free, None) is None


def test_a_server_waits_for_huge_pages_that_engines_still_map(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([0, 0, 0, 2 << 20])
    monkeypatch.setattr(Limits, "huge_pages", lambda *_: HugePages(2 << 20, 2 << 20, next(free), "a fake"))
    HostRegion(1, 1 << 20, reserved=None, wait_s=60.0).close()
    assert next(free, None) is None


def test_huge_pages_that_are_not_reserved_are_an_error_that_says_how_to_reserve_them() -> None:
    page_bytes = Limits().huge_pages().page_bytes
    rows = 1 << 20
    with pytest.raises(ConfigError, match=rf"expected {rows} reserved .* of \d+[KMG]iB.*nr_hugepages=\d+, or"):
        HostRegion(rows, page_bytes, reserved=True)


def test_only_a_server_uses_reserved_huge_pages() -> None:
    stack = {**stack_of(), "primary": {"capacity": "1MiB", "reserved_huge_pages": True}}
    with pytest.raises(ConfigError, match=r"primary\.reserved_huge_pages: only `tiered-kv serve`"):
        open_stack(stack)


@pytest.mark.parametrize(("free_bytes", "advice"), [(0, "sysctl vm.nr_hugepages=3586"), (1 << 30, "hugetlb.2MB.max")])
def test_a_server_starts_without_the_huge_pages_that_it_cannot_have(
    free_bytes: int, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, length: int) -> None:
        raise OSError(14, "Bad address")

    found = HugePages(2 << 20, 7 << 30, free_bytes, "a fake")
    monkeypatch.setattr(Limits, "huge_pages", lambda *_: found)
    monkeypatch.setattr(memory, "_SHMEM_ENABLED", Path("/none/shmem_enabled"))
    monkeypatch.setattr(allocation, "populate", refuse)  # as if a limit that cannot be seen were lower
    caplog.set_level("INFO")
    with closing(HostRegion(3, 1 << 20, reserved=None)) as region:
        assert not region.has_huge_pages
        region.array[:] = 1
    assert advice in caplog.text
    with pytest.raises(ConfigError, match=rf"expected 2 reserved huge pages of 2MiB, found \d+ .*a fake.*{advice}"):
        HostRegion(3, 1 << 20, reserved=True)


@pytest.mark.parametrize(
    ("machine", "free", "size", "flags"),
    [
        ("x86-64", {2 << 20: 8}, 16 << 20, 21),
        ("arm64, pages of 16 KiB", {2 << 20: 8}, 16 << 20, 21),
        ("arm64, pages of 16 KiB", {32 << 20: 1}, 32 << 20, 25),
        ("arm64, pages of 64 KiB", {2 << 20: 8, 512 << 20: 0}, 16 << 20, 21),
    ],
)
@pytest.mark.parametrize("reserved", [True, None])
def test_rows_are_in_the_reserved_pages_of_the_size_that_has_enough(
    machine: str,
    free: dict[int, int],
    size: int,
    flags: int,
    reserved: bool | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, create = list[int](), os.memfd_create

    def create_plain(name: str, flags: int = 0) -> int:
        asked.append(flags)
        return create(name, flags & (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    write_machine(tmp_path, machine, free)
    monkeypatch.setattr(memory, "Limits", lambda: Limits(str(tmp_path)))
    monkeypatch.setattr(os, "memfd_create", create_plain)
    with closing(HostRegion(16, size // 16, reserved=reserved)) as region:
        assert region.is_reserved
        assert region.has_huge_pages
        assert region.array.ctypes.data % (1 << flags) == 0
        assert region.ready_rows == 16, "they are allocated, also without prefault"
    assert [each & os.MFD_HUGETLB and each >> 26 for each in asked] == [flags]


def test_large_reserved_pages_are_not_taken_for_few_rows_unless_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A page of 512 MiB would be 32 times the capacity."""
    write_machine(tmp_path, "arm64, pages of 64 KiB", {512 << 20: 4})
    monkeypatch.setattr(memory, "Limits", lambda: Limits(str(tmp_path)))
    caplog.set_level("INFO")
    with closing(HostRegion(16, 1 << 20, reserved=None)) as region:
        assert not region.is_reserved
        assert os.fstat(region.fd).st_size == 16 << 20
    assert "set reserved_huge_pages: true" in caplog.text


@pytest.mark.parametrize("machine", MACHINES)
def test_rows_have_huge_pages_of_the_one_size_that_the_kernel_gives(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "Limits", lambda: Limits(str(tmp_path)))
    write_machine(tmp_path, machine)
    with closing(HostRegion(16, 1 << 20)) as region:
        assert not region.has_huge_pages
    for size in MACHINES[machine][1]:
        write_machine(tmp_path, machine)
        give_transparent(tmp_path, "shmem_enabled", "advise", size)
        with closing(HostRegion(16, 1 << 20)) as region, closing(map_host_region(region.fd, 16, 1 << 20)) as mapped:
            fits = size <= 16 << 20
            assert region.has_huge_pages is fits
            for each in (region, mapped):
                assert not fits or each.array.ctypes.data % size == 0


def wait_for_rows(region: HostRegion) -> None:
    wait_until(lambda: not region.is_allocating)


@needs_collapse
def test_allocated_rows_are_on_huge_pages_and_so_are_those_of_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    size_bytes = 70 << 20  # some are allocated behind the start
    with closing(HostRegion(70, 1 << 20, prefault=True)) as region:
        wait_for_rows(region)
        assert region.huge_bytes == size_bytes
        assert region.has_huge_pages
        assert allocated_bytes(region.fd) == size_bytes
        with closing(map_host_region(region.fd, 70, 1 << 20)) as mapped:
            mapped.array[:] = 3
            assert huge_bytes(mapped.array.ctypes.data, size_bytes) == size_bytes
        assert region.array.all()
    assert "70MiB of the rows' 70MiB are on huge pages" in [record.getMessage() for record in caplog.records]


@needs_collapse
@pytest.mark.parametrize("more", [{"huge_pages": False, "prefault": True}, {"prefault": False}])
def test_rows_that_are_not_to_be_allocated_or_on_huge_pages_are_not(more: dict[str, bool]) -> None:
    with closing(HostRegion(8, 1 << 20, **more)) as region:
        wait_for_rows(region)
        assert region.huge_bytes == 0
        if Limits().transparent_sizes("shmem_enabled"):
            pytest.skip("this kernel gives shared memory huge pages by itself")
        region.array[:] = 1
        assert huge_bytes(region.array.ctypes.data, 8 << 20) == 0


def test_a_server_whose_kernel_makes_no_huge_pages_works_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, length: int, advice: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(collapse, "_advise", refuse)
    monkeypatch.setattr(memory, "huge_bytes", lambda *_: 0)
    caplog.set_level("INFO")
    with closing(HostRegion(8, 1 << 20, prefault=True)) as region:
        wait_for_rows(region)
        assert region.ready_rows == 8
        assert not region.has_huge_pages
        region.array[:] = 1
    (said,) = [each.getMessage() for each in caplog.records if "huge" in each.getMessage()]
    assert said.startswith("the rows have no huge pages, with which disks are faster; ")
    if Limits().collapsed_size():
        assert "sysctl vm.compact_memory=1" in said
    assert "nr_hugepages" in said


@pytest.mark.parametrize("reserved", [True, None])
def test_reserved_huge_pages_are_used(reserved: bool | None) -> None:
    if Limits().huge_pages().free_bytes < 4 << 20:
        pytest.skip("no huge pages are reserved")
    region = HostRegion(3, 1 << 20, reserved=reserved)
    with closing(region), closing(map_host_region(region.fd, 3, 1 << 20)) as mapped:
        assert region.has_huge_pages
        mapped.array[2, -1] = 5
        assert region.array[2, -1] == 5


def test_a_file_of_whole_huge_pages_has_only_the_rows_in_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_rounded_to_pages", lambda fd, size_bytes: -(-size_bytes // (2 << 20)) * (2 << 20))
    with closing(HostRegion(ROWS, ROW_BYTES)) as region:
        assert os.fstat(region.fd).st_size == 2 << 20
        assert region.flat.nbytes == region.array.nbytes == ROWS * ROW_BYTES
        with closing(map_host_region(region.fd, ROWS, ROW_BYTES)) as mapped:
            assert mapped.kv_view.shape == (ROWS, ROW_BYTES)


def test_a_numa_node_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"numa_node|NUMA"):
        HostRegion(1, 4096, numa_node=1000)


def test_only_the_server_changes_generations() -> None:
    with closing(Generations(8)) as generations:
        seen = map_generations(generations.fd, 8)
        generations.values[7] = 0xFFFFFFFF
        generations.bump([1, 7, 1])
        assert seen.tolist() == [0, 2, 0, 0, 0, 0, 0, 0]
        with pytest.raises(TypeError):
            seen[1] = 5
        with pytest.raises(PermissionError):
            mmap.mmap(generations.fd, 32)
        with pytest.raises(PermissionError):
            os.pwrite(generations.fd, b"\xff", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(generations.fd, 0)


def ended(work: Callable[[], object]) -> int:
    """Return the exit code of a forked child that does some work: 0, or minus the signal that ended it."""
    child = fork()
    if not child:
        status = 1
        faulthandler.disable()
        signal.alarm(60)
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_has_no_rows_of_its_parent_and_keeps_no_memory(region: HostRegion) -> None:
    mapped = map_host_region(region.fd, ROWS, ROW_BYTES)
    identity = os.fstat(region.fd).st_ino

    def close_and_map_others() -> None:
        others = [mmap.mmap(-1, ROWS * ROW_BYTES) for _ in range(8)]
        assert mapped.close()
        for each in others:
            each[:] = bytes(len(each))  # would be a SIGSEGV if one lay where the rows did
        assert identity not in [os.stat(each).st_ino for each in os.scandir("/proc/self/fd") if os.path.exists(each)]

    with closing(mapped):
        assert ended(lambda: mapped.flat[0]) == -signal.SIGSEGV
        assert ended(lambda: mapped.array.fill(1)) == -signal.SIGSEGV
        assert ended(close_and_map_others) == 0
        mapped.array[0] = 8
        assert region.array[0].all()
