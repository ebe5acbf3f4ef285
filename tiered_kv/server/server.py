"""The server of a host's cache: the connected processes, and the loop that serves them.

`tiered-kv serve` runs `CacheServer.serve` on one thread, which owns all sessions and processes. What must stay true:

- No client can make it wait, and a failure ends only the connections of its client, session or namespace.
- A pass takes no longer with more connections, rows or requests: who has nothing to say costs nothing. Messages, and
  the ends of processes, have a limited time in each pass. So the messages of one, or the end of a thousand, delay the
  others by some milliseconds.
- The rows of a process stay its own until it has said BYE or the kernel has shown its end. Without a connection it may
  still copy.
"""

from __future__ import annotations

import functools
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from tiered_kv.errors import TieredKVError
from tiered_kv.server import protocol
from tiered_kv.server.acceptor import Acceptor
from tiered_kv.server.channel import Channel
from tiered_kv.server.descriptors import connections_max
from tiered_kv.server.listener import listen
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.process import Process, open_pidfd
from tiered_kv.server.processes import PACKETS_A_TURN, Processes
from tiered_kv.server.protocol import ClosedError, Hello, Message, ProtocolError
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.server.users import Users
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.step import STEP

__all__ = ["CacheServer", "listen"]

UNREAD_ALL_BYTES_MAX: Final = 64 << 20  # that all may leave unread; then the client with the most loses its connection
HELLO_S: Final = 5.0  # how long a connection may take to identify itself
READ_S: Final = 0.004
"""How long a pass reads messages. Then it ends a step, and the other processes are read in the next pass."""
TURN_S: Final = 0.001
"""How long a pass reads the messages of one process, but for the last of them."""
LEAVE_S: Final = 0.002
"""How long a pass acts on ended processes and connections. The others wait for the next pass."""
_TICK_S: Final = 0.001
"""Longest time between two steps while a stack is busy (`ServedStack.is_busy`). A job's end begins a step sooner."""
_IDLE_S: Final = 0.5

_log = logging.getLogger(__name__)


