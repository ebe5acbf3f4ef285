"""A TCP proxy that a test puts before a real server, to give its connections the faults of networks.

    with FaultProxy(("127.0.0.1", server_port)) as proxy:
        client = connect(proxy.host, proxy.port)
        proxy.to_client = Faults(latency_s=0.1)      # from now on, on every connection
        proxy.to_client = Faults(flip_at_byte=1000)  # counted from here, on every connection
        proxy.to_client = NO_FAULTS
        proxy.reset_connections()

`to_server` and `to_client` are the two directions. Nothing is random: a fault lasts from when it is
switched on until it is switched off, and `counts()` says how often it occurred.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tiered_kv.testing.proxied import NO_FAULTS, Connection, Direction, Faults, cancel

__all__ = ["NO_FAULTS", "Direction", "FaultProxy", "Faults"]

T = TypeVar("T")

_CALL_TIMEOUT_S: Final = 60.0


class FaultProxy:
    """Listens on a port of the loopback interface, and passes bytes to a server and back.

    One thread with an event loop of its own; all methods may be called by any other. When it is closed, no thread,
    socket or connection is left.

    Args:
        server: Host and port of the server.

    Raises:
        OSError: No port is free.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.host = "127.0.0.1"
        self._faults: dict[Direction, Faults] = dict.fromkeys(Direction, NO_FAULTS)
        self._counts: Counter[str] = Counter()
        self._listener = _bound_socket(self.host, 0)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        # Owned by the loop's thread.
        self._connections: set[Connection] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._is_open = True
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._call(self._set_refusing(False))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def to_server(self) -> Faults:
        """The faults of the bytes that clients send."""
        return self._faults[Direction.TO_SERVER]

    @to_server.setter
    def to_server(self, faults: Faults) -> None:
        self.set_faults(Direction.TO_SERVER, faults)

    @property
    def to_client(self) -> Faults:
        """The faults of the bytes that the server sends."""
        return self._faults[Direction.TO_CLIENT]

    @to_client.setter
    def to_client(self, faults: Faults) -> None:
        self.set_faults(Direction.TO_CLIENT, faults)

    def set_faults(self, direction: Direction, faults: Faults) -> None:
        """Switch to `faults` in a direction, on open and future connections."""

        async def switch() -> None:
            self._faults[direction] = faults
            for connection in self._connections:
                connection.pipes[direction].switch(faults)

        self._call(switch())

    def counts(self) -> Mapping[str, int]:
        """Return counts of events so far.

        `connections`, `server_refused`, `bytes_to_server`, `bytes_to_client` (that were passed on), `stalled`, `cut`,
        `flipped` (once a connection and setting), `reset` and `half_closed` (once a connection).
        """

        async def copy() -> dict[str, int]:
            return dict(self._counts)

        names = ("connections", "server_refused", "bytes_to_server", "bytes_to_client")
        kinds = ("stalled", "cut", "flipped", "reset", "half_closed")
        return {**dict.fromkeys(names + kinds, 0), **self._call(copy())}

    @property
    def open_connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    @property
    def is_refusing(self) -> bool:
        """Whether new connections are refused."""
        return self._accepting is None

    def refuse_connections(self, refuses: bool = True) -> None:
        """Refuse new connections, or accept them again. The proxy keeps the port, and open connections stay open."""
        self._call(self._set_refusing(refuses))

    def reset_connections(self) -> None:
        """End every connection by RST, on both sides."""
        self._call(self._for_each(lambda connection: connection.end("reset", by_reset=True)))

    def half_close(self, direction: Direction) -> None:
        """Send the end of the stream to the receiver; the other direction continues."""
        self._call(self._for_each(lambda connection: connection.pipes[direction].half_close()))

    def close(self) -> None:
        """End every connection and the thread. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_CALL_TIMEOUT_S)

    # The loop's thread.

    async def _set_refusing(self, refuses: bool) -> None:
        await cancel(self._accepting)
        self._accepting = None
        self._listener.close()
        # A socket that does not listen keeps the port, and refuses.
        self._listener = _bound_socket(self.host, self.port)
        if not refuses:
            self._listener.listen(128)
            self._accepting = self._loop.create_task(self._accept())

    async def _accept(self) -> None:
        while True:
            accepting = asyncio.ensure_future(self._loop.sock_accept(self._listener))
            try:
                client, _ = await asyncio.shield(accepting)
            except asyncio.CancelledError:
                if not accepting.cancel():  # it has arrived, but is not accepted any more
                    with contextlib.suppress(OSError):
                        accepting.result()[0].close()
                raise
            client.setblocking(False)
            self._counts["connections"] += 1
            connection = Connection(client, self._faults, self._counts)
            self._connections.add(connection)
            connection.task = self._loop.create_task(connection.run(self.server))
            connection.task.add_done_callback(partial(self._forget, connection))

    def _forget(self, connection: Connection, _: asyncio.Task[None]) -> None:
        self._connections.discard(connection)

    async def _for_each(self, act: Callable[[Connection], None]) -> None:
        for connection in list(self._connections):
            act(connection)

    async def _stop(self) -> None:
        await cancel(self._accepting)
        self._listener.close()
        for connection in list(self._connections):
            await cancel(connection.task)
            connection.close()  # a task that is cancelled before it has begun does not close it


def _bound_socket(host: str, port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound
