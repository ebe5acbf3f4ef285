"""LMCache's server over an nvme tier: it stores, ends, and a second server finds what the first has stored.

    python examples/lmcache/run.py

Everything it makes goes to ./lmcache-example. LMCache's own client plays the engine.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEQUENCES = 3
CHUNKS = 4  # of each sequence
START_S_MAX = 120.0
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "ERROR"}


def main() -> int:
    found = []
    for name in ("first server", "second server"):
        with server() as (port, http):
            told = lmcache("bench", "server", *client_options(port, http), "--start", "0", "--end", str(SEQUENCES))
            hits = re.findall(rf"/cold\] LOOKUP: (\d+)/{CHUNKS} chunks", told)
            mismatches = told.count("CHECKSUM MISMATCH!")
            time.sleep(1.0)  # LMCache stores in the background
        found.append(sum(map(int, hits)))
        print(f"{name}: {found[-1]} of {SEQUENCES * CHUNKS} chunks found, {mismatches} mismatches")
    return 0 if found == [0, SEQUENCES * CHUNKS] else 1


@contextmanager
def server() -> Iterator[tuple[int, str]]:
    """Run LMCache's server; yield its port and the address of its HTTP interface."""
    Path("lmcache-example").mkdir(exist_ok=True)
    port, http_port = free_port(), free_port()
    command = [
        *("server", "--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
        *("--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"),
        *("--l2-adapter", (HERE / "adapter.json").read_text()),
    ]
    with Path("lmcache-example/server.log").open("ab") as log:
        process = subprocess.Popen([program(), *command], env={**os.environ, **QUIET}, stdout=log, stderr=log)
    try:
        http = f"http://127.0.0.1:{http_port}"
        wait_for(http, process)
        yield port, http
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def wait_for(http: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server answers."""
    end_s = time.monotonic() + START_S_MAX
    while process.poll() is None and time.monotonic() < end_s:
        try:
            urllib.request.urlopen(http, timeout=5.0).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise RuntimeError("the server did not start; see lmcache-example/server.log")


def client_options(port: int, http: str) -> list[str]:
    """Return what LMCache's client is told: where the server is, and a small model's layout."""
    return [
        *("--rpc-url", f"tcp://127.0.0.1:{port}", "--url", http, "--mode", "cpu", "--transfer-mode", "engine_driven"),
        *("--num-tokens", "1024", "--interval", "0.1", "--kvcache-shape-spec", "(2,512,8,4,32):float16:8"),
    ]


def lmcache(*arguments: str) -> str:
    done = subprocess.run(
        [program(), *arguments], env={**os.environ, **QUIET}, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def program() -> str:
    """Return the path of `lmcache`, beside this Python."""
    return str(Path(sys.executable).with_name("lmcache"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
