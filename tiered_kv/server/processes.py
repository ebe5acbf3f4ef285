"""The processes of a server, from their connection to their end, and the sessions that they belong to.

`CacheServer` owns it, and calls it on the server's thread. What must stay true:

- A process is here from its connection until it has ended, or has said that it uses no row any more. So its rows stay
  its own, with or without a connection.
- A session has one scheduler that lives. It ends with the last of its processes.
- No call looks at the processes of other sessions: with a thousand engines it takes as long as with one.
- The ends of processes and connections have a limited time in each pass. Before it acts on an end, the server reads
  what the process had sent.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from tiered_kv.errors import TieredKVError
from tiered_kv.server import protocol
from tiered_kv.server.channel import Channel
from tiered_kv.server.process import READS_AFTER_END_MAX, Process
from tiered_kv.server.protocol import Hello, ProtocolError
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.server.session import Session

PACKETS_A_TURN: Final = 16
"""Packets that are read of one process before those of others."""

_log = logging.getLogger(__name__)


class Processes:
    """The processes that may use rows, with or without a connection.

    Args:
        selector: Watches their connections and ends.
        read: Reads messages of a process, for a short time. It raises nothing.
        trying: Makes a call that may fail by a mistake of ours. It raises nothing.

    Attributes:
        connected: The processes with a connection, by channel.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        read: Callable[[Process], None],
        trying: Callable[[Callable[[], object]], None],
    ) -> None:
        self._selector = selector
        self._read, self._trying = read, trying
        self.connected: dict[Channel, Process] = {}
        self._all: dict[Process, None] = {}
        self._unknown: dict[Process, None] = {}
        """Those that have sent no HELLO, the first to connect first."""
        self._of: dict[object, list[Process]] = {}
        """By session; a process without one is in none of the lists."""
        self._leaving: deque[Process] = deque()
        """Those whose end, or end of the connection, was seen and not acted on. A process that has `is_leaving` is here
        once, and its socket is watched no more."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Process]:
        return iter(self._all)

    def __contains__(self, process: object) -> bool:
        return process in self._all

    @property
    def are_leaving(self) -> bool:
        """Whether `let_leave` has more to do."""
        return bool(self._leaving)

    def silent_since(self, time_s: float) -> list[Process]:
        """Return the processes that connected before `time_s` and have sent no HELLO."""
        silent = []
        for process in self._unknown:
            if process.since_s >= time_s:
                break
            silent.append(process)
        return silent

    # From a connection to a session.

    def add(self, process: Process, on_event: Callable[[int], None]) -> None:
        """Take a process that has connected; `on_event` is called when it has sent something."""
        self.connected[process.channel] = process
        self._all[process] = self._unknown[process] = None
        self._selector.register(process.channel.sock, selectors.EVENT_READ, on_event)
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda _: self._note_end(process))

    def know(self, process: Process, hello: Hello) -> None:
        """Note who a process is."""
        process.hello = hello
        self._unknown.pop(process, None)

    def join(self, process: Process, hello: Hello, host: ServedStack) -> Session:
        """Let a process belong to the session that it names, and return the session.

        Raises:
            ProtocolError: Another process is the scheduler, or a worker of the last one still copies.
        """
        for each in self._of_session(host.sessions.get(hello.name)):
            while each.is_leaving:  # perhaps it is this process, which connects again
                self._leave(each)
        session = host.sessions.get(hello.name)
        if session is None:
            session = host.sessions[hello.name] = Session(hello.name, host)
        assert isinstance(session, Session)
        if hello.role == "scheduler":
            self._replace_scheduler(process, session)
            session.channel = process.channel
        for each in self._of_session(session):
            if not each.is_connected and each.role == hello.role and each.is_same_as(process):
                self._forget(each)  # one descriptor tells when the process ends
        process.session = session
        self._of.setdefault(session, []).append(process)
        return session

    def _replace_scheduler(self, process: Process, session: Session) -> None:
        before = next((each for each in self._of_session(session) if each.role == "scheduler"), None)
        if before is None:
            if session.requests or session.has_rows:
                raise ProtocolError(
                    f"a worker of the last engine '{session.name}' still runs; end it, or use another name"
                )
        elif before.is_connected or not before.is_same_as(process):
            raise ProtocolError(f"another process, {before.pid}, is the scheduler of '{session.name}'")
        else:  # a scheduler connects again only after its copies have ended: free its rows
            session.close()
            self._forget(before)

    def tell_workers(self, session: Session) -> None:
        """Tell the processes of a session how many workers have the rows, and whether the scheduler is there."""
        processes = [process for process in self._of_session(session) if process.is_connected]
        workers = sum(process.is_mapped for process in processes)
        for process in processes:
            with suppress(ProtocolError):  # a client that does not read loses its connection elsewhere
                process.channel.add(protocol.WORKERS, workers, count=session.channel is not None)

    def _of_session(self, session: object) -> list[Process]:
        return [*self._of.get(session, ())]

    # The end of a connection, a process, a session.

    def note_closed(self, process: Process) -> None:
        """Note that a process has closed its side of its connection; no message of it is left."""
        process.is_closed = True
        self._note_leaving(process)

    def _note_end(self, process: Process) -> None:
        """Note that the kernel shows the end of a process."""
        process.has_ended = True
        self._selector.unregister(process.pidfd)
        self._note_leaving(process)

    def _note_leaving(self, process: Process) -> None:
        if not process.is_leaving:
            process.is_leaving = True
            self._leaving.append(process)
            if process.is_connected:  # else each pass would find anew that the connection has ended
                self._selector.unregister(process.channel.sock)

    def let_leave(self, seconds: float) -> None:
        """Act on ended processes and connections, for so long at most."""
        end_s = time.monotonic() + seconds
        while self._leaving:
            process = self._leaving.popleft()
            if process.is_leaving:  # else `join` has acted already
                self._leave(process)
                if process.is_leaving:
                    self._leaving.append(process)
            if time.monotonic() >= end_s:
                break

    def _leave(self, process: Process) -> None:
        """Read the last messages of a process, or act on its end: then it `is_leaving` no more."""
        has_more = process.is_connected and not process.is_closed and process.reads_left > 0
        if process.has_ended and has_more and (process.channel.has_received or process.channel.is_readable):
            process.reads_left -= 1
            self._read(process)
            return
        process.is_leaving = False
        self._trying(partial(self.end if process.has_ended else self.disconnect, process))

    def disconnect(self, process: Process) -> None:
        """Close a connection. The process may still copy, so its rows are free only when it has ended."""
        if not process.is_connected:
            return
        asks_reset = process.session is not None and process.role == "scheduler" and _asks_reset(process.channel)
        process.is_connected = False
        if not process.is_leaving:
            with suppress(KeyError):  # it was, and its connection is watched no more
                self._selector.unregister(process.channel.sock)
        del self.connected[process.channel]
        process.channel.close()
        session = process.session
        if session is None:
            self._forget(process)
            return
        if session.channel is process.channel:
            session.channel = None
        if asks_reset:
            self._trying(partial(session.host.reset, session))
        self.tell_workers(session)
        if process.role == "scheduler" and not session.has_rows:  # none of its processes copies
            self._forget(process)
            session.close()
            self._end_if_left(session)

    def end(self, process: Process) -> None:
        """Forget a process that has ended or uses no row any more, and its session if no other process is left."""
        if process not in self._all:
            return  # this pass has forgotten it already: it has said BYE
        self.disconnect(process)
        self._forget(process)
        if process.session is not None:
            self._trying(process.session.host.look_for_resets)
            self._end_if_left(process.session)

    def _end_if_left(self, session: Session) -> None:
        """End a session if none of its processes is left."""
        if session not in self._of:
            had_rows = session.has_rows
            if session.host.sessions.get(session.name) is session:
                del session.host.sessions[session.name]
            session.close()
            _log.info("session '%s' has ended%s", session.name, ", its rows are free" if had_rows else "")

    def _forget(self, process: Process) -> None:
        if process not in self._all:
            return
        del self._all[process]
        self._unknown.pop(process, None)
        if process.session is not None:
            members = self._of[process.session]
            members.remove(process)
            if not members:
                del self._of[process.session]
        process.is_leaving = False
        if not process.has_ended:
            self._selector.unregister(process.pidfd)
        os.close(process.pidfd)

    def close(self) -> None:
        """Say goodbye to all, and forget them."""
        for process in list(self.connected.values()):
            with suppress(TieredKVError):
                process.channel.add(protocol.GOODBYE)
                process.channel.flush()
            self.disconnect(process)
        for process in list(self._all):
            self._forget(process)


def _asks_reset(channel: Channel) -> bool:
    """Return whether a RESET is among the unread messages of the other side."""
    with suppress(TieredKVError):
        return any(each.code == protocol.RESET for each in channel.receive(PACKETS_A_TURN * READS_AFTER_END_MAX))
    return False
