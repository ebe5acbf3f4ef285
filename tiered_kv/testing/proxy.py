"""A TCP proxy that a test puts in front of a real server, to give its connections the faults of networks.

    with FaultProxy(("127.0.0.1", server_port)) as proxy:
        client = connect(proxy.host, proxy.port)
        proxy.set_faults(Faults(latency_s=0.1))
        proxy.set_faults(Faults(flip_at_byte=1000), Direction.TO_CLIENT)
        proxy.set_faults(NO_FAULTS)
        proxy.reset_connections()

A fault applies to open and new connections until it is switched off. `counts()` says how often each fault occurred.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Self

_CALL_TIMEOUT_S: Final = 60.0
_CHUNK_BYTES: Final = 64 << 10
_CHUNKS_IN_FLIGHT_MAX: Final = 64  # received and not delivered, in one direction
_PACE_S: Final = 0.01  # the longest sleep before a change of faults is seen
_LINGER_RESET: Final = struct.pack("ii", 1, 0)  # closing sends RST instead of FIN; socket(7)
_COUNTS: Final = (
    "connections", "server_refused", "bytes_to_server", "bytes_to_client",
    "stalled", "cut", "flipped", "reset", "half_closed", "broken",
)  # fmt: skip


class Direction(Enum):
    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one direction. Offsets count on each connection, from the call of `set_faults`.

    Args:
        latency_s: A delay of each byte; the bandwidth does not change.
        bytes_per_s: The bandwidth of each connection; None for no limit.
        stalls: The proxy takes bytes, and does not deliver them until this fault is switched off.
        cut_after_bytes: Bytes after which each connection ends, a new connection too.
        cut_by_reset: The cut sends RST in place of FIN. (TCP itself answers data that comes after a FIN with RST.)
        flip_at_byte: Flips the lowest bit of the byte at this offset.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    stalls: bool = False
    cut_after_bytes: int | None = None
    cut_by_reset: bool = False
    flip_at_byte: int | None = None


NO_FAULTS: Final = Faults()


class FaultProxy:
    """Listens on a port of the loopback interface, and passes bytes to a server and back.

    It runs an event loop on one thread; any other thread may call. `close` leaves no thread, socket or connection.

    Raises:
        OSError: No port is free.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.host = "127.0.0.1"
        self._faults: dict[Direction, Faults] = dict.fromkeys(Direction, NO_FAULTS)
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._bound = _bound_socket(self.host, 0)
        self.port: int = self._bound.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._connections: set[_Connection] = set()  # the loop's thread owns this set, and the listener
        self._listener: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self.refuse_connections(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_faults(self, faults: Faults, *directions: Direction) -> None:
        """Replace the faults of `directions`, by default of both, on open and new connections."""

        async def switch() -> None:
            for direction in directions or Direction:
                self._faults[direction] = faults
                for connection in self._connections:
                    connection.pipes[direction].switch(faults)

        self._call(switch())

    def counts(self) -> Mapping[str, int]:
        """Return the counts of events.

        They are `connections`, `server_refused`, `bytes_to_server`, `bytes_to_client`, `stalled`, `cut`, `flipped`,
        `reset`, `half_closed`, and `broken`: one end reset the connection. Bytes count when they are delivered. A flip
        counts once for each connection and setting, a half-close once for each connection.
        """
        return dict(self._counts)

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def refuse_connections(self, refuses: bool = True) -> None:
        """Refuse new connections, or accept them again. Open ones stay open, and the proxy keeps its port."""
        self._call(self._refuse(refuses))

    def reset_connections(self) -> None:
        """End every connection by RST, on both sides."""
        self._call(self._for_each(lambda connection: connection.end("reset", by_reset=True)))

    def half_close(self, direction: Direction) -> None:
        """End the stream of one direction on every connection; the other direction continues."""
        self._call(self._for_each(lambda connection: connection.pipes[direction].half_close()))

    def close(self) -> None:
        """End every connection and the thread. May be repeated."""
        if self._loop.is_closed():
            return
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_CALL_TIMEOUT_S)

    # The loop's thread.

    async def _refuse(self, refuses: bool) -> None:
        if self._listener is not None:
            if not refuses:
                return
            self._listener.close()
            self._listener = None
        self._bound.close()
        # A bound socket that does not listen keeps the port, and refuses.
        self._bound = _bound_socket(self.host, self.port)
        if not refuses:
            self._listener = await asyncio.start_server(self._accept, sock=self._bound)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._counts["connections"] += 1
        connection = _Connection(reader, writer, self._faults, self._counts)
        connection.task = self._loop.create_task(connection.run(self.server))
        self._connections.add(connection)

        def forget(_: asyncio.Task[None]) -> None:
            connection.close()  # here, because a task that is cancelled before it begins closes nothing
            self._loop.call_soon(self._connections.discard, connection)  # after asyncio has closed its sockets

        connection.task.add_done_callback(forget)

    async def _for_each(self, act: Callable[[_Connection], None]) -> None:
        for connection in list(self._connections):
            act(connection)

    async def _stop(self) -> None:
        await self._refuse(True)
        self._bound.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # again, for connections accepted meanwhile
            await self._for_each(lambda connection: connection.cancel())
            await asyncio.wait(others)


