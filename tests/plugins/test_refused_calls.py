"""Whichever call of a directory is refused, messages have the path and the system's word, no descriptor's number."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from tests.support.hanging import CALLS, is_below
from tests.support.tenants import Tenant
from tiered_kv.errors import TieredKVError

BAD = re.compile(r"\[Errno|\(\d+\)|(?:denied|system|error): \d+")


@pytest.mark.one_quick(3)
@pytest.mark.parametrize("kind", ["nvme", "fs"])
@pytest.mark.parametrize("name", [*CALLS, "flock"])
def test_a_refused_call_is_told_with_path_and_word(
    tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tiered_kv_fs.tier._ROOM_TIMEOUT_MAX_S", 0.5)  # or each waits so long for what is refused
    alice = Tenant("alice", tmp_path, {"type": kind, "path": str(tmp_path / "kv"), "capacity": 64 << 20})
    module = fcntl if name == "flock" else os
    call = getattr(module, name)

    def refuse(where: object = ".", *arguments: object, **more: int) -> object:
        if is_below(f"{tmp_path}/kv", where, more.get("dir_fd")):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), where)
        return call(where, *arguments, **more)

    said = ""
    for is_new in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            try:
                alice.store(2)
            except TieredKVError as error:
                said = str(error)
        if is_new:
            alice.store(1)
    texts = [said, *caplog.messages]
    assert not [text for text in texts if BAD.search(text)]
    assert not said or f"{tmp_path}/kv" in said
    assert not said or os.strerror(errno.EACCES) in said or name == "flock"  # as another host's lock on SMB
