"""Servers that the tests start come up, whatever others on the machine listen on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tiered_kv.testing.redis_servers import RedisServer


@pytest.mark.slow
@pytest.mark.parametrize("above", [0, 10_000], ids=["its port", "its bus"])
def test_a_member_of_a_cluster_takes_other_ports_if_one_was_taken(tmp_path: Path, above: int) -> None:
    server = RedisServer(tmp_path, ("--cluster-enabled", "yes", "--cluster-config-file", "nodes"), has_bus=True)
    with socket.socket() as other:  # a port that was found free may be taken before it is used
        other.bind(("127.0.0.1", 0))
        taken = server.port = other.getsockname()[1] - above
        server.start()
        try:
            assert server.port != taken
            assert server.call("PING") == b"+PONG\r\n"
        finally:
            server.kill()
