"""What an fs tier finds out about its mount at the opening, and how it gets along where a rename is refused."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.entries import OpenRig
from tiered_kv.system import file_systems
from tiered_kv.system.file_systems import Mount
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.small_files import put_in_place, read_file, replace_file
from tiered_kv_fs import probe as mount_probe

BLOCK_BYTES = 4096
CAPACITY_BYTES = 8 << 20

replace = os.replace


def is_open(path: str) -> bool:
    """Return whether this process has a file open."""
    fds = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return any(os.path.exists(fd) and os.path.exists(path) and os.path.samefile(fd, path) for fd in fds)


def replace_as_on_smb(source: str, target: str, **options: Any) -> None:
    """Remove an open file in place of replacing it."""
    if is_open(target):
        os.unlink(target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
    replace(source, target, **options)


def test_on_an_ordinary_disk_nothing_is_said_and_nothing_stays(
    open_rig: OpenRig, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig()
    assert "hard_links" not in rig.tier.describe()
    assert not [text for text in caplog.messages if "here" in text]
    assert not list(path.glob(".probe*"))


def test_a_mount_that_cannot_replace_an_open_file_is_told_with_the_way_out_and_stores_go_on(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "replace", replace_as_on_smb)
    rig = open_rig()
    said = "cannot be replaced here (ENOENT)"
    (line,) = [text for text in caplog.messages if said in text]
    assert "NFS" in line
    assert said in str(rig.tier.describe()["warning"])
    assert not list(path.glob(".probe*"))
    keys = make_keys(64)
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)


@pytest.mark.parametrize(("code", "tries"), [(errno.ENOENT, 3), (errno.EACCES, 3), (errno.EBUSY, 1)])
def test_a_small_file_that_others_read_is_replaced_once_they_have_closed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, tries: int
) -> None:
    path, left = str(tmp_path / "epoch"), [tries]

    def refuse(source: str, target: str, **options: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code), source)
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", refuse)
    replace_file(path, b"new")
    assert read_file(path, 100) == b"new"


@pytest.mark.parametrize(("name", "code"), [("missing", errno.ENOENT), ("there", errno.EIO)])
def test_a_rename_that_cannot_succeed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    (tmp_path / "there").touch()
    tried = []

    def refuse(source: str, target: str, **_: Any) -> None:
        tried.append(source)
        raise OSError(code, os.strerror(code), source)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        put_in_place(str(tmp_path / name), str(tmp_path / "target"))
    assert len(tried) == 1


def test_locks_that_do_not_exclude_are_told(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert open_rig().store(make_keys(1)).success
    assert any("flock(2) does not exclude here" in text for text in caplog.messages)


def test_a_mount_without_links_works_and_says_so(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "link", refuse)
    rig = open_rig()
    assert rig.store(make_keys(1)).success
    assert rig.tier.describe()["hard_links"] == "no"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_not_tried(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    call = os.open

    def refuse(name: Any, *arguments: Any, **options: Any) -> int:
        if ".probe." in str(name):
            raise OSError(code, os.strerror(code), name)
        return call(name, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert open_rig().store(make_keys(1)).success


MOUNTED = "rw,vers=4.2,local_lock=none"


@pytest.mark.parametrize(
    ("kind", "options", "host", "said"),
    [
        ("nfs4", MOUNTED, "localhost", ["'localhost', which others may have"]),
        ("nfs4", MOUNTED, "localhost.localdomain", ["which others may have"]),
        ("nfs4", "rw,vers=4.1", "3f2a9c0d1b7e", ["the id of a container"]),
        ("nfs4", MOUNTED, "gpu-17", []),
        ("nfs4", "rw,vers=4.0", "localhost", []),
        ("nfs", "rw,vers=3", "localhost", []),
        ("ext4", "rw", "localhost", []),
        ("nfs", "rw,vers=3,nolock", "gpu-17", ["mounted with nolock"]),
        ("nfs4", "rw,vers=4.2,local_lock=flock", "gpu-17", ["mounted with local_lock=flock"]),
        ("cifs", "rw,nobrl", "gpu-17", ["mounted with nobrl"]),
    ],
)
def test_a_mount_whose_locks_other_hosts_may_not_see_is_told_at_the_opening(
    open_rig: OpenRig,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    options: str,
    host: str,
    said: list[str],
) -> None:
    mount = Mount(str(path.parent), "server:/export", kind, frozenset(options.split(",")))
    monkeypatch.setattr(mount_probe, "mount_of", lambda _: mount)
    monkeypatch.setattr(file_systems, "_NFS_NAMES", (str(path.parent / "id"),))
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", host, "6.12", "", "x86_64")))
    warning = str(open_rig().tier.describe().get("warning", ""))
    assert [text for text in said if text in warning] == said
    assert bool(warning) == bool(said)
    if "vers=4.2" in options and host == "localhost":
        assert "nfs4_unique_id" in warning
        (path.parent / "id").write_text("a-name-of-its-own\n")
        assert "warning" not in open_rig().tier.describe()


def test_the_probe_makes_few_calls(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **options: Any) -> Any:
            if any(".probe." in str(each) for each in arguments):
                asked.append(name)
            return call(*arguments, **options)

        return ask

    for name in ("open", "replace", "link", "unlink", "lstat", "stat"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    open_rig()
    assert 0 < len(asked) <= 10
