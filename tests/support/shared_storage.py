"""A storage that tiers of one kind share: a directory, a redis-server, or a small S3; and its stored bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.doors import FsDoor, RedisDoor
from tests.support.entries import NAMESPACE, rig_of
from tests.support.fake_s3 import FakeS3
from tests.support.redis_servers import PATIENT, RedisServer
from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import TierRig, compressible_content
from tiered_kv.toolkit.record import digest_of

BLOCK_BYTES = 4096
KINDS = ("fs", "redis", "s3", "s3 that remembers")
"""The last has a presence cache."""
_USER, _PASSWORD = "tier", "to-be-seen"


class FakeS3Door:
    def __init__(self, server: FakeS3) -> None:
        self._objects = server.objects

    def name_of(self, key: OffloadKey) -> str | None:
        return next((name for name in self._objects if name.endswith(f"/{digest_of(key).hex()}")), None)

    def read(self, key: OffloadKey) -> bytes | None:
        return self._objects.get(self.name_of(key) or "")

    def write(self, key: OffloadKey, data: bytes) -> None:
        self._objects[self.name_of(key) or ""] = data


@dataclass
class SharedStorage:
    """Opens tiers on one storage; they are closed at the end of the test."""

    kind: str
    entry: dict[str, object]
    door: FsDoor | RedisDoor | FakeS3Door
    read_mark: Callable[[], bytes | None]  # of the epoch; None where there is none
    write_mark: Callable[[bytes | None], object]
    refuse_deletions: Callable[[], object]
    closing: ExitStack

    def open(self, settings: Mapping[str, object] | None = None, *, block_bytes: int = BLOCK_BYTES) -> TierRig:
        entry = {**self.entry, **(settings or {})}
        rig = rig_of(entry, block_bytes=block_bytes, num_blocks=64, content=compressible_content)
        self.closing.callback(rig.close)
        return rig


@pytest.fixture(params=KINDS)
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> SharedStorage:
    """A storage of each kind; a test may name one by `parametrize(..., indirect=True)`."""
    kind = str(request.param)
    if kind == "fs":
        return _directory(tmp_path / "kv", closing, monkeypatch)
    if kind == "redis":
        return _redis(request.getfixturevalue("redis_server"), closing)
    pytest.importorskip("boto3", reason="boto3 is not installed")
    return _bucket(closing.enter_context(FakeS3()), closing, kind)


def _directory(path: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> SharedStorage:
    mark = path / NAMESPACE.hex() / "epoch"

    def refuse(name: str, **options: int) -> None:
        raise PermissionError(1, "Operation not permitted", name)

    return SharedStorage(
        "fs",
        {"type": "fs", "path": str(path), "capacity": "64MiB"},
        FsDoor(path, NAMESPACE),
        lambda: mark.read_bytes() if mark.exists() else None,
        lambda data: mark.unlink() if data is None else mark.write_bytes(data),
        lambda: monkeypatch.setattr("os.unlink", refuse),
        closing,
    )


def _redis(server: RedisServer, closing: ExitStack) -> SharedStorage:
    pytest.importorskip("redis", reason="redis-py is not installed")
    server.call("ACL", "SETUSER", _USER, "reset", "on", f">{_PASSWORD}", "~*", "+@all")
    mark = f"tkv1:{NAMESPACE.hex()}:epoch".encode()
    return SharedStorage(
        "redis",
        {"type": "redis", **PATIENT, "url": server.url, "username": _USER, "password": _PASSWORD},
        RedisDoor(server, NAMESPACE),
        lambda: server.get(mark) if mark in server.keys("*") else None,
        lambda data: server.call("DEL", mark) if data is None else server.set(mark, data),
        lambda: server.call("ACL", "SETUSER", _USER, "-unlink", "-del"),
        closing,
    )


def _bucket(server: FakeS3, closing: ExitStack, kind: str) -> SharedStorage:
    server.has_mark = False  # the tier writes it

    def name_of_mark() -> str:
        return next((name for name in server.objects if name.endswith("/epoch")), "")

    def write_mark(data: bytes | None) -> None:
        if data is None:
            del server.objects[name_of_mark()]
        else:
            server.objects[name_of_mark()] = data

    remembers = {"presence_ttl": "1h"} if "remembers" in kind else {}
    return SharedStorage(
        kind,
        {**server.entry, "request_timeout": "60s", **remembers},
        FakeS3Door(server),
        lambda: server.objects.get(name_of_mark()),
        write_mark,
        lambda: server.always.update(DELETE="denied"),
        closing,
    )
