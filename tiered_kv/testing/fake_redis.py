"""fakeredis behind a TCP socket; import the fixture into a test module."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tiered_kv.testing.server_process import STOP_S_MAX


@pytest.fixture
def fake_redis_url() -> Iterator[str]:
    """The URL of fakeredis on loopback, in this process; skips if fakeredis is not installed."""
    fakeredis = pytest.importorskip("fakeredis", reason="fakeredis is not installed")
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(STOP_S_MAX)
