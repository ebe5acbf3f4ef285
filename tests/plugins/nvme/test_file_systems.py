"""What file systems differ in: allocation, direct I/O, where a directory is. The tier adapts, and says what it found.

The quick tests put words into the kernel's mouth; the slow ones mount real file systems.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.disks import FaultyDisk
from tests.support.mounts import command_on, missing_for
from tests.support.stacks import stack_file
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.system import file_systems
from tiered_kv.system.file_systems import DirectAlignment, Mount, mount_of
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.small_files import opened

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench
    from tests.support.faulty import Gate
    from tests.support.places import PlaceOf

SHM = Path("/dev/shm")


class Kernel:
    """libc in which fallocate(2) fails with some errors, one after the other, and then with the last one."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.libc: Any = ctypes.CDLL(None, use_errno=True)

    def __getattr__(self, name: str) -> Any:  # Any: a function of libc
        return self._fail if name.startswith("fallocate") else getattr(self.libc, name)

    def _fail(self, fd: int, mode: int, offset: object, size_bytes: object) -> int:
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        if not code:
            return int(self.libc.fallocate(fd, mode, offset, size_bytes))
        ctypes.set_errno(code)
        return -1


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize("want_direct", [True, False])
def test_a_segment_that_cannot_be_allocated_is_filled_by_large_writes_of_zeros(
    bench: StoreBench, want_direct: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "_libc", Kernel(code))
    bench.segment_bytes = 4 << 20
    bench.capacity_bytes = 32 << 20
    disk, sizes = FaultyDisk(), list[int]()
    disk.on_write = lambda buffers, offset: sizes.append(sum(map(len, buffers)))
    store = bench.open_ready(disk, want_direct=want_direct)
    assert sorted(set(sizes)) == [4096, 2 << 20]  # headers, and zeros
    assert store.describe()["fallocate"] == "no: zeros are written"
    keys = make_keys(40)
    assert bench.put(store, keys).successful_keys is None
    assert bench.get(store, keys) == set(keys)
    bench.wait_until_ready(store)
    assert store.stats()["io_errors_total"] == 0
    assert all(each.stat().st_blocks * 512 >= each.stat().st_size == bench.segment_bytes for each in bench.segments)


def test_a_signal_only_interrupts_an_allocation(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "_libc", Kernel(errno.EINTR, errno.EINTR, 0))
    store = bench.open_ready()
    assert "fallocate" not in store.describe()
    assert store.stats()["io_errors_total"] == 0


def test_a_store_that_waits_for_an_allocation_says_so(bench: StoreBench, gate: Gate) -> None:
    disk = FaultyDisk()
    disk.on_allocate = gate.pass_through
    gate.close()
    store = bench.open(disk, room_timeout_s=0.0)
    bench.wait_until(lambda: gate.waiting)
    assert bench.put(store, make_keys(3)).reason == "allocating"
    assert "a segment of 256KiB is being allocated for" in str(store.describe()["warning"])
    gate.open()
    bench.wait_until_ready(store)
    assert bench.put(store, make_keys(3)).successful_keys is None
    bench.wait_until_ready(store)
    assert "warning" not in store.describe()


