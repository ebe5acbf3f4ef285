"""A host's server that says what a test lets it say: a WELCOME, its files, and answers to messages."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.host_server import BLOCK_BYTES, packet
from tiered_kv.server import protocol
from tiered_kv.server.protocol import Message

ROWS = 16
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
Answer = Callable[[Message], Sequence[bytes]]
"""Returns the packets that answer a message."""


def right_welcome(**more: Any) -> dict[str, Any]:  # Any: JSON
    """Return the fields of a WELCOME that fits `files`, but for `more`."""
    fields = {
        "instance": "odd",
        "namespace": "00",
        "rows": ROWS,
        "row_bytes": BLOCK_BYTES,
        "block_tokens": 16,
        "epoch": 0,
        "grant_rows": 4,
        "grant_max": 8,
        "tiers": ["cpu"],
        "answer_s": 0.2,
        "wait_s": 0.2,
        "version": protocol.VERSION,
    }
    return {**fields, **more}


def body_of(fields: object) -> bytes:
    return fields if isinstance(fields, bytes) else json.dumps(fields).encode()


def files(
    rows_bytes: int = ROWS * BLOCK_BYTES, generations_bytes: int = 4 * ROWS, seals: int = SIZE_SEALS
) -> list[int]:
    """Return the descriptors of the rows and of their generations, of any size."""
    found = [os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for name in ("rows", "generations")]
    for fd, size_bytes in zip(found, (rows_bytes, generations_bytes), strict=True):
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return found


@contextmanager
def odd_server(path: Path, greet: Callable[[socket.socket], object], answer: Answer = lambda _: ()) -> Iterator[None]:
    """Listen at `path`; `greet` answers each HELLO, and `answer` the messages that follow."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            with suppress(OSError), listener.accept()[0] as sock:
                sock.settimeout(0.05)
                sock.recv(1 << 17)
                if not greet(sock):
                    continue
                while not over.is_set():
                    with suppress(TimeoutError):
                        data = sock.recv(1 << 17)
                        if not data:
                            break
                        for message in protocol.messages_of(memoryview(data)):
                            for each in answer(message):
                                sock.send(each)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(0.05)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            path.unlink()


def welcome(sock: socket.socket, fields: object, fds: Sequence[int]) -> bool:
    """Send a WELCOME with its files, which are closed."""
    try:
        body = body_of(fields)
        socket.send_fds(sock, [packet(protocol.WELCOME, body=body)], list(fds))
    finally:
        for fd in fds:
            os.close(fd)
    return True
