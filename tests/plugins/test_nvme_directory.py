"""Whose directory it is: one owner, one format, one namespace, and nobody else's files."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tiered_kv.errors import FormatError, TierBusyError, TierUnavailableError
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.directory import Directory, Identity
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.files import SegmentFiles

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugins.conftest import StoreBench


class FullDisk(Disk):
    def fallocate(self, fd: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "injected")


def rewrite_marker(bench: StoreBench, **changes: object) -> None:
    marker = bench.path / "tiered-kv-nvme.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **changes}))


def test_a_second_owner_in_the_same_process_is_refused(bench: StoreBench) -> None:
    store = bench.open()
    with pytest.raises(TierBusyError, match=r"in use by another tier of this process.*; give each tier"):
        bench.open()
    store.close()
    bench.open()


def test_a_second_process_is_refused_and_told_who_owns_it(bench: StoreBench) -> None:
    bench.open()
    program = (
        "import sys\n"
        "from tiered_kv_nvme.directory import Directory, Identity\n"
        "Directory(sys.argv[1], Identity(bytes(range(16)), {}, 4096), tier='second')\n"
    )
    command = [sys.executable, "-c", program, str(bench.path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode != 0
    assert f"tier 'second' cannot be opened: {bench.path} is in use by process {os.getpid()}" in result.stderr


def test_a_directory_of_another_format_version_is_refused_untouched(bench: StoreBench) -> None:
    store = bench.open()
    keys = make_keys(4)
    bench.put(store, keys)
    store.close()
    rewrite_marker(bench, format=2)
    with pytest.raises(FormatError, match="has format version 2, and this release reads version 1"):
        bench.open()
    rewrite_marker(bench, format=1)
    assert bench.get(bench.open(), keys) == set(keys)


def test_a_directory_of_another_namespace_is_refused_and_says_what_differs(bench: StoreBench) -> None:
    bench.open().close()
    other = Identity(bytes(16), {"model": "other"}, bench.block_bytes)
    with pytest.raises(FormatError, match="model: 'bench' there, 'other' here"):
        Directory(str(bench.path), other)
    nested = Identity(bytes(16), {"model": "bench", "parallel": {"rank": 1}}, bench.block_bytes)
    with pytest.raises(FormatError, match=r"\(parallel: None there, \{'rank': 1\} here\)"):
        Directory(str(bench.path), nested)
    larger = Identity(bench.identity.digest, bench.identity.namespace, 8192)
    with pytest.raises(FormatError, match="block_bytes: 4096 there, 8192 here"):
        Directory(str(bench.path), larger)


def test_of_two_nested_namespaces_only_what_differs_is_shown(tmp_path: Path) -> None:
    def identity(tenant: str, rank: int) -> Identity:
        inner = {"model": "m", "tenant": tenant, "parallel": {"tensor": 2, "rank": rank}}
        return Identity(tenant.encode().ljust(16), {"namespace": inner, "format": 1}, 4096)

    Directory(str(tmp_path / "kv"), identity("default", 0)).close()
    with pytest.raises(FormatError) as caught:
        Directory(str(tmp_path / "kv"), identity("bob", 1))
    assert "(parallel.rank: 0 there, 1 here; tenant: 'default' there, 'bob' here)" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "\x00\xff"])
def test_a_marker_that_cannot_be_read_is_a_clear_error(bench: StoreBench, text: str) -> None:
    bench.open().close()
    (bench.path / "tiered-kv-nvme.json").write_text(text)
    with pytest.raises(FormatError, match="cannot be read"):
        bench.open()


def test_somebody_elses_directory_is_refused_untouched(bench: StoreBench) -> None:
    bench.path.mkdir()
    (bench.path / "thesis.tex").write_text("ten years")
    with pytest.raises(FormatError, match=r"not empty and not a directory of this tier \(it holds 'thesis.tex'\)"):
        bench.open()
    assert os.listdir(bench.path) == ["thesis.tex"]


def test_foreign_files_are_left_alone_and_count_against_the_capacity(bench: StoreBench) -> None:
    bench.open().close()
    foreign = bench.path / "core.1234"
    foreign.write_bytes(bytes(2 << 20))
    nested = bench.path / "backup"
    nested.mkdir()
    (nested / "old.kv").write_bytes(bytes(1 << 20))
    store = bench.open()
    assert store.describe()["foreign_files"] == 2
    for number in range(12):
        bench.put(store, make_keys(50, f"batch {number}"))
    assert store.stats()["reclaimed_segments_total"] > 0
    occupied = bench.occupied_bytes() + (nested / "old.kv").stat().st_blocks * 512
    assert occupied <= bench.capacity_bytes
    store.close()
    assert foreign.stat().st_size == 2 << 20
    assert (nested / "old.kv").exists()


def test_a_segment_of_another_namespace_is_foreign(bench: StoreBench) -> None:
    bench.open().close()
    other = bench.path / "segment-ffffffff-000000.kv"
    other.write_bytes(bytes(4096))
    assert bench.open().describe()["foreign_files"] == 1
    assert other.exists()


def test_what_a_crash_left_while_the_directory_was_made_is_tolerated(bench: StoreBench) -> None:
    bench.path.mkdir(mode=0o700)
    (bench.path / "lock").write_text("1\n")
    (bench.path / "tiered-kv-nvme.json.tmp").write_text("{")
    (bench.path / "probe.tmp").write_bytes(bytes(4096))
    (bench.path / "lost+found").mkdir()
    bench.open()
    assert not (bench.path / "probe.tmp").exists()
    assert not (bench.path / "tiered-kv-nvme.json.tmp").exists()


def test_nobody_else_can_read_what_is_stored(bench: StoreBench) -> None:
    store = bench.open()
    bench.put(store, make_keys(4))
    assert stat.S_IMODE(bench.path.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in bench.path.iterdir()}
    assert modes == {0o600}


def test_a_symbolic_link_in_place_of_a_segment_is_not_followed(bench: StoreBench, tmp_path: Path) -> None:
    store = bench.open()
    bench.wait_until_ready(store)  # there is a segment then
    store.close()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    segment = bench.segments[0]
    segment.unlink()
    segment.symlink_to(victim)
    store = bench.open()
    assert store.stats()["discarded_segments_total"] == 1
    bench.put(store, make_keys(100))
    store.close()
    assert victim.read_text() == "precious"


def test_a_path_that_is_no_directory_is_a_clear_error(bench: StoreBench) -> None:
    bench.path.write_text("a file")
    with pytest.raises(TierUnavailableError, match="kv is a file; give a directory"):
        bench.open()


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free some space on its disk"), (errno.EACCES, "make it writable")]
)
def test_a_directory_that_cannot_be_made_ready_says_what_to_do(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def fail(directory: Directory) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "_write_marker", fail)
        with pytest.raises(TierUnavailableError, match=f"{os.strerror(code)}; {remedy}"):
            bench.open()


def test_a_capacity_that_the_disk_cannot_give_is_told(bench: StoreBench) -> None:
    store = bench.open()
    described = store.describe()
    assert isinstance(described["free_bytes"], int)
    assert "warning" not in described
    store.close()
    bench.capacity_bytes, bench.segment_bytes = 1 << 60, None
    bench.path = bench.path.with_name("larger")
    described = bench.open(FullDisk()).describe()
    assert "of the capacity can be had" in str(described["warning"])


def test_a_path_may_be_relative_or_begin_with_a_tilde(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(bench.path.parent))
    directory = Directory("~/kv", bench.identity)
    assert directory.path == str(bench.path)
    directory.close()


def test_segments_that_cannot_be_opened_are_not_deleted(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = bench.open()
    keys = make_keys(150)
    bench.put(store, keys)
    store.close()

    def too_many(files: SegmentFiles, slot: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentFiles, "open", too_many)
        with pytest.raises(TierUnavailableError, match="cannot be opened: Too many open files"):
            bench.open()
    assert bench.get(bench.open(), keys) == set(keys)


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
def test_a_lock_that_cannot_be_signed_is_given_back(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(TierUnavailableError, match="free some space"):
            Directory(str(bench.path), bench.identity)
    Directory(str(bench.path), bench.identity).close()


def test_a_file_that_vanishes_from_a_foreign_directory_counts_nothing_and_the_others_still_count(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(str(bench.path), bench.identity)
    before_bytes = directory.list().used_bytes
    (bench.path / "backup").mkdir()
    for name in ("gone", "here"):
        (bench.path / "backup" / name).write_bytes(bytes(1 << 20))
    stat_really = os.stat

    def stat_of_what_is_here(path: str, **options: int) -> os.stat_result:
        if path == "gone":
            raise FileNotFoundError(errno.ENOENT, "gone")
        return stat_really(path, **options)  # type: ignore[arg-type]  # as `os.stat`

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat_of_what_is_here)
        added_bytes = directory.list().used_bytes - before_bytes
    directory.close()
    assert 1 << 20 <= added_bytes < 2 << 20
