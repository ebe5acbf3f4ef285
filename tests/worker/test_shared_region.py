"""A region that several processes map, in any order of arrival, also after some were killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_kv.cpu import region as region_module
from tiered_kv.cpu.region import ROWS_OFFSET, SHARED_MEMORY_DIRECTORY, Geometry
from tiered_kv.errors import ConfigError
from tiered_kv.worker import shared_file
from tiered_kv.worker.shared import SharedRegion
from tiered_kv.worker.shared_file import SharedFile

PARTIES = ["scheduler", "worker 0", "worker 1"]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits time out at once, and not after five minutes."""
    monkeypatch.setattr(shared_file, "JOIN_TIMEOUT_S", 0.05)


def file_of(name: str) -> Path:
    return SHARED_MEMORY_DIRECTORY / f"{name}+workers"


def join(name: str, party: str, rows: int = 4, row_bytes: int = 4096, **more: int) -> SharedRegion:
    geometry = Geometry(rows, row_bytes, **more)
    return SharedRegion.join(SharedFile(name, party, PARTIES), geometry)


def hold(name: str, party: str) -> subprocess.Popen[str]:
    """Start a process that has joined, and waits to be killed."""
    program = (
        "import sys; from tiered_kv.worker.shared_file import SharedFile\n"
        "from tiered_kv.worker.shared import Geometry, SharedRegion\n"
        "SharedRegion.join(SharedFile(sys.argv[1], sys.argv[2], sys.argv[3:]), Geometry(4, 4096))\n"
        "print('joined', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, name, party, *PARTIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "joined\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    with process:
        pass


@pytest.mark.parametrize("order", [PARTIES, PARTIES[::-1], ["worker 1", "scheduler", "worker 0"]])
def test_all_parties_map_the_same_bytes_in_any_order_of_joining(name: str, order: list[str]) -> None:
    regions: list[SharedRegion] = []
    for index, party in enumerate(order):
        assert not any(region.is_complete() for region in regions)
        assert all(region.missing_parties() == sorted(order[index:]) for region in regions)
        regions.append(join(name, party))
    assert all(region.is_complete() and not region.missing_parties() for region in regions)
    assert not file_of(name).exists(), "the last party that joins removes the name"
    for index, region in enumerate(regions):
        region.array[index] = index + 1
    for region in regions:
        assert region.array[:3, 0].tolist() == [1, 2, 3]
        assert region.close()


def test_a_party_that_leaves_before_all_have_joined_is_missing_again(name: str) -> None:
    scheduler, worker = join(name, "scheduler"), join(name, "worker 0")
    worker.close()
    assert scheduler.missing_parties() == ["worker 0", "worker 1"]
    again = join(name, "worker 0")
    assert again.missing_parties() == ["worker 1"]
    scheduler.close()
    assert file_of(name).exists()
    again.close()


def test_a_second_process_of_the_same_party_is_refused(name: str) -> None:
    region = join(name, "worker 0")
    with pytest.raises(ConfigError, match="another process is 'worker 0'"):
        join(name, "worker 0")
    region.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rows": 5}, "expected rows 5 in the region .*, found rows 4;"),
        # The total is the same, so nothing but the header tells them apart.
        ({"rows": 2, "row_bytes": 8192}, "expected rows 2, row_bytes 8192, part_bytes 8192 in .*, found rows 4, row_"),
        ({"parts": 2}, "expected parts 2, part_bytes 2048 in .*, found parts 1, part_bytes 4096"),
        ({"block_size_factor": 2}, "expected block_size_factor 2 in .*, found block_size_factor 1"),
    ],
)
def test_another_geometry_is_refused_while_a_party_has_joined(name: str, other: dict[str, int], message: str) -> None:
    region = join(name, "worker 0")
    with pytest.raises(ConfigError, match=message):
        join(name, "worker 1", **other)
    assert region.missing_parties() == ["scheduler", "worker 1"]
    join(name, "worker 1").close()
    region.close()


