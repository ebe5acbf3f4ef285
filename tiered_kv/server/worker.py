"""A worker of an engine that uses a host's cache: it copies between its KV caches and the rows of the server.

The engine's worker process calls it on its own thread; a thread of this class connects, maps and pins the rows. No copy
runs over rows that are not mapped, and none is reported that moved nothing.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tiered_kv.base import OffloadingHandler, TransferResult, TransferSpec
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import TieredKVError
from tiered_kv.server import protocol
from tiered_kv.server.attach import (
    RETRY_MAX_S,
    RETRY_MIN_S,
    Attachment,
    HostLink,
    HostRows,
    reason_for,
    unused_address,
)
from tiered_kv.server.protocol import ClosedError
from tiered_kv.system.threads import start_thread
from tiered_kv.worker.handlers import WorkerHandlers

JOIN_S: Final = 2.0
"""Seconds that `HostWorker.end` waits for the worker's own thread."""
_WATCH_MS: Final = 500
_PACKETS_A_PASS: Final = 16

OpenHandlers = Callable[[PrimaryRegion], WorkerHandlers]
"""Pins rows, and returns handlers that copy to and from them."""


@dataclass(slots=True, eq=False)
class _MappedRows:
    """The rows of one server."""

    region: PrimaryRegion
    handlers: WorkerHandlers
    transfers: int = 0
    """Transfers that were begun and not reported."""

    def close(self) -> None:
        self.handlers.shutdown()
        self.region.close()


