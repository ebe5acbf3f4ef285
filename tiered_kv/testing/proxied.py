"""A connection that passes through the fault proxy, and what is done to the bytes of either direction."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_CHUNK_BYTES: Final = 64 << 10
_CHUNKS_ON_THE_WAY_MAX: Final = 64
_PACE_S: Final = 0.01
_LINGER_RESET: Final = struct.pack("ii", 1, 0)  # close() sends RST instead of FIN; socket(7)


class Direction(Enum):
    """Which way bytes go."""

    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


@dataclass(frozen=True, slots=True)
class Faults:
    """What is done to the bytes of one direction. Offsets count from when the faults are set, on each connection.

    Args:
        latency_s: How much later each byte arrives; the bandwidth does not change.
        bytes_per_s: The bandwidth of each connection; None for no limit.
        stalls: Bytes are accepted, but do not arrive until this is switched off.
        cut_after_bytes: The connection ends when so many bytes have arrived; a new one ends likewise.
        cut_by_reset: It ends by RST in place of FIN. (TCP itself sends RST to an end that sends after a FIN.)
        flip_at_byte: The lowest bit of the byte at this offset is flipped.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    stalls: bool = False
    cut_after_bytes: int | None = None
    cut_by_reset: bool = False
    flip_at_byte: int | None = None


NO_FAULTS: Final = Faults()


class Connection:
    """A client's connection, and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, faults: Mapping[Direction, Faults], counts: Counter[str]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._client = client
        self._server = socket.socket()
        self._counts = counts
        self._ended = asyncio.Event()
        _prepare(client)
        self.pipes = {
            Direction.TO_SERVER: _Pipe(self, client, self._server, faults[Direction.TO_SERVER], "to_server", counts),
            Direction.TO_CLIENT: _Pipe(self, self._server, client, faults[Direction.TO_CLIENT], "to_client", counts),
        }

    async def run(self, server: tuple[str, int]) -> None:
        """Pass bytes both ways until both ends are done, or the connection is ended."""
        try:
            self._server.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(self._server, server)
            except OSError:
                self._counts["server_refused"] += 1
                self.end("reset", by_reset=True)
                return
            _prepare(self._server)
            pumps = [asyncio.ensure_future(pipe.run()) for pipe in self.pipes.values()]
            ended = asyncio.ensure_future(self._ended.wait())
            both = asyncio.ensure_future(asyncio.gather(*pumps, return_exceptions=True))
            try:
                await asyncio.wait((both, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    await cancel(pump)
                await cancel(both)
                await cancel(ended)
        finally:
            self.close()

    def close(self) -> None:
        """Close both sockets."""
        self._ended.set()
        self._client.close()
        self._server.close()

    def end(self, counted_as: str, *, by_reset: bool) -> None:
        """End both sides."""
        if self._ended.is_set():
            return
        self._counts[counted_as] += 1
        if by_reset:
            for side in (self._client, self._server):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self._ended.set()


class _Pipe:
    """One direction of a connection."""

    def __init__(
        self,
        connection: Connection,
        source: socket.socket,
        sink: socket.socket,
        faults: Faults,
        name: str,
        counts: Counter[str],
    ) -> None:
        self._connection = connection
        self._source = source
        self._sink = sink
        self._name = name
        self._counts = counts
        self._is_half_closed = False
        self._is_moving = asyncio.Event()
        self._on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_ON_THE_WAY_MAX)
        self.switch(faults)

    def switch(self, faults: Faults) -> None:
        """Apply `faults` from now on; offsets begin at 0."""
        self._faults = faults
        self._position = 0
        (self._is_moving.clear if faults.stalls else self._is_moving.set)()

    def half_close(self) -> None:
        """Send the end of the stream, and discard later bytes."""
        if not self._is_half_closed:
            self._is_half_closed = True
            self._counts["half_closed"] += 1
            with contextlib.suppress(OSError):
                self._sink.shutdown(socket.SHUT_WR)

    async def run(self) -> None:
        """Pass bytes on until the source ends; then end the sink's stream."""
        reader = asyncio.ensure_future(self._read())
        try:
            while (chunk := await self._next_chunk()) is not None:
                if not self._is_half_closed:
                    await self._pass_on(chunk)
            with contextlib.suppress(OSError):
                self._sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._connection.end("broken", by_reset=True)
        finally:
            await cancel(reader)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while chunk := await loop.sock_recv(self._source, _CHUNK_BYTES):
                await self._on_the_way.put((loop.time(), chunk))
        except OSError:  # the source was reset: so is the sink
            self._connection.end("broken", by_reset=True)
        await self._on_the_way.put((loop.time(), b""))

    async def _next_chunk(self) -> bytes | None:
        """Return the next bytes that are due, None at the end."""
        loop = asyncio.get_running_loop()
        read_at_s, chunk = await self._on_the_way.get()
        while (early_s := read_at_s + self._faults.latency_s - loop.time()) > 0:
            await asyncio.sleep(min(early_s, _PACE_S))  # in steps: the fault may be switched off meanwhile
        if not self._is_moving.is_set():
            self._counts["stalled"] += 1
            await self._is_moving.wait()
        return chunk or None

    async def _pass_on(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            faults = self._faults
            piece = view[: max(1, int(faults.bytes_per_s * _PACE_S))] if faults.bytes_per_s else view
            if faults.cut_after_bytes is not None:
                piece = piece[: max(0, faults.cut_after_bytes - self._position)]
            begin = self._position
            self._position += len(piece)
            await self._send(piece, None if faults.flip_at_byte is None else faults.flip_at_byte - begin)
            if faults.cut_after_bytes is not None and begin + len(piece) >= faults.cut_after_bytes:
                self._connection.end("cut", by_reset=faults.cut_by_reset)
                return
            view = view[len(piece) :]
            if faults.bytes_per_s:
                await asyncio.sleep(len(piece) / faults.bytes_per_s)

    async def _send(self, piece: memoryview, flip_at: int | None) -> None:
        data: bytes | bytearray | memoryview = piece
        if flip_at is not None and 0 <= flip_at < len(piece):
            data = bytearray(piece)
            data[flip_at] ^= 0x01
            self._counts["flipped"] += 1
        self._counts[f"bytes_{self._name}"] += len(piece)  # first: the receiver may ask for the count
        await asyncio.get_running_loop().sock_sendall(self._sink, data)


async def cancel(task: asyncio.Future[Any] | None) -> None:
    """Cancel a task and wait until it has ended."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _prepare(side: socket.socket) -> None:
    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the proxy adds no delay of its own
