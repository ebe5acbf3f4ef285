"""The fault proxy causes the faults that a test sets, and no others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.loopback import LoopbackServer
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.proxy import NO_FAULTS, Direction, FaultProxy, Faults

DATA = bytes(range(256)) * 1024


class EchoServer(LoopbackServer):
    """Sends all bytes back."""

    def serve(self, sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(65536):
                sock.sendall(data)


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with EchoServer() as server:
        yield server


@pytest.fixture
def proxy(server: EchoServer) -> Iterator[FaultProxy]:
    with FaultProxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(proxy: FaultProxy, closing: contextlib.ExitStack) -> Connect:
    return lambda: closing.enter_context(socket.create_connection((proxy.host, proxy.port), timeout=60))


def receive(client: socket.socket, size: int) -> bytes:
    """Return `size` bytes, or fewer if the stream ends before."""
    received = bytearray()
    while len(received) < size and (data := client.recv(size - len(received))):
        received += data
    return bytes(received)


def exchange(client: socket.socket, data: bytes) -> bytes:
    """Send bytes from a thread, and return the answer."""
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    try:
        return receive(client, len(data))
    finally:
        sender.join(10)


def test_without_faults_bytes_arrive_as_they_were_sent(proxy: FaultProxy, connect: Connect) -> None:
    clients = [connect() for _ in range(3)]
    assert [exchange(client, DATA) for client in clients] == [DATA] * 3
    counts = proxy.counts()
    assert counts["connections"] == 3
    assert counts["bytes_to_server"] == counts["bytes_to_client"] == 3 * len(DATA)
    assert counts["flipped"] == counts["cut"] == counts["reset"] == counts["stalled"] == 0


def test_the_end_of_a_stream_is_passed_on(proxy: FaultProxy, connect: Connect) -> None:
    client = connect()
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert receive(client, 100) == b"last words"
    wait_until(lambda: proxy.open_connections == 0)


def test_latency_delays_without_taking_bandwidth(proxy: FaultProxy, connect: Connect) -> None:
    client = connect()
    data = 12 * DATA
    proxy.set_faults(Faults(latency_s=0.5), Direction.TO_SERVER)
    begin = time.monotonic()
    assert exchange(client, data) == data
    # It is read in 48 pieces at least. If each waited for the one before, they would take 24 s.
    assert 0.5 <= time.monotonic() - begin < 20.0
    proxy.set_faults(Faults(latency_s=600.0), Direction.TO_SERVER)  # more than the client waits
    proxy.set_faults(NO_FAULTS, Direction.TO_SERVER)
    assert exchange(client, b"x") == b"x"


def test_bandwidth_is_kept(proxy: FaultProxy, connect: Connect) -> None:
    client = connect()
    proxy.set_faults(Faults(bytes_per_s=1_000_000), Direction.TO_CLIENT)
    begin = time.monotonic()
    assert exchange(client, DATA) == DATA
    assert time.monotonic() - begin >= 0.25


def test_a_stall_lasts_until_it_is_switched_off(proxy: FaultProxy, connect: Connect) -> None:
    client = connect()
    proxy.set_faults(Faults(stalls=True), Direction.TO_CLIENT)
    client.sendall(b"hello")
    wait_until(lambda: proxy.counts()["stalled"])
    client.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(60)
    proxy.set_faults(NO_FAULTS, Direction.TO_CLIENT)
    assert receive(client, 5) == b"hello"


@pytest.mark.parametrize("direction", Direction)
def test_one_bit_is_flipped_at_an_offset_of_one_direction(
    proxy: FaultProxy, connect: Connect, direction: Direction
) -> None:
    client = connect()
    assert exchange(client, DATA) == DATA
    proxy.set_faults(Faults(flip_at_byte=100_000), direction)
    damaged = bytearray(DATA)
    damaged[100_000] ^= 0x01
    assert exchange(client, DATA) == damaged
    assert exchange(client, DATA) == DATA
    assert exchange(connect(), DATA) == damaged
    assert proxy.counts()["flipped"] == 2


@pytest.mark.parametrize("by_reset", [False, True])
def test_a_connection_is_cut_after_exactly_so_many_bytes(proxy: FaultProxy, connect: Connect, by_reset: bool) -> None:
    client = connect()
    proxy.set_faults(Faults(cut_after_bytes=1000, cut_by_reset=by_reset), Direction.TO_CLIENT)
    client.sendall(DATA[:5000])
    if by_reset:
        with pytest.raises(ConnectionResetError):
            receive(client, 5000)
    else:
        assert receive(client, 5000) == DATA[:1000]
    assert (proxy.counts()["bytes_to_client"], proxy.counts()["cut"]) == (1000, 1)
    proxy.set_faults(NO_FAULTS, Direction.TO_CLIENT)
    assert exchange(connect(), DATA) == DATA


def test_connections_are_reset_and_new_ones_work(proxy: FaultProxy, connect: Connect) -> None:
    client = connect()
    assert exchange(client, b"x") == b"x"
    proxy.reset_connections()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert exchange(connect(), DATA) == DATA
    assert proxy.counts()["reset"] == 1


def test_a_half_closed_direction_ends_and_the_other_goes_on(proxy: FaultProxy, connect: Connect) -> None:
    client = connect()
    assert exchange(client, b"x") == b"x"
    proxy.half_close(Direction.TO_CLIENT)
    assert client.recv(1) == b""
    client.sendall(b"one-way")
    wait_until(lambda: proxy.counts()["bytes_to_server"] == 8)
    assert proxy.counts()["half_closed"] == 1


def test_connections_are_refused_and_taken_again_on_the_same_port(proxy: FaultProxy, connect: Connect) -> None:
    before = connect()
    assert exchange(before, b"x") == b"x"
    proxy.refuse_connections()
    with pytest.raises(ConnectionRefusedError):
        connect()
    assert exchange(before, b"x") == b"x"
    proxy.refuse_connections(False)
    assert exchange(connect(), DATA) == DATA


def test_the_client_is_reset_if_the_server_refuses() -> None:
    with socket.socket() as unlistening:  # it keeps the port, and refuses
        unlistening.bind(("127.0.0.1", 0))
        with FaultProxy(unlistening.getsockname()) as proxy:
            with (
                pytest.raises(ConnectionResetError),
                socket.create_connection((proxy.host, proxy.port), timeout=60) as client,
            ):
                client.recv(1)
            assert proxy.counts()["server_refused"] == 1


def test_it_closes_amid_a_stall_and_leaves_nothing_behind(server: EchoServer) -> None:
    proxy = FaultProxy(("127.0.0.1", server.port))
    proxy.set_faults(Faults(stalls=True), Direction.TO_CLIENT)
    with socket.create_connection((proxy.host, proxy.port), 10) as client:
        client.sendall(DATA)
        wait_until(lambda: proxy.counts()["stalled"])
        proxy.close()
        proxy.close()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