class HostWorker:
    """Maps and pins the rows of a server, and of each that replaces it. The engine's thread makes and closes it.

    A copy is never refused, since an engine ends when one is:

    - The scheduler attaches to a server only while none of its transfers runs. It begins a transfer only when all
      workers have mapped that server's rows.
    - Each transfer names its server. Rows of an old server stay mapped while the scheduler may use them: until it shows
      that it uses none, or the new server says that the scheduler has attached.

    Args:
        attachment: Connects to the server; `close` closes it.
        open_handlers: Called for each server, for a later one on a thread of this worker.

    Attributes:
        handlers: For the engine. The worker closes when both have been shut down.

    Raises:
        ConfigError: The server refuses this process, or its rows cannot be mapped or pinned.
        ValueError: See `open_handlers`.
    """

    def __init__(self, attachment: Attachment, open_handlers: OpenHandlers) -> None:
        self._attachment = attachment
        self._open_handlers = open_handlers
        self._lock = threading.Lock()  # guards the rows; held while a transfer is submitted, never while one is awaited
        self._rows: dict[str, _MappedRows] = {}
        """The rows that this process has mapped, by the server's instance."""
        self._link: HostLink | None = None  # owned by the worker's own thread, once it runs
        self._has_scheduler = False  # whether the scheduler has attached to the same server
        self._closed = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with suppress(ClosedError):  # the server ended meanwhile: the thread connects to the next one
                self._connect()
            self._thread = start_thread(self._run, "tiered-kv-host-rows")
        except BaseException:
            self._unlink()
            self._close_rows()
            os.close(self._wake_fd)
            raise
        self._directions = {"store", "load"}
        self.handlers = WorkerHandlers(store=_Direction(self, "store"), load=_Direction(self, "load"))

    # On the engine's thread.

    def begin(self, direction: str, job_id: int, spec: TransferSpec, instance: str) -> bool:
        """Begin a transfer of rows of a server."""
        with self._lock:
            rows = self._rows.get(instance)
            if rows is None:
                raise TieredKVError(f"transfer {job_id} is of a server whose rows are not mapped")
            handler: OffloadingHandler = getattr(rows.handlers, direction)
            begun = handler.transfer_async(job_id, spec)
            rows.transfers += 1
        return begun

    def finished(self, direction: str) -> list[TransferResult]:
        results = []
        with self._lock:
            for rows in self._rows.values():
                found = getattr(rows.handlers, direction).get_finished()
                rows.transfers -= len(found)
                results += found
        return results

    def wait(self, direction: str, job_ids: Iterable[int]) -> None:
        with self._lock:
            handlers = [getattr(rows.handlers, direction) for rows in self._rows.values()]
        for handler in handlers:
            handler.wait(job_ids)

    def end(self, direction: str) -> None:
        """Close when both directions have ended: wait for the copies, and tell the server."""
        self._directions.discard(direction)
        if self._directions or self._closed.is_set():
            return
        self._closed.set()
        os.eventfd_write(self._wake_fd, 1)
        self._attachment.close()
        self._thread.join(JOIN_S)
        self._close_rows()
        if self._thread.is_alive():  # it still maps or pins, and closes that mapping itself
            return
        os.close(self._wake_fd)
        if self._link is not None:
            self._link.say_bye()
        self._unlink()

    def _close_rows(self) -> None:
        with self._lock:
            mapped, self._rows = list(self._rows.values()), {}
        for rows in mapped:
            rows.close()

    # On the worker's own thread.

    def _run(self) -> None:
        pause_s = RETRY_MIN_S
        while not self._closed.is_set():
            try:
                if self._link is None and self._rows and self._are_unused():
                    self._unmap_others("")
                if self._link is not None:
                    self._watch(self._link)
                elif self._connect():
                    pause_s = RETRY_MIN_S
                else:
                    self._closed.wait(pause_s)
                    pause_s = min(2 * pause_s, RETRY_MAX_S)
            except Exception as error:  # the next connection may be better, whatever is raised
                self._attachment.lost(reason_for(error))
                self._unlink()
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _connect(self) -> bool:
        """Connect, map the rows if they are new, and tell the server. Return whether a server listens."""
        if not self._attachment.connect():
            return False
        link = self._attachment.take_link()
        if link is None:
            return False
        region, link.region = link.region, None
        assert region is not None
        instance = link.welcome.instance
        try:
            if instance in self._rows:  # only the connection was lost
                region.close()
            else:
                mapped = _MappedRows(region, self._open_handlers(region))
                with self._lock:
                    self._rows[instance] = mapped
                if self._closed.is_set():  # `close` came while this thread mapped the rows
                    self._close_rows()
            link.channel.add(protocol.MAPPED)
            link.channel.flush()
        except BaseException:
            link.close()
            if instance not in self._rows:
                region.close()
            raise
        self._link, self._has_scheduler = link, False
        return True

    def _watch(self, link: HostLink) -> None:
        """Wait for messages, and unmap the rows of earlier servers once the scheduler does not use them.

        Raises:
            TieredKVError: The connection has ended.
        """
        poll = select.poll()
        poll.register(link.channel.sock, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll(_WATCH_MS if len(self._rows) > 1 else None)
        for message in link.channel.receive(_PACKETS_A_PASS):
            if message.code == protocol.WORKERS:
                self._has_scheduler = message.items > 0
            elif message.code in (protocol.GOODBYE, protocol.REFUSED):
                raise TieredKVError(bytes(message.body).decode(errors="replace") or "the server ends")
        if self._has_scheduler and len(self._rows) > 1:
            self._unmap_others(link.welcome.instance)

    def _are_unused(self) -> bool:
        """Return whether the scheduler shows, by a socket at `unused_address`, that it uses no row."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(unused_address(self._attachment.hello.name))
                _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            except OSError:
                return False
        return bool(uid == os.geteuid())

    def _unmap_others(self, instance: str) -> None:
        with self._lock:
            old = [name for name, rows in self._rows.items() if name != instance and not rows.transfers]
            closing = [self._rows.pop(name) for name in old]
        for rows in closing:
            rows.close()

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


class _Direction(OffloadingHandler):
    """One direction of a worker, over the rows of all servers that it has mapped."""

    def __init__(self, worker: HostWorker, name: str) -> None:
        self._worker = worker
        self._name = name

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        rows = next((each for each in spec if isinstance(each, HostRows)), None)
        if rows is None:
            raise ValueError(f"transfer {job_id} names no rows of a server")
        return self._worker.begin(self._name, job_id, spec, rows.instance)

    def get_finished(self) -> list[TransferResult]:
        return self._worker.finished(self._name)

    def wait(self, job_ids: Iterable[int]) -> None:
        self._worker.wait(self._name, job_ids)

    def shutdown(self) -> None:
        self._worker.end(self._name)
