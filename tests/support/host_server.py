"""A host's server on a thread of the test's process, and engines that attach to it."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.server import idle, protocol, served_stack
from tiered_kv.server.attach import Attachment
from tiered_kv.server.connect import ProgramManager
from tiered_kv.server.memory import SealedRegion
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.protocol import Hello
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.server.server import CacheServer, listen
from tiered_kv.testing.control import wait_until

if TYPE_CHECKING:  # programs of engines have no pytest
    import pytest

BLOCK_BYTES = 4096
WAIT_S = 20.0
_numbers = itertools.count()


def stack_of(rows: int = 256, **more: object) -> dict[str, object]:
    """Return the file of a stack with `rows` rows."""
    return {
        "namespace": {"model": "test"},
        "block": {"bytes": BLOCK_BYTES},
        "primary": {"capacity": rows * BLOCK_BYTES},
        **more,
    }


def keys_of(count: int, first: int = 0) -> list[OffloadKey]:
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(first, first + count)]


def content_of(key: OffloadKey) -> bytes:
    return (key * (BLOCK_BYTES // len(key) + 1))[:BLOCK_BYTES]


@contextmanager
def serving(
    directory: Path,
    stack: dict[str, object] | None = None,
    namespaces: int = 1,
    *,
    never_ends: bool = False,
    answer_s: float = WAIT_S / 2,
) -> Iterator[Served]:
    """Serve a stack at `directory`/cache.sock.

    With `never_ends` no process of a client ends: it is the test's own. A client waits for `answer_s` for each answer,
    longer than by default: a busy machine must not turn hits into misses.
    """
    path = directory / "cache.sock"
    opened = Namespaces(stack or stack_of(), namespaces)
    opened.socket_path = path
    opened.open_own()
    server = CacheServer(listen(path), opened, pidfd_of=(lambda *_: os.eventfd(0)) if never_ends else None)
    thread = threading.Thread(target=server.serve)
    thread.start()
    served = Served(f"unix:{path}", server, opened)
    try:
        with mock.patch.object(served_stack, "ANSWER_S", answer_s):
            yield served
    finally:
        for engine in served.engines:
            engine.close()
        server.stop()
        thread.join()


@contextmanager
def server_process(
    directory: Path,
    stack: Mapping[str, object] | None = None,
    answer_s: float = served_stack.ANSWER_S,
    **more: object,
) -> Iterator[subprocess.Popen[str]]:
    """Serve a stack at `directory`/cache.sock in a process of its own, which is killed at the end.

    Clients wait for `answer_s` for each answer: on a busy machine a shorter wait makes blocks misses.
    """
    file = directory / "stack.yaml"
    file.write_text(json.dumps(stack or stack_of(**more)))  # type: ignore[arg-type]
    program = (
        "import sys; from tiered_kv.__main__ import main; from tiered_kv.server import served_stack; "
        f"served_stack.ANSWER_S = {answer_s}; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "serve", str(file), "--socket", f"{directory}/cache.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def unmapping_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait until the rows of a dead server are being unmapped, and let that hang meanwhile."""
    begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()
    close = SealedRegion.close

    def close_slowly(region: SealedRegion) -> bool:
        begun.set()
        if not may_end.wait(WAIT_S):
            has_ended.set()
        return close(region)

    with monkeypatch.context() as patch:
        patch.setattr(idle, "_PAUSE_S", 0.01)
        patch.setattr(SealedRegion, "close", close_slowly)
        assert begun.wait(WAIT_S)
        yield
        assert not has_ended.is_set(), "a call has waited"
        may_end.set()