class _Connection:
    """A client's connection, and the proxy's connection to the server for it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        faults: Mapping[Direction, Faults],
        counts: dict[str, int],
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self.pipes = {direction: _Pipe(self, direction, faults[direction], counts) for direction in Direction}
        self._client = (reader, writer)
        self._writers = [writer]
        self._counts = counts
        self._is_ended = False

    async def run(self, server: tuple[str, int]) -> None:
        """Pass bytes both ways until both ends are done, or `end` is called."""
        try:
            reader, writer = await asyncio.open_connection(*server)
        except OSError:
            self._counts["server_refused"] += 1
            self.end("reset", by_reset=True)
            return
        self._writers.append(writer)
        for each in self._writers:
            each.transport.set_write_buffer_limits(high=0)  # so that `drain` waits until the kernel has all
        async with asyncio.TaskGroup() as group:
            for pipe, source, sink in (
                (self.pipes[Direction.TO_SERVER], self._client[0], writer),
                (self.pipes[Direction.TO_CLIENT], reader, self._client[1]),
            ):
                group.create_task(pipe.read(source))
                group.create_task(pipe.write(sink))

    def end(self, counted_as: str, *, by_reset: bool) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        self._counts[counted_as] += 1
        for writer in self._writers if by_reset else ():
            with contextlib.suppress(OSError):  # that side is closed already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.close()
        self.cancel()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


class _Pipe:
    """One direction of a connection."""

    def __init__(self, connection: _Connection, direction: Direction, faults: Faults, counts: dict[str, int]) -> None:
        self._connection = connection
        self._bytes = f"bytes_{direction.value}"
        self._counts = counts
        self._sink: asyncio.StreamWriter | None = None
        self._is_half_closed = False
        self._in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_IN_FLIGHT_MAX)
        self.switch(faults)

    def switch(self, faults: Faults) -> None:
        self._faults = faults
        self._position = 0  # bytes delivered since the faults were set

    def half_close(self) -> None:
        """End the stream, and drop later bytes."""
        if not self._is_half_closed:
            self._is_half_closed = True
            self._counts["half_closed"] += 1
            self._end_stream()

    async def read(self, source: asyncio.StreamReader) -> None:
        """Receive from the source until its end."""
        loop = asyncio.get_running_loop()
        try:
            while chunk := await source.read(_CHUNK_BYTES):
                await self._in_flight.put((loop.time(), chunk))
        except OSError:  # the source was reset: reset the sink
            self._connection.end("broken", by_reset=True)
        await self._in_flight.put((loop.time(), b""))

    async def write(self, sink: asyncio.StreamWriter) -> None:
        """Deliver bytes when they are due, and then the end of the stream."""
        self._sink = sink
        try:
            while chunk := await self._next_chunk():
                if not self._is_half_closed:
                    await self._deliver(sink, chunk)
        except OSError:  # the sink was reset: reset the source
            self._connection.end("broken", by_reset=True)
        else:
            self._end_stream()

    def _end_stream(self) -> None:
        if self._sink is not None:
            with contextlib.suppress(OSError):
                self._sink.write_eof()

    async def _next_chunk(self) -> bytes:
        """Return the next bytes once they are due and nothing stalls; no bytes at the end."""
        loop = asyncio.get_running_loop()
        read_at_s, chunk = await self._in_flight.get()
        while (early_s := read_at_s + self._faults.latency_s - loop.time()) > 0:
            await asyncio.sleep(min(early_s, _PACE_S))  # short steps, since a test may switch the fault off
        self._counts["stalled"] += self._faults.stalls
        while self._faults.stalls:
            await asyncio.sleep(_PACE_S)
        return chunk

    async def _deliver(self, sink: asyncio.StreamWriter, chunk: bytes) -> None:
        while chunk and not self._is_half_closed:
            faults, begin = self._faults, self._position
            piece = bytearray(chunk[: max(1, int(faults.bytes_per_s * _PACE_S))] if faults.bytes_per_s else chunk)
            if faults.cut_after_bytes is not None:
                del piece[max(0, faults.cut_after_bytes - begin) :]
            self._position += len(piece)
            if faults.flip_at_byte is not None and begin <= faults.flip_at_byte < self._position:
                piece[faults.flip_at_byte - begin] ^= 0x01
                self._counts["flipped"] += 1
            self._counts[self._bytes] += len(piece)  # before the send, so that the receiver finds them counted
            sink.write(piece)
            await sink.drain()
            if faults.cut_after_bytes is not None and begin + len(piece) >= faults.cut_after_bytes:
                self._connection.end("cut", by_reset=faults.cut_by_reset)
                return
            chunk = chunk[len(piece) :]
            if faults.bytes_per_s:
                await asyncio.sleep(len(piece) / faults.bytes_per_s)


def _bound_socket(host: str, port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