@pytest.mark.parametrize(
    ("alignment", "shown"),
    [
        (DirectAlignment(0, 0), "no: the file system buffers all transfers"),
        (DirectAlignment(4, 16384), "no: the device takes multiples of 16384 bytes only"),
        (DirectAlignment(4, 512), "yes"),
        (None, "yes"),
    ],
)
def test_direct_io_is_what_the_kernel_says_of_it(
    bench: StoreBench, alignment: DirectAlignment | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv_nvme.direct.direct_alignment", lambda fd: alignment)
    store = bench.open_ready()
    assert str(store.describe()["direct_io"]).startswith(shown)
    descriptors = [segment.fd for segment in store.pool.segments.values()]
    flags = [int(line.split()[1], 8) for fd in descriptors for line in _fdinfo(fd) if line.startswith("flags:")]
    assert all(bool(each & os.O_DIRECT) == (shown == "yes") for each in flags)


def _fdinfo(fd: int) -> list[str]:
    return Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()


def test_a_mount_that_the_system_does_not_list_is_unknown_and_the_directory_is_used(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below the root directory of a process, where that is no mount itself; or the one of a file in memory."""
    fd = os.memfd_create("unlisted")
    assert mount_of(fd) is None
    monkeypatch.setattr("tiered_kv_nvme.directory.mount_of", lambda _: mount_of(fd))
    assert bench.open_ready().describe()
    bench.close()
    os.close(fd)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory on a mounted tmpfs."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        fd = os.open(folder, os.O_RDONLY)
        mount = mount_of(fd)
        os.close(fd)
        if mount is None or mount.kind != "tmpfs" or mount.point != str(SHM):
            pytest.skip("no tmpfs is mounted at /dev/shm")
        yield Path(folder)


def test_a_page_cache_that_is_used_all_the_same_is_seen(bench: StoreBench, in_memory: Path) -> None:
    bench.path = in_memory / "kv"
    described = bench.open().describe()
    assert described["direct_io"] == "no: a page written with O_DIRECT is in the page cache"
    assert str(described["file_system"]).startswith("tmpfs at /dev/shm")
    bench.close()


@pytest.mark.parametrize("kind", ["nvme", "fs"])
def test_a_directory_that_is_made_is_named_once(kind: str, place_of: PlaceOf) -> None:
    place = place_of(kind)
    place.path = place.path / "mount" / "kv"
    place.entry["path"] = str(place.path)
    for is_first in (True, False):
        rig = place.open()
        described = rig.tier.describe()
        assert described.get("made", "") == (f"{place.folder}/kv was missing, and is made now" if is_first else "")
        with opened(str(place.path), os.O_RDONLY) as fd:
            assert described.get("file_system") == (str(mount) if (mount := mount_of(fd)) else None)
        rig.close()


@pytest.mark.parametrize("kind", ["nvme", "fs"])
def test_a_directory_is_neither_made_nor_opened_without_its_mount(kind: str, place_of: PlaceOf) -> None:
    place = place_of(kind)
    for point, found in (("", "it is a directory of "), ("/absent", "there is no such directory")):
        place.entry["path"] = f"{place.folder}{point}/kv"
        place.entry["required_mount"] = f"{place.folder}{point}"
        with pytest.raises(TierUnavailableError, match=f"nothing is mounted at {place.folder}{point}: {found}"):
            place.open()
    assert not [*place.folder.iterdir()]
    place.entry["required_mount"] = "/"
    place.open()
    place.entry["required_mount"] = f"{place.folder}/kv/below"
    with pytest.raises(ConfigError, match="required_mount at or above path"):
        place.open()


def test_a_directory_is_not_made_again_without_its_mount(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv_nvme.reclaimer._WATCH_S", 3600.0)
    store = bench.open_ready(required_mount="/")
    shutil.rmtree(bench.path)
    monkeypatch.setattr(
        "tiered_kv.toolkit.claimed.mount_of", lambda fd: Mount("/elsewhere", "disk", "ext4", frozenset())
    )
    with pytest.raises(TierUnavailableError, match="nothing is mounted at /"):
        store._remake()
    assert not bench.path.exists()


def test_a_file_system_without_modes_is_refused_with_the_setting_that_accepts_it(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs answers fchmod(2) with ENOENT."""
    bench.path.mkdir(0o750)
    monkeypatch.setattr("os.fchmod", lambda fd, mode: _raise(errno.ENOENT))
    with pytest.raises(ConfigError, match=r"found .* with mode 0750, which its file system does not .*private: false"):
        bench.open()
    store = bench.open(private=False)
    assert bench.put(store, make_keys(3)).successful_keys is None
    store.close()
    bench.path.chmod(0o700)
    (bench.path / "epoch").chmod(0o644)
    with pytest.raises(TierUnavailableError, match=r"epoch has mode 0644, which .*; or set `private: false`"):
        bench.open()


def test_a_file_system_that_writes_from_front_to_back_only_is_named(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rclone mount without a cache of writes."""
    monkeypatch.setattr("tiered_kv_nvme.epoch.Disk.fallocate", lambda *_: _raise(errno.ESPIPE))
    with pytest.raises(TierUnavailableError, match="only written front to back; mount it with a cache of writes"):
        bench.open()


def _raise(code: int) -> None:
    raise OSError(code, os.strerror(code))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "shown"),
    [
        ("ext4", "", {"direct_io": "yes"}),
        ("ext4", "data=journal", {"direct_io": "no: the file system buffers"}),
        ("xfs", "", {"direct_io": "yes"}),
        ("tmpfs", "", {"direct_io": "no: a page written with O_DIRECT is in the page cache"}),
        ("bindfs", "", {"direct_io": "no: the program of this FUSE", "fallocate": "no: zeros are written"}),
    ],
)
def test_check_shows_what_a_file_system_does(kind: str, options: str, shown: dict[str, str], tmp_path: Path) -> None:
    if missing := missing_for(kind):
        pytest.skip(missing)
    details = checked(kind, options, tmp_path)["details"]
    assert f"at {tmp_path}/mount" in details["file_system"]
    for name, text in shown.items():
        assert details[name].startswith(text)


def checked(kind: str, options: str, folder: Path, more: str = "") -> dict[str, Any]:
    """Return what `check` finds of an nvme tier on a new file system."""
    tier = f"type: nvme, path: {folder}/mount/kv, required_mount: {folder}/mount, capacity: 64MiB{more}"
    command = [sys.executable, "-m", "tiered_kv", "check", "--json", stack_file(folder, tier)]
    done = subprocess.run(command_on(kind, options, folder, command), capture_output=True, text=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)["tiers"][1]
    assert found["ok"], found["error"]
    return found
