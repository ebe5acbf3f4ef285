"""A small server on loopback, and a tier for it: an example of a network tier."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence

from tests.support.loopback import LoopbackServer
from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.blocking import BlockingTier
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, encode_record

LOOKUP_S = 0.2
NAMESPACE = bytes(16)


class KeyValueServer(LoopbackServer):
    """Keeps values by name. Requests and answers are lines; a value follows the line of PUT or of the answer to GET."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        values = self.values
        with contextlib.suppress(ValueError), sock.makefile("rb") as received:
            for line in iter(received.readline, b""):
                match line.split():
                    case [b"PUT", name, length]:
                        value = received.read(int(length))
                        if len(value) == int(length):
                            values.setdefault(name, value)
                        sock.sendall(b"OK\n")
                    case [b"GET", name]:
                        sock.sendall(b"%d\n%b" % (len(values.get(name, b"")), values.get(name, b"")))
                    case [b"HAS", name]:
                        sock.sendall(b"%d\n" % (name in values))
                    case [b"DEL", name]:
                        values.pop(name, None)
                        sock.sendall(b"OK\n")
                    case _:
                        return


class Connection:
    """A connection to the server. Every call ends by its deadline."""

    def __init__(self, address: tuple[str, int], deadline: float) -> None:
        self._socket = socket.create_connection(address, _left_s(deadline))

    def ask(self, request: bytes, deadline: float) -> bytes:
        """Send a request and return the line of the answer."""
        self._socket.settimeout(_left_s(deadline))
        self._socket.sendall(request)
        line = b""
        while not line.endswith(b"\n"):
            line += self.receive(1, deadline)
        return line[:-1]

    def receive(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            self._socket.settimeout(_left_s(deadline))
            received = self._socket.recv(count - len(data))
            if not received:
                raise ConnectionResetError("the server closed the connection")
            data += received
        return data

    def close(self) -> None:
        self._socket.close()


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    return left_s


class KeyValueTier(BlockingTier):
    """Keeps blocks in the `KeyValueServer` at an address. A subclass may make single steps faulty."""

    def __init__(self, spec: object, view: memoryview, address: tuple[str, int]) -> None:
        super().__init__(spec, view, "key-value", threads=2, lookup_timeout_s=LOOKUP_S, shutdown_timeout_s=1.0)
        self._address = address
        self._idle: list[Connection] = []

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        deadline = self.deadline()
        with self.connection(deadline) as connection:
            for key, block in zip(keys, blocks, strict=True):
                header, payload = encode_record(key, block, NAMESPACE)
                record = bytes(header) + bytes(payload)
                answer = connection.ask(b"PUT %b %d\n%b" % (wire_name(key), len(record), record), deadline)
                if answer != b"OK":
                    raise ConnectionError("invalid answer")
        return ALL_DONE

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        deadline = self.deadline()
        loaded = []
        with self.connection(deadline) as connection:
            for key, block in zip(keys, blocks, strict=True):
                length = int(connection.ask(b"GET %b\n" % wire_name(key), deadline))
                if not 0 <= length <= HEADER_BYTES + self.block_bytes:
                    raise ConnectionError("invalid length")
                record = connection.receive(length, deadline)
                if self.accepts(record, key, block):
                    loaded.append(key)
                elif record:
                    self.drop(connection, key, deadline)
        return Outcome(loaded, "checksum")

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        deadline = time.monotonic() + LOOKUP_S
        with self.connection(deadline) as connection:
            return [connection.ask(b"HAS %b\n" % wire_name(key), deadline) == b"1" for key in keys]

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def deadline(self) -> float:
        return self.part_deadline

    def accepts(self, record: bytes, key: OffloadKey, block: memoryview) -> bool:
        status = decode_record(record[:HEADER_BYTES], record[HEADER_BYTES:], key, block, NAMESPACE)
        return status is RecordStatus.OK

    def drop(self, connection: Connection, key: OffloadKey, deadline: float) -> None:
        connection.ask(b"DEL %b\n" % wire_name(key), deadline)

    @contextlib.contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """Lend a connection for a `with` statement; close it if that fails."""
        connection = self._idle.pop() if self._idle else Connection(self._address, deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)


def wire_name(key: OffloadKey) -> bytes:
    """Return a block's name at the server."""
    return key.hex().encode()
