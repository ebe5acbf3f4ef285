"""A process's connection to a host's server: a thread makes it, and makes it again after the server was lost.

The attached managers and workers take it on their own threads (`take_link`), and do not wait for the server. Rows of a
lost connection stay mapped while copies use them.
"""

from __future__ import annotations

import array
import hashlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError, ResourceError, TieredKVError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.server import protocol
from tiered_kv.server.allocation import charge_of
from tiered_kv.server.channel import Channel, connect_in_turn
from tiered_kv.server.generations import map_generations
from tiered_kv.server.memory import map_host_region
from tiered_kv.server.protocol import Hello, ProtocolError, Welcome
from tiered_kv.server.reset_file import ResetNotes
from tiered_kv.server.welcome import check_allocated, check_files, receive, welcome_of
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.threads import start_thread
from tiered_kv.tiering.spell import LOGGED_AT_ONCE, LOGGED_PAUSE_S

SCHEME: Final = "unix:"
RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
OPEN_S: Final = 60.0
"""How long a server may take to open a stack."""
UNREAD_BYTES_MAX: Final = 8 << 20
_SNDBUF_BYTES: Final = 1 << 20
_NEWS_MAX: Final = 16
"""Limit of answers that are noted for the next store, which sorts each in 0.1 ms; older answers are lost."""

_log = logging.getLogger(__name__)
Numbers = np.ndarray[Any, np.dtype[np.uint32]]


def unused_address(name: str) -> str:
    """Return the abstract address (unix(7)) at which an engine's scheduler listens while it uses no row of a server."""
    return f"\0tiered-kv-{hashlib.blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}"


class HostRows(CPULoadStoreSpec):
    """Rows of a server's memory.

    Args:
        block_ids: The rows.
        instance: Names the memory that has the rows: a restarted server has another instance.
    """

    def __init__(self, block_ids: Sequence[int], instance: str) -> None:
        super().__init__(block_ids)
        self.instance = instance


class HostLink:
    """An open connection, and this process's knowledge of the server's rows. One thread uses it.

    Args:
        channel: The connection.
        welcome: The server's answer.
        region: The rows; None in a process that does not copy.
        generations: The generation of each row, which the server changes.
    """

    def __init__(
        self, channel: Channel, welcome: Welcome, region: PrimaryRegion | None, generations: memoryview
    ) -> None:
        self.channel = channel
        self.welcome = welcome
        self.region = region
        self.free: list[int] = []
        """Rows that this process may write."""
        self.asked: list[int] = []
        """Rows that were asked for and have not come: how many, for each answer that the server owes."""
        self.spare, self.spare_since_s = 0, 0.0
        """The least number of free rows since `spare_since_s`."""
        self.workers = 0
        """Worker processes of the session that have the rows."""
        self.resets_seen = -1
        """How many notes of resets (`ResetNotes.count`) the server's epoch surely counts; -1 if that is not known."""
        self.pong = 0
        """The highest number of a PING that was answered."""
        self._generations = generations
        self._current = np.frombuffer(generations, np.uint32)
        self._seen = np.zeros(welcome.rows, np.uint32)
        self._seen_view = self._seen.data
        self._news: list[tuple[Sequence[OffloadKey], Sequence[int], Numbers]] = []
        """Keys, rows and generations that are not sorted into the two dictionaries below yet."""
        self._row_of: dict[OffloadKey, int] = {}
        self._key_of: dict[int, OffloadKey] = {}

    def check_rows(self, rows: Sequence[int] | Numbers) -> None:
        """Check row numbers that the server sends; codes in place of rows may be among them.

        Raises:
            ProtocolError: The memory has no such row: a copy would hit other memory of this process.
        """
        numbers = np.asarray(rows, np.uint32)
        if numbers.max(initial=0) >= self.welcome.rows:
            wrong = numbers[(numbers >= self.welcome.rows) & (numbers <= protocol.ROW_MAX)]
            if len(wrong):
                raise ProtocolError(f"the server names row {wrong[0]} of {self.welcome.rows}")

    def rows_of(self, rows: Sequence[int]) -> HostRows:
        return HostRows(rows, self.welcome.instance)

    def know(self, keys: Sequence[OffloadKey], rows: Sequence[int], generations: Sequence[int] | None = None) -> None:
        """Note that blocks are in these rows while the rows keep these generations: by default the present ones."""
        if rows:
            found = self._current[array.array("L", rows)] if generations is None else np.array(generations, np.uint32)
            self._news.append((keys, rows, found))
            del self._news[:-_NEWS_MAX]

    def _read_news(self) -> None:
        """Sort the noted answers. It is done late: it takes longer than to note them, and few callers need it."""
        for keys, rows, generations in self._news:
            for key, row, old in zip(keys, rows, map(self._key_of.get, rows), strict=True):
                if old is not None and old != key and self._row_of.get(old) == row:
                    del self._row_of[old]
            self._row_of.update(zip(keys, rows, strict=True))
            self._key_of.update(zip(rows, keys, strict=True))
            self._seen[rows] = generations
        self._news.clear()

    def is_known(self, key: OffloadKey) -> bool:
        """Return whether the server still has a block that it has named, or that this process has stored."""
        if self._news:
            self._read_news()
        row = self._row_of.get(key)
        return row is not None and self._key_of.get(row) == key and self._seen_view[row] == self._generations[row]

    def forget_known(self) -> None:
        self._news.clear()
        self._row_of.clear()
        self._key_of.clear()

    def say_bye(self) -> None:
        """Tell the server that this process uses no row any more."""
        with suppress(TieredKVError):
            self.channel.add(protocol.BYE)
            self.channel.flush()

    def close(self) -> None:
        self.channel.close()
        if self.region is not None:
            self.region.close()
        del self._current
        with suppress(BufferError):
            self._generations.release()


