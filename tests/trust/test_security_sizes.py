"""Every input has a size limit: a gigabyte is refused, and never read into memory.

The files are sparse, so a gigabyte takes no room on the disk.
"""

from __future__ import annotations

import os
import re
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.loopback import LoopbackServer
from tests.support.places import Place, PlaceOf
from tests.support.redis_servers import RedisServer
from tests.support.s3_servers import REGION, S3Server, missing_for_moto
from tests.support.tenants import Tenant
from tiered_kv.cli.main import main
from tiered_kv.config.secrets import read_key_file
from tiered_kv.config.stack_config import load_config
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.stack.open import open_stack
from tiered_kv.workload.trace import read_trace

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

HUGE_BYTES = 1 << 30
LARGE_BYTES = 64 << 20
"""Of what a real server has to be sent first."""
PEAK_BYTES = 48 << 20
BLOCKS = 4


@pytest.fixture(scope="module", autouse=True)
def _servers(request: pytest.FixtureRequest) -> None:
    """Start the session's server, and import its client, before a test measures memory."""
    if not missing_for_moto():
        server: S3Server = request.getfixturevalue("moto_server")
        server.client().close()


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail if the block allocates more than `PEAK_BYTES` at a time."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < PEAK_BYTES


def grow(path: Path, size_bytes: int = HUGE_BYTES) -> None:
    os.truncate(path, size_bytes)


