"""The server of a host's cache: its socket, the connected processes, and the loop that serves them.

`tiered-kv serve` runs `CacheServer.serve` on one thread, which owns all sessions and processes. What must stay true: no
client can make it wait, and a failure ends only the connections of its client, session or namespace. The rows of a
process stay its own until it has said BYE or the kernel has shown its end. Without a connection it may still copy.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from tiered_kv.errors import TieredKVError
from tiered_kv.server import protocol
from tiered_kv.server.channel import Channel
from tiered_kv.server.descriptors import connections_max
from tiered_kv.server.listener import listen
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.process import Process, open_pidfd
from tiered_kv.server.protocol import ClosedError, Hello, Message, ProtocolError
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.server.session import Session
from tiered_kv.server.users import Users
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.threads import STEP

__all__ = ["CacheServer", "listen"]

UNREAD_BYTES_MAX: Final = 8 << 20  # that a client may leave unread; then it loses its connection
UNREAD_ALL_BYTES_MAX: Final = 64 << 20  # that all may leave unread; then the client with the most loses its connection
HELLO_S: Final = 5.0  # how long a connection may take to identify itself
ACCEPT_PAUSE_S: Final = 0.5  # how long no connection is taken after the system had no descriptor or memory for one
_PACKETS_A_PASS: Final = 16
_PASSES_OF_THE_DEAD: Final = 256
"""Limit of the passes that read messages of a process after its end: its child may have its socket, and send on."""
_TICK_S: Final = 0.001
"""Longest time between two steps while a stack is busy (`ServedStack.is_busy`). A job's end begins a step sooner."""
_IDLE_S: Final = 0.5
_SNDBUF_BYTES: Final = 1 << 20

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
        listener.setblocking(False)
        self._listener = listener
        self._namespaces = namespaces
        self._users = Users(users)
        self._pidfd_of = pidfd_of or open_pidfd
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._calls: deque[Callable[[], object]] = deque()  # to be made on the server's thread; any thread appends
        self._processes: set[Process] = set()  # all that may still use rows, with or without a connection
        self._channels: dict[Channel, Process] = {}  # the processes with a connection
        self._is_stopping = False
        self._accepts_from_s: float | None = None  # when connections are taken again; None while they are
        self._log_limit = LogLimit()  # by the name of an exception's type
        namespaces.wake = self._wake
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
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
        found = self._selector.select(timeout_s)
        for host in self._namespaces.stacks:
            host.see_resets()
        for key, mask in found:
            self._trying(functools.partial(key.data, mask))
        for host in self._namespaces.stacks:
            self._trying(host.reset_unasked)  # a mistake there ends no engine's connection
            try:
                host.step(self._session_failed)
            except Exception as error:
                self._host_failed(host, error)
        unread_bytes = 0
        for process in list(self._channels.values()):
            self._guarded(process, process.channel.send_waiting)
            self._watch_writes(process)
            unread_bytes += process.channel.unread_bytes
        if unread_bytes > UNREAD_ALL_BYTES_MAX:
            self._end_the_slowest()
        self._act_on_time()
        for host in self._namespaces.stacks:
            self._trying(functools.partial(host.work, is_idle=not found))

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
        for process in [each for each in self._channels.values() if each.session is session]:
            self._fail(process, error)

    def _host_failed(self, host: ServedStack, error: Exception) -> None:
        """End the connections of a namespace after its step has failed: none of its engines waits for an answer."""
        self._note(error)
        for process in [each for each in self._channels.values() if each.session and each.session.host is host]:
            self._fail(process, error)

    def _end_the_slowest(self) -> None:
        process = max(self._channels.values(), key=lambda each: each.channel.unread_bytes)
        why = f"all clients have left more than {UNREAD_ALL_BYTES_MAX} bytes unread, this one the most"
        self._fail(process, ProtocolError(why))

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
        while self._calls:
            self._trying(self._calls.popleft())

    # Connections.

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # to try again at once would take all of the processor
            if self._accepts_from_s is None:
                _log.warning("no connection can be taken: %s", error.strerror)
            self._accepts_from_s = time.monotonic() + ACCEPT_PAUSE_S
            self._selector.unregister(self._listener)
            return
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SNDBUF_BYTES)
            pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            refusal = self._users.refusal(uid)
            most = connections_max(self._namespaces.descriptors)
            if not refusal and len(self._processes) >= most:  # those without a connection count too
                refusal = f"{most} processes are connected, and there can be no more; raise its limit of descriptors"
            pidfd = -1 if refusal else self._pidfd_of(sock, pid)
            if pidfd < 0 and not refusal:
                refusal = "the server cannot see when this process ends; share its PID namespace, or use Linux 6.5"
        except OSError:
            sock.close()
            return
        channel = Channel(sock, UNREAD_BYTES_MAX)
        if refusal:
            channel.refuse(refusal)
            channel.close()
            return
        process = Process(channel, pid, pidfd, time.monotonic())
        self._processes.add(process)
        self._channels[channel] = process
        receive = functools.partial(self._receive, process)
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._guarded(process, receive))
        self._selector.register(pidfd, selectors.EVENT_READ, lambda _: self._died(process))

    def _receive(self, process: Process) -> None:
        STEP.begin()  # the workers of tiers pause until the step of this pass ends
        for message in process.channel.receive(_PACKETS_A_PASS, is_expected=True):
            if process.hello is None:
                self._greet(process, message)
            elif message.code == protocol.BYE:
                self._end_process(process)  # it uses no row any more
                return
            elif process.session is None:
                raise ProtocolError("a client waits for the answer to its HELLO")
            elif process.role == "scheduler":
                process.session.handle(message)
            elif message.code == protocol.MAPPED:
                process.is_mapped = True
                self._tell_workers(process.session)
            else:
                raise ProtocolError("a worker only says that it has mapped the rows")

    def _guarded(self, process: Process, call: Callable[[], None]) -> None:
        """Make a call for a process, which loses its connection if it breaks the protocol."""
        if not process.is_connected:
            return
        try:
            call()
        except ClosedError:
            self._disconnect(process)
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
        self._disconnect(process)

    def _watch_writes(self, process: Process) -> None:
        if process.is_connected:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.is_blocked else 0)
            key = self._selector.get_key(process.channel.sock)
            if key.events != events:
                self._selector.modify(process.channel.sock, events, key.data)

    def _act_on_time(self) -> None:
        """Disconnect clients that sent no HELLO in time, and take connections again after a pause."""
        now_s = time.monotonic()
        if self._accepts_from_s is not None and now_s >= self._accepts_from_s:
            self._accepts_from_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for process in list(self._channels.values()):
            if process.hello is None and now_s - process.since_s > HELLO_S:
                self._disconnect(process)

    # A process's life.

    def _greet(self, process: Process, message: Message) -> None:
        if message.code != protocol.HELLO:
            raise ProtocolError("expected HELLO")
        hello = process.hello = protocol.hello_of(message.body)
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
        sessions = [each.session for each in self._processes if each.session is not None]
        session = next((each for each in sessions if each.host is host and each.name == hello.name), None)
        if hello.role == "scheduler" and session is not None:
            schedulers = (each for each in self._processes if each.session is session and each.role == "scheduler")
            before = next(schedulers, None)
            if before is not None and (before.is_connected or not before.is_same_as(process)):
                raise ProtocolError(f"another process, {before.pid}, is the scheduler of '{hello.name}'")
            if before is None and (session.requests or session.has_rows):
                raise ProtocolError(
                    f"a worker of the last engine '{hello.name}' still runs; end it, or use another name"
                )
            if before is not None:  # a scheduler connects again only after its copies have ended: free its rows
                session.close()
                self._forget(before)
        if session is None:
            session = host.sessions[hello.name] = Session(hello.name, host)
        for each in [each for each in self._processes if each.session is session and not each.is_connected]:
            if each.role == hello.role and each.is_same_as(process):
                self._forget(each)  # one descriptor tells when the process ends
        process.session = session
        if hello.role == "scheduler":
            session.channel = process.channel
        process.channel.flush()
        host.look_for_resets()
        body = protocol.to_json(host.welcome())
        packet = protocol.HEADER.pack(protocol.WELCOME, 0, 0, 0, len(body)) + body
        try:
            socket.send_fds(process.channel.sock, [packet], host.fds)
        except OSError as error:
            raise ClosedError(error.strerror or "closed") from error
        self._tell_workers(session)

    def _tell_workers(self, session: Session) -> None:
        """Tell the processes of a session how many workers have the rows, and whether the scheduler is there."""
        processes = [process for process in self._channels.values() if process.session is session]
        workers = sum(process.is_mapped for process in processes)
        for process in processes:
            with suppress(ProtocolError):  # a client that does not read loses its connection elsewhere
                process.channel.add(protocol.WORKERS, workers, count=session.channel is not None)

    def _disconnect(self, process: Process) -> None:
        """Close a connection. The process may still copy, so its rows are free only when it has ended."""
        if not process.is_connected:
            return
        asks_reset = process.session is not None and process.role == "scheduler" and _asks_reset(process.channel)
        process.is_connected = False
        self._selector.unregister(process.channel.sock)
        del self._channels[process.channel]
        process.channel.close()
        session = process.session
        if session is None:
            self._forget(process)
            return
        if session.channel is process.channel:
            session.channel = None
        if asks_reset:
            self._trying(functools.partial(session.host.reset, session))
        self._tell_workers(session)
        if process.role == "scheduler" and not session.has_rows:  # none of its processes copies
            self._forget(process)
            session.close()
            self._end_if_left(session)

    def _end_process(self, process: Process) -> None:
        """Forget a process that has ended or uses no row any more, and its session if no other process is left."""
        if process not in self._processes:
            return  # this pass has forgotten it already: it has said BYE
        self._disconnect(process)
        self._forget(process)
        if process.session is not None:
            self._trying(process.session.host.look_for_resets)
            self._end_if_left(process.session)

    def _died(self, process: Process) -> None:
        """Serve the messages that a process sent before it ended, then forget it."""
        for _ in range(_PASSES_OF_THE_DEAD):
            if not process.is_connected or not process.channel.is_readable:
                break
            self._guarded(process, functools.partial(self._receive, process))
        self._end_process(process)

    def _end_if_left(self, session: Session) -> None:
        """End a session if none of its processes is left."""
        if not any(each.session is session for each in self._processes):
            had_rows = session.has_rows
            if session.host.sessions.get(session.name) is session:
                del session.host.sessions[session.name]
            session.close()
            _log.info("session '%s' has ended%s", session.name, ", its rows are free" if had_rows else "")

    def _forget(self, process: Process) -> None:
        if process in self._processes:
            self._processes.discard(process)
            self._selector.unregister(process.pidfd)
            os.close(process.pidfd)

    def close(self) -> None:
        """Say goodbye to all clients, and close the stacks."""
        for process in list(self._channels.values()):
            with suppress(TieredKVError):
                process.channel.add(protocol.GOODBYE)
                process.channel.flush()
            self._disconnect(process)
        for process in list(self._processes):
            self._forget(process)
        self._selector.close()
        for each in (self._listener, self._wake_reader, self._wake_writer):
            each.close()
        self._namespaces.close()


def _asks_reset(channel: Channel) -> bool:
    """Return whether a RESET is among the unread messages of the other side."""
    with suppress(TieredKVError):
        return any(each.code == protocol.RESET for each in channel.receive(_PACKETS_A_PASS * _PASSES_OF_THE_DEAD))
    return False