def test_a_file_has_no_geometry_before_a_region_joins(name: str) -> None:
    file = SharedFile(name, "worker 0", PARTIES)
    other = join(name, "worker 1", rows=7)
    with pytest.raises(ConfigError, match=r"expected rows 4 in .*, found rows 7"):
        SharedRegion.join(file, Geometry(4, 4096))
    assert other.missing_parties() == ["scheduler", "worker 0"]
    other.close()


def test_all_parties_read_the_notes_in_any_order_of_joining(name: str) -> None:
    files = [SharedFile(name, party, PARTIES, party.encode()) for party in reversed(PARTIES)]
    for file in files:
        assert file.notes_of(PARTIES[1:]) == [b"worker 0", b"worker 1"]
    regions = [SharedRegion.join(file, Geometry(4, 4096)) for file in files]
    assert all(region.is_complete() for region in regions)
    for region in regions:
        region.close()


@pytest.mark.usefixtures("soon")
def test_the_wait_for_a_note_is_bounded(name: str) -> None:
    kill(hold(name, "worker 1"))
    file = SharedFile(name, "worker 0", PARTIES, b"new")
    with pytest.raises(ConfigError, match=r"^worker 1 has not joined .* on one machine$"):
        file.notes_of(PARTIES[1:])
    file.leave()


@pytest.mark.parametrize(("parties", "note"), [(512, b""), (2, bytes(4097))])
def test_what_the_file_has_no_room_for_is_refused(name: str, parties: int, note: bytes) -> None:
    with pytest.raises(ConfigError, match="at most 511 processes and notes of 4096 bytes"):
        SharedFile(name, "0", [str(party) for party in range(parties)], note)


@pytest.mark.slow
def test_a_party_that_was_killed_is_missing_again(name: str) -> None:
    kill(hold(name, "worker 0"))
    scheduler = join(name, "scheduler")
    worker = hold(name, "worker 1")
    assert scheduler.missing_parties() == ["worker 0"]
    kill(worker)
    assert scheduler.missing_parties() == ["worker 0", "worker 1"]
    scheduler.close()


def test_the_file_of_a_killed_run_is_used_again_with_any_size(name: str) -> None:
    kill(hold(name, "worker 0"))
    assert file_of(name).exists()
    region = join(name, "worker 0", rows=7)
    assert region.array.shape == (7, 4096)
    assert file_of(name).stat().st_size == ROWS_OFFSET + 7 * 4096
    region.close()


def test_a_restarted_worker_does_not_pass_for_the_one_before(name: str) -> None:
    regions = [join(name, party) for party in PARTIES]
    again = join(name, "worker 1")
    assert again.missing_parties() == ["scheduler", "worker 0"]
    assert regions[0].is_complete()
    for region in [*regions, again]:
        region.close()


@pytest.mark.usefixtures("soon")
def test_the_wait_for_a_locked_file_is_bounded(name: str) -> None:
    with file_of(name).open("wb") as file:
        file_of(name).chmod(0o600)
        fcntl.lockf(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="see what holds it"):
            join(name, "scheduler")
    join(name, "scheduler").close()


def test_more_than_the_shared_memory_has_is_an_error_that_leaves_nothing(name: str) -> None:
    status = os.statvfs(SHARED_MEMORY_DIRECTORY)
    with pytest.raises(ConfigError, match=r"free and the region needs"):
        join(name, "scheduler", rows=status.f_blocks * status.f_frsize // 4096 + 1)


def test_memory_is_bound_to_its_node_before_it_has_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[int] = []
    monkeypatch.setattr(region_module, "_bind_to_node", lambda *_: pages.append(file_of(name).stat().st_blocks))
    without = SharedFile(name, "scheduler", PARTIES)
    pages.append(file_of(name).stat().st_blocks)
    SharedRegion.join(without, Geometry(4, 4096), numa_node=0).close()
    assert pages[0] == pages[1], "rows had pages before they were bound"


@pytest.mark.parametrize("bad", ["", "a/b"])
def test_a_name_that_is_a_path_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="plain name"):
        join(bad, "scheduler")