def test_the_measure_finds_what_is_too_much(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    grow(path, 2 * PEAK_BYTES)
    with pytest.raises(AssertionError), little_memory():
        path.read_bytes()


READERS: dict[str, tuple[bytes, Callable[[Path], object], str]] = {
    "a stack's file": (b"version: 1\n", load_config, "at most 1MiB"),
    "a line of a trace": (b'{"timestamp": 0, "hash_ids": [', lambda path: list(read_trace(path)), "longer than 4MiB"),
    "a key's file": (b"", read_key_file, "larger than"),
}


@pytest.mark.parametrize("what", READERS)
def test_a_file_that_is_named_in_a_command(what: str, tmp_path: Path) -> None:
    begins, read, refusal = READERS[what]
    path = tmp_path / "file"
    path.touch(mode=0o600)
    path.write_bytes(begins)
    grow(path)
    with little_memory(), pytest.raises(ConfigError, match=refusal):
        read(path)


SMALL_FILES = [
    ("nvme", "lock", True),
    ("nvme", "epoch", True),
    ("nvme", "tiered-kv-nvme.json", False),
    ("fs", "tiered-kv-fs.json", False),
    ("fs", "ledger", True),
    ("fs", "sweep", True),
    ("fs", "*/namespace.json", True),
    ("fs", "*/epoch", True),
    ("fs", "lock", True),
]
"""Tier, file, and whether the tier makes do with a huge one."""


@pytest.mark.parametrize(("tier", "name", "opens"), SMALL_FILES)
def test_a_small_file_of_a_directory(tier: str, name: str, opens: bool, tmp_path: Path) -> None:
    tenant = Place(tier, tmp_path).tenant("alice")
    tenant.store(BLOCKS)
    paths = list(tenant.path.glob(name)) or [tenant.path / name]
    paths[0].touch(mode=0o600)
    grow(paths[0])
    with little_memory():
        refusal = ""
        try:
            with open_stack(tenant.file) as stack:
                assert tenant.wrong(stack, tenant.keys(BLOCKS))[1] == 0
        except TieredKVError as error:
            refusal = str(error)
        assert ("cannot be read" in refusal) != opens
        assert main(["purge", str(tenant.file), "--yes"]) in (0, 1)


def test_a_block_s_file(tmp_path: Path) -> None:
    tenant = Place("fs", tmp_path).tenant("alice")
    tenant.store(BLOCKS)
    for path in tenant.path.glob("*/*/*/*"):
        grow(path)
    with little_memory():
        assert tenant.load(BLOCKS) == (0, 0)


def test_a_segment_s_file(tmp_path: Path) -> None:
    tenant = Place("nvme", tmp_path).tenant("alice")
    tenant.store(BLOCKS)
    for path in tenant.path.glob("segment-*"):
        grow(path)
    with little_memory(), open_stack(tenant.file) as stack:
        assert tenant.wrong(stack, tenant.keys(BLOCKS))[1] == 0
    # What a file occupies is counted, not what it says that it is long: the capacity holds all the same.
    assert sum(path.stat().st_blocks * 512 for path in tenant.path.iterdir()) <= 64 << 20


@pytest.mark.parametrize("which", ["block", "epoch", "namespace"])
def test_a_value_in_redis(which: str, redis_server: RedisServer, place_of: PlaceOf) -> None:
    tenant = place_of("redis").tenant("alice")
    tenant.store(BLOCKS)
    prefix = f"tkv1:{tenant.digest}:"
    names = [name for name in redis_server.keys(f"{prefix}*") if re.match(rf"{prefix}[0-9a-f]{{16}}:".encode(), name)]
    for name in names if which == "block" else [f"{prefix}{which}".encode()]:
        assert redis_server.call("SETRANGE", name, str(LARGE_BYTES), b"x").startswith(b":")
    with little_memory():
        came, wrong = tenant.load(BLOCKS)
        assert wrong == 0
        assert came == (BLOCKS if which == "namespace" else 0)
        assert main(["purge", str(tenant.file), "--yes"]) == 0


@pytest.mark.parametrize("which", ["blocks/", "epoch", "namespace.json"])
def test_an_object_in_a_bucket(which: str, place_of: PlaceOf) -> None:
    place = place_of("s3")
    tenant = place.tenant("alice")
    tenant.store(BLOCKS)
    client = place.s3.client()
    root = f"kv/{tenant.digest}/"
    listed = client.list_objects_v2(Bucket=place.bucket, Prefix=f"{root}{which}").get("Contents", ())
    body = bytes(LARGE_BYTES)
    for name in [entry["Key"] for entry in listed][:2] or [f"{root}{which}"]:
        client.put_object(Bucket=place.bucket, Key=name, Body=body)
    client.close()
    del body
    with little_memory():
        _, wrong = tenant.load(BLOCKS)
        assert wrong == 0
        assert main(["purge", str(tenant.file), "--yes"]) == 0


class EndlessServer(LoopbackServer):
    """Answers each request with `head`, and then with `filler` until the client closes the connection."""

    def __init__(self, head: bytes, filler: bytes) -> None:
        self._head, self._filler = head, filler * (65536 // len(filler))
        self.sent_bytes = 0
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        with sock:
            sock.recv(65536)
            sock.sendall(self._head)
            while True:
                sock.sendall(self._filler)
                self.sent_bytes += len(self._filler)


ENDLESS_HTTP = {
    "a body of 100 MiB": (b"HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n", b"<Key>x</Key>"),
    "an error of 100 MiB": (b"HTTP/1.1 500 No\r\nContent-Length: 104857600\r\n\r\n", b"<Code>x</Code>"),
    "chunks without an end": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"4\r\nabcd\r\n"),
    "a chunk of four gigabytes": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", b"x"),
    "a header without an end": (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "headers without an end": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "interim answers without an end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "no HTTP at all": (b"", b"\0"),
}
"""100 MiB, because a reader that allocates so much succeeds, and is found."""


@pytest.mark.parametrize("form", ENDLESS_HTTP)
def test_an_s3_server_s_answers(form: str, tmp_path: Path) -> None:
    """Bounded for a running engine; purges and `check` read as boto3 does (docs/explanation/security.md)."""
    with EndlessServer(*ENDLESS_HTTP[form]) as server:
        entry = {"type": "s3", "bucket": "kv-bucket", "region": REGION, "access_key_id": "a", "secret_access_key": "b"}
        entry |= {"endpoint_url": f"http://{server.address}", "job_timeout": "1s", "lookup_timeout": "200ms"}
        tenant = Tenant("alice", tmp_path, {**entry, "attempts": 1, "request_timeout": "400ms"})
        with little_memory(), suppress(TieredKVError), open_stack(tenant.file) as stack:
            tenant.put(stack, tenant.keys(BLOCKS))  # may succeed: the server may report that it stored them
            assert tenant.wrong(stack, tenant.keys(BLOCKS, 100)) == (0, 0)
        assert server.sent_bytes > 0