class CacheServer:
    """Serves the stacks of a host. One thread calls `serve`; any thread may call `stop`.

    Args:
        listener: A listening unix socket of packets (SOCK_SEQPACKET); the server closes it.
        namespaces: Opens and keeps the stacks; the server closes it.
        users: Numbers of the users that may connect, besides this process's own, and root.
        pidfd_of: Returns a descriptor that is readable once the peer of a socket has ended, or -1.
    """

    def __init__(
        self,
        listener: socket.socket,
        namespaces: Namespaces,
        users: Collection[int] = (),
        pidfd_of: Callable[[socket.socket, int], int] | None = None,
    ) -> None:
        self._namespaces = namespaces
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._calls: deque[Callable[[], object]] = deque()  # to be made on the server's thread; any thread appends
        self._processes = Processes(self._selector, read=self._read_one, trying=self._trying)
        self._unread: deque[Process] = deque()
        """Connected processes that have sent something, the next to read first."""
        self._unsent: set[Channel] = set()
        """Channels with messages that no `flush` has tried to send."""
        self._blocked: set[Channel] = set()
        """Channels with packets that the other side has no room for; the selector watches for room."""
        self._is_stopping = False
        self._log_limit = LogLimit()  # by the name of an exception's type
        namespaces.wake = self._wake
        self._acceptor = Acceptor(
            listener,
            Users(users),
            pidfd_of or open_pidfd,
            self._selector,
            on_connecting=self._accept,
            on_unsent=self._unsent.add,
        )
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._run_calls)

    def serve(self) -> None:
        """Serve until `stop`, then say goodbye to all clients and close the stacks."""
        try:
            while not self._is_stopping:
                self.serve_once(_TICK_S if any(host.is_busy for host in self._namespaces.stacks) else _IDLE_S)
        finally:
            self.close()

    def serve_once(self, timeout_s: float) -> None:
        """Wait for messages, `timeout_s` at most, and answer them: one pass of `serve`."""
        is_behind = any(host.is_behind for host in self._namespaces.stacks)
        is_behind = is_behind or bool(self._unread) or self._processes.are_leaving
        found = self._selector.select(0 if is_behind else timeout_s)
        for host in self._namespaces.stacks:
            host.see_resets()
        for key, mask in found:
            self._trying(functools.partial(key.data, mask))
        self._read()
        self._processes.let_leave(LEAVE_S)
        for host in self._namespaces.stacks:
            self._trying(host.reset_unasked)  # a mistake there ends no engine's connection
            try:
                host.step(self._session_failed)
            except Exception as error:
                self._host_failed(host, error)
        self._send()
        self._act_on_time()
        is_idle = not (found or self._unread or self._processes.are_leaving)
        for host in self._namespaces.stacks:
            self._trying(functools.partial(host.work, is_idle=is_idle))

    def _trying(self, call: Callable[[], object]) -> None:
        """Make a call that belongs to no client. A mistake of ours is logged, and the server goes on."""
        try:
            call()
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        if self._log_limit.take(type(error).__name__) is not None:
            _log.exception("the server goes on after a mistake of ours; %s", self._log_limit.about)

    def _session_failed(self, session: object, error: Exception) -> None:
        """End the connections of a session that cannot be answered: its engine begins anew."""
        for process in [each for each in self._processes.connected.values() if each.session is session]:
            self._fail(process, error)

    def _host_failed(self, host: ServedStack, error: Exception) -> None:
        """End the connections of a namespace after its step has failed: none of its engines waits for an answer."""
        self._note(error)
        processes = [each for each in self._processes.connected.values() if each.session and each.session.host is host]
        for process in processes:
            self._fail(process, error)

    def stop(self) -> None:
        """Let `serve` return. Signal handlers may call this."""
        self._is_stopping = True
        self._wake()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Make a call on the server's thread. Any thread may call this."""
        self._calls.append(call)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # it is awake, or closed
            self._wake_writer.send(b"\0")

    def _run_calls(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        end_s = time.monotonic() + READ_S
        while self._calls:
            self._trying(self._calls.popleft())
            if time.monotonic() >= end_s:
                self._wake()  # the others are made in the next pass
                return

    # Connections.

    def _accept(self, _: int) -> None:
        most = connections_max(self._namespaces.descriptors)
        if len(self._processes) >= most and self._processes.are_leaving:
            return  # there will be room in a moment
        for process in self._acceptor.take(self._processes, most):
            self._processes.add(process, functools.partial(self._note_event, process))

    def _note_event(self, process: Process, mask: int) -> None:
        """Note that a process has sent something, or has room for what waits for it."""
        if mask & selectors.EVENT_READ:
            self._note_unread(process)
        if mask & selectors.EVENT_WRITE:
            self._unsent.add(process.channel)

    def _note_unread(self, process: Process) -> None:
        if not process.is_unread:
            process.is_unread = True
            self._unread.append(process)

    def _read(self) -> None:
        """Read what processes have sent, for `READ_S` at most. Each has a turn."""
        end_s = time.monotonic() + READ_S
        for _ in range(len(self._unread)):
            process = self._unread.popleft()
            process.is_unread = False
            self._read_one(process)
            if time.monotonic() >= end_s:
                break

    def _read_one(self, process: Process) -> None:
        if not process.is_closed:
            self._guarded(process, functools.partial(self._receive, process))

    def _receive(self, process: Process) -> None:
        STEP.begin()  # the workers of tiers pause until the step of this pass ends
        until_s = time.monotonic() + TURN_S
        for message in process.channel.receive(PACKETS_A_TURN, is_expected=True, until_s=until_s):
            if process.hello is None:
                self._greet(process, message)
            elif message.code == protocol.BYE:
                self._processes.end(process)  # it uses no row any more
                return
            elif process.session is None:
                raise ProtocolError("a client waits for the answer to its HELLO")
            elif process.role == "scheduler":
                process.session.handle(message)
            elif message.code == protocol.MAPPED:
                process.is_mapped = True
                self._processes.tell_workers(process.session)
            else:
                raise ProtocolError("a worker only says that it has mapped the rows")
        if process.channel.has_received:
            self._note_unread(process)

    def _send(self) -> None:
        """Send the messages of this pass, and watch for room where there is none."""
        unsent, connected = [*self._unsent], self._processes.connected
        self._unsent.clear()
        for channel in unsent:
            process = connected.get(channel)
            if process is not None and not process.is_leaving:
                self._guarded(process, channel.send_waiting)
                self._watch_writes(process)
        self._blocked = {channel for channel in self._blocked if channel in connected}
        if sum(channel.unread_bytes for channel in self._blocked) > UNREAD_ALL_BYTES_MAX:
            slowest = max(self._blocked, key=lambda each: each.unread_bytes)
            why = f"all clients have left more than {UNREAD_ALL_BYTES_MAX} bytes unread, this one the most"
            self._fail(connected[slowest], ProtocolError(why))

    def _guarded(self, process: Process, call: Callable[[], None]) -> None:
        """Make a call for a process, which loses its connection if it breaks the protocol."""
        if not process.is_connected:
            return
        try:
            call()
        except ClosedError:
            self._processes.note_closed(process)
        except Exception as error:  # also a mistake of ours: the other engines go on
            self._fail(process, error)

    def _fail(self, process: Process, error: Exception) -> None:
        """Tell a process why it loses its connection."""
        if not process.is_connected:
            return
        is_ours = not isinstance(error, TieredKVError)
        why = " ".join(str(error).split())  # wrong settings have a line each
        _log.log(logging.ERROR if is_ours else logging.WARNING, "%s loses its connection: %s", process.name, why)
        if is_ours:
            _log.debug("the mistake", exc_info=error)
        with suppress(TieredKVError):
            process.channel.refuse(str(error))
        self._processes.disconnect(process)

    def _watch_writes(self, process: Process) -> None:
        channel = process.channel
        if process.is_connected and not process.is_leaving and channel.is_blocked != (channel in self._blocked):
            key = self._selector.get_key(channel.sock)
            if channel.is_blocked:
                self._blocked.add(channel)
                self._selector.modify(channel.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, key.data)
            else:
                self._blocked.discard(channel)
                self._selector.modify(channel.sock, selectors.EVENT_READ, key.data)

    def _act_on_time(self) -> None:
        """Disconnect clients that sent no HELLO in time, and take connections again after a pause."""
        now_s = time.monotonic()
        self._acceptor.go_on(now_s)
        for process in self._processes.silent_since(now_s - HELLO_S):
            self._processes.disconnect(process)

    # A process's life.

    def _greet(self, process: Process, message: Message) -> None:
        if message.code != protocol.HELLO:
            raise ProtocolError("expected HELLO")
        hello = protocol.hello_of(message.body)
        self._processes.know(process, hello)
        if hello.version < protocol.VERSION_MIN:
            raise ProtocolError(
                f"the client speaks version {hello.version}, the server {protocol.VERSION_MIN} to {protocol.VERSION}: "
                "upgrade tiered-kv in the engine's environment"
            )
        self._namespaces.open(hello.settings, self.call_soon, functools.partial(self._opened, process, hello))

    def _opened(self, process: Process, hello: Hello, opened: ServedStack | TieredKVError) -> None:
        if isinstance(opened, TieredKVError):
            self._fail(process, opened)
        else:
            self._guarded(process, lambda: self._welcome(process, hello, opened))

    def _welcome(self, process: Process, hello: Hello, host: ServedStack) -> None:
        session = self._processes.join(process, hello, host)
        process.channel.flush()
        host.look_for_resets()
        body = protocol.to_json(host.welcome())
        packet = protocol.HEADER.pack(protocol.WELCOME, 0, 0, 0, len(body)) + body
        try:
            socket.send_fds(process.channel.sock, [packet], host.fds)
        except OSError as error:
            raise ClosedError(error.strerror or "closed") from error
        self._processes.tell_workers(session)

    def close(self) -> None:
        """Say goodbye to all clients, and close the stacks."""
        self._processes.close()
        self._selector.close()
        for each in (self._acceptor, self._wake_reader, self._wake_writer):
            each.close()
        self._namespaces.close()
