"""The engines of `host_scale.py`, run with the Python of the build to measure: it imports only that build's package.

    PYTHON tests/performance/host_scale_client.py engines|crowd|fill|ping|reset SOCKET NUMBER

It prints a line of JSON when it is ready, waits for a line, and prints its figures: times in milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.server import protocol
from tiered_kv.server.attach import Attachment
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.protocol import Hello

BATCH, KEYS, ACTIVE, STEPS = 256, 512, 10, 1000
CROWD_KEYS = 64
PING_PAUSE_S = 0.002
WAIT_S = 60.0


class Clock:
    """Times an answer of a server, also without what both main threads stood ready in the run queue."""

    def __init__(self, sock: socket.socket) -> None:
        server, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._processes = (server, os.getpid())
        self._queued_s = self._run_queue_s()
        self._began_s = time.perf_counter()

    def ms(self) -> float:
        return (time.perf_counter() - self._began_s) * 1e3

    def alone_ms(self) -> float:
        return max(0.0, self.ms() - (self._run_queue_s() - self._queued_s) * 1e3)

    def _run_queue_s(self) -> float:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in self._processes) * 1e-9


class Client:
    """A connection without an engine's manager."""

    def __init__(self, path: str, name: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                self.sock.connect(path)
                break
            except BlockingIOError:
                assert time.monotonic() < end_s
        self.sock.settimeout(WAIT_S)
        self.send(protocol.HELLO, body=protocol.to_json(Hello(name, "scheduler")))
        _packet, fds, _flags, _address = socket.recv_fds(self.sock, 1 << 16, 3)
        for fd in fds:
            os.close(fd)

    def send(self, code: int, number: int = 0, count: int = 0, body: bytes = b"", flags: int = 0) -> None:
        self.sock.send(protocol.HEADER.pack(code, flags, count, number, len(body)) + body)

    def wait(self, code: int, number: int | None = None) -> None:
        while True:
            for each in protocol.messages_of(memoryview(self.sock.recv(1 << 16))):
                if each.code == code and number in (None, each.number):
                    return

    def ping_ms(self, number: int) -> tuple[float, float]:
        """Return how long the answer to a PING takes: by the clock, and without the run queue."""
        clock = Clock(self.sock)
        self.send(protocol.PING, number)
        self.wait(protocol.PONG, number)
        return clock.ms(), clock.alone_ms()


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def attached(path: str, name: str) -> AttachedManager:
    attachment = Attachment(f"unix:{path}", Hello(name, "scheduler"), maps_rows=False)
    assert attachment.connect()
    return AttachedManager(attachment)


def store(manager: AttachedManager, keys: Sequence[OffloadKey]) -> None:
    context = ReqContext(f"store-{keys[0].hex()}")
    manager.on_new_request(context)
    while (output := manager.prepare_store(keys, context)) is None:
        manager.on_schedule_end()
        time.sleep(0.0002)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    manager.on_schedule_end()


def say(figures: dict[str, float]) -> None:
    print(json.dumps(figures), flush=True)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "max": ordered[-1],
    }


def engines(path: str, count: int) -> None:
    """Connect engines one after another; then a few of them take steps, and the others none."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    managers = [attached(path, f"engine-{number}") for number in range(count)]
    say({"connect_s": time.perf_counter() - began_s, "connect_cpu_s": time.process_time() - began_cpu_s})
    sys.stdin.readline()
    keys = [key_of(number) for number in range(KEYS)]
    for at in range(0, KEYS, BATCH):
        store(managers[0], keys[at : at + BATCH])
    taken = []
    for number in range(STEPS):
        manager, context = managers[number % ACTIVE], ReqContext(f"request-{number}")
        assert manager.link is not None
        clock = Clock(manager.link.channel.sock)
        manager.on_new_request(context)
        manager.prefetch(keys, context)
        while not manager.lookup_many(keys, context)[-1]:
            select.select([manager.link.channel.sock], [], [], WAIT_S)
            manager.poll()
        manager.on_request_finished(context)
        manager.on_schedule_end()
        taken.append(clock.ms())
    say({f"step_{name}_ms": value for name, value in percentiles(taken).items()})
    for manager in managers:
        manager.shutdown()


def crowd(path: str, count: int) -> None:
    """Processes that lease and have rows, and are killed at once."""
    keys = [key_of(number) for number in range(CROWD_KEYS)]
    store(attached(path, "first"), keys)
    children = []
    for number in range(count):
        reader, writer = os.pipe()
        child = os.fork()  # noqa: TID251 (it ends by a kill)
        if not child:
            client = Client(path, f"crowd-{number}")
            client.send(protocol.GRANT, 4)
            client.send(protocol.BEGIN, 1, body=protocol.pack_begun(0, "request", None))
            client.send(protocol.ACQUIRE, 1, CROWD_KEYS, b"".join(keys), protocol.AHEAD)
            client.wait(protocol.ANSWER, 1)
            os.write(writer, b"1")
            signal.pause()
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        children.append(child)
    say({})
    sys.stdin.readline()
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    say({})


def fill(path: str, rows: int) -> None:
    """Store half as many blocks again as there are rows: the last ones evict others."""
    manager = attached(path, "filler")
    say({})
    sys.stdin.readline()
    for name, first, end in (("fill", 0, rows), ("evict", rows, rows + rows // 2)):
        began_s = time.perf_counter()
        for at in range(first, end, BATCH):
            store(manager, [key_of(number) for number in range(at, min(at + BATCH, end))])
        Client(path, f"{name}-end").ping_ms(1)
        say({f"{name}_rows_per_s": (end - first) / (time.perf_counter() - began_s)})
        sys.stdin.readline()


def ping(path: str, _: int) -> None:
    """Ping until a line comes."""
    client = Client(path, "pinging")
    say({})
    taken: list[tuple[float, float]] = []
    while not select.select([sys.stdin], [], [], PING_PAUSE_S)[0]:
        taken.append(client.ping_ms(len(taken) + 1))
    wall, alone = zip(*taken, strict=True)
    figures = {f"ping_{name}_ms": value for name, value in percentiles(wall).items()}
    say({**figures, "ping_alone_max_ms": max(alone)})


def reset(path: str, _: int) -> None:
    client = Client(path, "resetting")
    say({})
    sys.stdin.readline()
    clock = Clock(client.sock)
    client.send(protocol.RESET)
    client.wait(protocol.EPOCH)
    say({"reset_ms": clock.ms()})


if __name__ == "__main__":
    {each.__name__: each for each in (engines, crowd, fill, ping, reset)}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
