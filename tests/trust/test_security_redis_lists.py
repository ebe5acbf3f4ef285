"""A Redis that lies in lists, of names or of slots, takes little memory, stops no thread, and is counted."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.cli import main
from tiered_kv.stack import open_stack
from tiered_kv.testing.lying_redis import LyingRedis
from tiered_kv.testing.tenants import Tenant, UnseenStorage

pytest.importorskip("redis", reason="redis-py is not installed")

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

PEAK_BYTES = 48 << 20
SENT_BYTES_MAX = 256 << 20
"""After which the server itself has had enough, so that a test that fails ends."""
BLOCKS = 4
NAME = b"$1000000\r\n" + b"x" * 1_000_000 + b"\r\n"
SHORT_NAME = b"$1\r\nx\r\n"
LISTS = {
    "names of a megabyte": (b"*2\r\n$1\r\n7\r\n*65000\r\n", NAME),
    "names of a byte": (b"*2\r\n$1\r\n7\r\n*5000000\r\n", SHORT_NAME * 10_000),
    "lists of short names": (b"*65000\r\n", b"*65000\r\n" + SHORT_NAME * 65_000),
}

Answer = Callable[[list[bytes]], Iterable[bytes]]


def elsewhere(folder: Path, entry: dict[str, Any]) -> UnseenStorage:
    """Return the storage of a tier whose server is made up."""
    return UnseenStorage(folder, {"type": "redis", "job_timeout": "10s", **entry})


@pytest.fixture
def start() -> Iterator[Callable[[Answer], LyingRedis]]:
    servers: list[LyingRedis] = []

    def start_one(answer: Answer) -> LyingRedis:
        servers.append(LyingRedis(answer))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Return how many bytes of objects there were at most that the test made."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    yield lambda: tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()


def endless_names(form: str) -> Iterator[bytes]:
    head, piece = LISTS[form]
    yield head
    for _ in range(SENT_BYTES_MAX // len(piece)):
        yield piece


@pytest.mark.parametrize("form", LISTS)
def test_a_purge_s_names(
    form: str, start: Callable[[Answer], LyingRedis], traced: Callable[[], int], tmp_path: Path
) -> None:
    server = start(lambda command: endless_names(form) if command[0] == b"SCAN" else [b"+OK\r\n"])
    tenant = Tenant("alice", elsewhere(tmp_path, {"url": f"redis://{server.address}"}))
    assert main(["purge", str(tenant.file), "--yes", "--timeout", "30s"]) == 1
    assert main(["purge", str(tenant.file), "--yes", "--timeout", "30s", "--tenant", "alice"]) == 1
    assert traced() < PEAK_BYTES


def test_a_cluster_s_slots(
    start: Callable[[Answer], LyingRedis], traced: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reply of fifty bytes: twenty million slots."""
    asked = threading.Event()

    def answer(command: list[bytes]) -> Iterator[bytes]:
        if command[0] == b"CLUSTER":
            asked.set()
            yield b"*1\r\n*3\r\n:0\r\n:20000000\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % server.port
        else:
            yield b"+OK\r\n"

    server = start(answer)
    # A connection that is late would be counted as that, and not as what the server says.
    patient = {"connect_timeout": "30s", "timeout": "30s", "job_timeout": "60s"}
    tenant = Tenant("alice", elsewhere(tmp_path, {"mode": "cluster", "nodes": [server.address], **patient}))
    with open_stack(tenant.file) as stack:
        assert tenant.put(stack, tenant.keys(BLOCKS)) == 0
        assert tenant.wrong(stack, tenant.keys(BLOCKS, 100)) == (0, 0)
        counted = stack.counters()["redis"]
        assert counted["failed_stores_protocol"] == BLOCKS
    assert asked.is_set()
    assert main(["check", str(tenant.file)]) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert traced() < PEAK_BYTES


def test_a_server_that_sends_a_name_at_a_time_is_not_waited_for(
    start: Callable[[Answer], LyingRedis], traced: Callable[[], int], tmp_path: Path
) -> None:
    """Pages that have no end: each is small, and there is always another."""

    def answer(command: list[bytes]) -> Iterator[bytes]:
        if command[0] == b"SCAN":
            cursor = b"%d" % (int(command[1]) + 1)
            yield b"*2\r\n$%d\r\n%b\r\n*50\r\n" % (len(cursor), cursor)
            for number in range(50):
                name = b"tkv1:%032x:namespace" % (50 * int(command[1]) + number)
                yield b"$%d\r\n%b\r\n" % (len(name), name)
        else:
            yield b"+OK\r\n"

    server = start(answer)
    tenant = Tenant("alice", elsewhere(tmp_path, {"url": f"redis://{server.address}"}))
    begin = time.monotonic()
    assert main(["purge", str(tenant.file), "--yes", "--timeout", "3s", "--tenant", "alice"]) == 1
    assert time.monotonic() - begin < 60.0
    assert traced() < PEAK_BYTES