@dataclass
class Served:
    """A server that runs."""

    address: str
    server: CacheServer
    namespaces: Namespaces
    engines: list[Engine] = field(default_factory=list)

    @property
    def host(self) -> ServedStack:
        return self.namespaces.stacks[0]

    def engine(self, name: str = "", **more: Any) -> Engine:  # Any: of `Hello`
        engine = Engine(self.address, name or f"engine-{next(_numbers)}", **more)
        self.engines.append(engine)
        return engine

    def count(self, what: Callable[[ServedStack], int]) -> int:
        """Return a number that the server's thread reads."""
        answer: list[int] = []
        self.server.call_soon(lambda: answer.append(what(self.host)))
        wait_until(lambda: bool(answer))
        return answer[0]

    def disconnect(self, role: str) -> None:
        """Close the connections of processes of a role, which go on."""

        def close() -> None:
            for process in list(self.server._processes.connected.values()):
                if process.hello is not None and process.hello.role == role:
                    self.server._processes.disconnect(process)

        self.server.call_soon(close)

    def rows_in_use(self) -> int:
        """Return how many rows engines have: leased, or granted."""
        return self.count(lambda host: host.leases + host.granted)


def packet(code: int, number: int = 0, count: int = 0, body: bytes = b"", flags: int = 0) -> bytes:
    return protocol.HEADER.pack(code, flags, count, number, len(body)) + body


@contextmanager
def raw_client(served: Served, name: str, role: str | None = "scheduler") -> Iterator[socket.socket]:
    """Connect, and say who one is, unless the role is None; nothing is read after the welcome."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(served.address.removeprefix("unix:"))
        if role is not None:
            sock.send(packet(protocol.HELLO, body=protocol.to_json(Hello(name, role))))
            _, fds, _, _ = socket.recv_fds(sock, 1 << 16, 2)
            for fd in fds:
                os.close(fd)
        yield sock


class Engine:
    """An engine of one process: it stores and loads as a scheduler with its workers does."""

    def __init__(self, address: str, name: str, *, clock: Callable[[], float] = time.monotonic, **more: Any) -> None:
        attachment = Attachment(address, Hello(name, "scheduler", **more))
        attachment.connect()
        self.manager = ProgramManager(attachment, clock=clock)

    def begin(self, name: str = "", **params: object) -> ReqContext:
        context = ReqContext(name or f"request-{next(_numbers)}", dict(params) or None)
        self.manager.on_new_request(context)
        return context

    def end(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end()

    def step_until(self, is_over: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        """End steps until `is_over()`."""
        end_s = time.monotonic() + timeout_s
        while not is_over():
            assert time.monotonic() < end_s, "it takes too long"
            self.manager.on_schedule_end()
            time.sleep(0.0005)

    def store(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> list[OffloadKey]:
        """Store blocks, and return the keys of those that were written."""
        own = context or self.begin()
        outputs: list[Any] = []

        def prepare() -> bool:
            outputs[:] = [self.manager.prepare_store(keys, own)]
            return outputs[0] is not None

        self.step_until(prepare)
        written: list[OffloadKey] = outputs[0].keys_to_store
        for key, row in zip(written, outputs[0].store_spec.block_ids, strict=True):
            self.region_row(row)[:] = bytes(BLOCK_BYTES)  # as a copy that has begun
            self.region_row(row)[:] = content_of(key)
        self.manager.complete_store(written, own)
        if context is None:
            self.end(own)
        self.manager.on_schedule_end()
        return written

    def look_up(self, keys: Sequence[OffloadKey], context: ReqContext) -> int:
        """Return the length of the prefix that is there."""
        answers: list[bool | None] = []

        def ask() -> bool:
            answers[:] = self.manager.lookup_many(keys, context)
            first = answers.index(False) if False in answers else len(answers)
            return None not in answers[:first]

        self.step_until(ask)
        return answers.index(False) if False in answers else len(answers)

    def load(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> int:
        """Load the prefix that is there, check its bytes, and return its length."""
        own = context or self.begin()
        found = self.look_up(keys, own)
        if found:
            spec = self.manager.prepare_load(keys[:found], own)
            for key, row in zip(keys, spec.block_ids, strict=False):
                assert bytes(self.region_row(row)) == content_of(key), "wrong bytes"
            self.manager.complete_load(keys[:found], own)
        if context is None:
            self.end(own)
        return found

    def region_row(self, row: int) -> memoryview:
        link = self.manager.link
        assert link is not None
        assert link.region is not None
        view: memoryview = link.region.array[row].data
        return view

    def close(self) -> None:
        self.manager.shutdown()