class Attachment:
    """Connects a process to a server, and connects again after each loss. Any thread may call `close`.

    Args:
        address: "unix:" and the path of the server's socket.
        hello: The identity of this process.
        maps_rows: Whether the process copies blocks itself.
        pins_rows: Whether the process pins all rows: then it attaches only after all are allocated.
    """

    def __init__(self, address: str, hello: Hello, *, maps_rows: bool = True, pins_rows: bool = False) -> None:
        if not address.startswith(SCHEME) or len(address) == len(SCHEME):
            raise ConfigError(f"expected 'unix:' and the path of a socket, found {address!r}", location="attach")
        self.path = address.removeprefix(SCHEME)
        protocol.check_path(self.path, "attach")
        self.hello = hello
        self.resets = ResetNotes(self.path, hello.settings)
        self._maps_rows, self._pins_rows = maps_rows, pins_rows
        self._ready: HostLink | None = None  # a new connection that nobody has taken
        self._wanted = threading.Event()  # wakes the thread, to connect or to end
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards `_ready` and `_wanted`, and `_opening`; never held across I/O
        self._opening: socket.socket | None = None
        """The socket of the connection that the thread is making; None if it makes no connection."""
        self._thread: threading.Thread | None = None
        self._told = ""  # the reason that was logged last
        self._limit = LogLimit(LOGGED_PAUSE_S, 2 * LOGGED_AT_ONCE)
        self._blocks: tuple[str, int] | None = None
        """Namespace, and bytes of a row, of the first connection; no later one may have others."""
        self._unused: socket.socket | None = None  # listens at `unused_address`
        self._discarded: deque[HostLink] = deque()  # lost connections, which the thread closes

    def connect(self) -> bool:
        """Connect now, and return whether a server answers; the log says why not.

        Raises:
            ConfigError: The server refuses this process, and says why.
        """
        try:
            self.open()
        except OSError as error:
            self.lost(reason_for(error))
            return False
        return True

    def open(self) -> None:
        """Connect now.

        Raises:
            ConfigError: The server refuses this process, and says why.
            OSError: No server answers.
        """
        self._ready = self._open()
        self._attached(self._ready)

    def take_link(self) -> HostLink | None:
        """Return a new connection, once; begin to connect if there is none. Never waits.

        A scheduler calls this while it uses no row.
        """
        with self._lock:
            link, self._ready = self._ready, None
            if link is not None:
                self._wanted.clear()
                self._show_unused(False)
                return link
            self._wanted.set()
        self._show_unused(True)
        if self._thread is None and not self._closed.is_set():
            with suppress(ResourceError):  # the next call tries again
                self._thread = start_thread(self._run, "tiered-kv-attach")
        return None

    def discard(self, link: HostLink) -> None:
        """Let the thread that connects close a lost connection: to unmap its rows may take a second. Never waits.

        `take_link` follows.
        """
        self._discarded.append(link)

    def _close_discarded(self) -> None:
        with suppress(IndexError):
            while True:
                self._discarded.popleft().close()

    def _show_unused(self, is_unused: bool) -> None:
        """Listen at `unused_address` while this scheduler uses no row; else stop."""
        if not is_unused and self._unused is not None:
            self._unused.close()
            self._unused = None
        elif is_unused and self._unused is None and self.hello.role == "scheduler" and self.hello.workers:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(unused_address(self.hello.name))
                sock.listen()
                self._unused = sock
            except OSError:  # workers keep the rows of a dead server for longer
                sock.close()

    def lost(self, why: str) -> None:
        """Log that there is no server, and each new reason, at a bounded rate."""
        if why != self._told and self._limit.take() is not None:
            self._told = why
            _log.warning("no cache at %s: %s; every block is a miss until it is there", self.path, why)

    def close(self) -> None:
        """Stop to connect; a connection that nobody has taken is closed."""
        self._closed.set()
        self._wanted.set()
        with self._lock:
            if self._opening is not None:  # a server that was stopped may never answer
                with suppress(OSError):
                    self._opening.shutdown(socket.SHUT_RDWR)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(RETRY_MAX_S)
        self._close_discarded()
        self._show_unused(False)
        link, self._ready = self._ready, None
        if link is not None:
            link.say_bye()
            link.close()
        self.resets.close()

    def note_reset(self) -> None:
        """Keep a reset of the namespace for a server that is away, or that ends before it has done the reset."""
        self.resets.note("" if self._blocks is None else self._blocks[0])

    def _run(self) -> None:
        pause_s = RETRY_MIN_S
        while not self._closed.is_set():
            self._wanted.wait()
            self._close_discarded()
            with self._lock:  # a superfluous connection would end the leases of the one in use
                if self._ready is not None or not self._wanted.is_set():
                    self._wanted.clear()
                    continue
            if self._closed.is_set():
                return
            try:
                link = self._open()
                with self._lock:
                    self._ready = link
                    self._wanted.clear()
                pause_s = RETRY_MIN_S
                self._attached(link)
            except Exception as error:  # the next server may be the right one, whatever is raised
                if self._closed.is_set():
                    return
                self.lost(reason_for(error))
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _check_blocks(self, welcome: Welcome) -> None:
        """Check that the server's rows fit this process's settings, and the first connection's namespace and rows.

        Raises:
            ConfigError: They do not.
        """
        asked = ((self.hello.settings or {}).get("block") or {}).get("bytes")
        if isinstance(asked, int) and asked != welcome.row_bytes:
            raise ConfigError(f"expected rows of {asked} bytes, found {welcome.row_bytes}: replace the server")
        blocks = welcome.namespace, welcome.row_bytes
        if self._blocks not in (None, blocks):
            raise ConfigError("the server has another namespace, or other blocks, than before: connect anew")
        self._blocks = blocks

    def _attached(self, link: HostLink) -> None:
        # If the log has a warning of the outage, its end is a warning, too.
        level, payer = logging.WARNING if self._told else logging.INFO, ""
        if link.welcome.prefault:
            payer = ": the server allocates its rows (prefault)"
        _log.log(level, "attached to the host's cache at %s%s", self.path, payer)
        self._told = ""
        if link.region is not None and not link.welcome.prefault:
            _log.warning("%s", charge_of(link.welcome.rows * link.welcome.row_bytes))

    def _open(self) -> HostLink:
        """Return a new connection.

        Raises:
            OSError: No server listens, or it does not answer.
            ConfigError: It refuses.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds: list[int] = []
        try:
            sock.settimeout(OPEN_S)
            with self._lock:
                self._opening = sock
            if self._closed.is_set():
                raise OSError("closed")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SNDBUF_BYTES)
            connect_in_turn(sock, self.path, OPEN_S, self._closed)
            notes = self.resets.count
            body = protocol.to_json(self.hello)
            with suppress(BrokenPipeError):  # it has refused this process already: its message comes next
                sock.send(protocol.HEADER.pack(protocol.HELLO, 0, 0, 0, len(body)) + body)
            packet, fds = receive(sock)
            welcome = welcome_of(packet)
            check_files(fds, welcome)
            self._check_blocks(welcome)
            if self._pins_rows:
                check_allocated(fds[0], welcome)
            if len(fds) > 2:
                self.resets.adopt(fds[2])
            is_noted_there = len(fds) > 2 and self.resets.number > 0
            region = map_host_region(fds[0], welcome.rows, welcome.row_bytes) if self._maps_rows else None
            try:
                generations = map_generations(fds[1], welcome.rows)
                link = HostLink(Channel(sock, UNREAD_BYTES_MAX), welcome, region, generations)
                link.resets_seen = notes if is_noted_there else -1
                return link
            except BaseException:
                if region is not None:
                    region.close()
                raise
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._opening = None
            for fd in fds:
                os.close(fd)


def reason_for(error: Exception) -> str:
    """Return why there is no connection, for the log; of an unexpected error also its type."""
    if isinstance(error, TieredKVError):
        return str(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"an unexpected error: {type(error).__name__}: {error}"
