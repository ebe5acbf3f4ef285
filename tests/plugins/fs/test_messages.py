"""What an fs tier says of a file system that refuses: the path and the system's word, never a descriptor's number."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from tests.support.entries import OpenRig
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.testing.rig import make_keys
from tiered_kv_fs.locks import locked

BLOCK_BYTES = 4096
CAPACITY_BYTES = 8 << 20
BAD = re.compile(r"\[Errno None\]|\(\d+\)|: \d+$")


def test_a_refused_store_is_described_with_path_and_word_until_one_succeeds(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig()
    assert rig.store(make_keys(1)).success

    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert rig.store(make_keys(1, "refused")).reason == "permission"
    warning = str(rig.tier.describe()["warning"])
    assert f"{os.strerror(errno.EPERM)} (EPERM): {path}/" in warning
    assert rig.store(make_keys(1, "again")).success
    assert "EPERM" not in str(rig.tier.describe())


@pytest.mark.parametrize("name", ["utime", "fstat", "close"])
def test_a_call_on_a_descriptor_that_fails_names_the_file(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    open_rig().close()
    call = getattr(os, name)

    def refuse(where: object, *arguments: object, **more: object) -> object:
        if isinstance(where, int) and os.readlink(f"/proc/self/fd/{where}").endswith("/kv/lock"):
            if name == "close":
                call(where)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), where)
        return call(where, *arguments, **more)

    monkeypatch.setattr(os, name, refuse)
    with pytest.raises(TierUnavailableError) as raised:
        open_rig()
    assert f"{os.strerror(errno.EROFS)} ({path}/lock)" in str(raised.value)
    assert not BAD.search(str(raised.value))


def test_a_lock_that_others_hold_is_named(tmp_path: Path) -> None:
    lock = str(tmp_path / "lock")
    with locked(lock, 1.0), pytest.raises(TimeoutError) as raised, locked(lock, 0.0):
        pass
    assert lock in str(raised.value)
    assert not BAD.search(str(raised.value))


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EPERM, errno.EINVAL])
def test_a_mode_that_the_file_system_does_not_set_is_named_whatever_it_answers(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path.mkdir(mode=0o750)
    path.chmod(0o750)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(ConfigError, match=r"mode 0750.*private: false"):
        open_rig()


@pytest.mark.parametrize(
    ("number", "reason", "remedy"),
    [(errno.EROFS, "read_only", "; mount the file system"), (errno.EIO, "io_error", "; look at the disk")],
)
def test_a_failure_is_explained_with_the_systems_word_and_what_to_do(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, remedy: str
) -> None:
    rig = open_rig()
    assert rig.store(make_keys(1)).success

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert rig.store(make_keys(1, "refused")).reason == reason
    explained = rig.tier.explain_failure(reason)
    assert explained is not None
    assert explained.startswith(f"writing blocks failed: {os.strerror(number)} (")
    assert str(path) in explained
    assert remedy in explained
    assert rig.tier.explain_failure("timeout") is None
