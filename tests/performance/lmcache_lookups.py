"""Lookups of 8,192 tokens by LMCache's own server, run by the Python of its environment: one JSON object.

    ENVIRONMENT/lmcache/bin/python tests/performance/lmcache_lookups.py --requests 500

`lmcache server` runs with its defaults, but lets engines copy (`engine_driven`), so that it needs no GPU. All tokens
are stored. A lookup is what its adapter of vLLM does: LOOKUP, then WAIT_PREFETCH_STATUS until its answer comes. A pause
between lookups stands for an engine's step. `host_cache.py --lmcache` runs this beside our server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENS, PROMPTS = 8192, 32
CHUNK_TOKENS = 256
STEP_S = 0.003
START_S = 90.0
MODEL = "m"
QUIET = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
"""It sends nothing to its makers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    arguments = parser.parse_args()
    port, http_port = _free_port(), _free_port()
    program = [str(Path(sys.executable).with_name("lmcache")), "server", "--port", str(port)]
    program += ["--http-port", str(http_port), "--supported-transfer-mode", "engine_driven", "--l1-size-gb", "1"]
    program += ["--no-l1-use-lazy", "--shm-name", f"lookups_{port}", "--eviction-policy", "LRU"]
    program.append("--disable-observability")
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=QUIET) as server:
        try:
            print(json.dumps(measure(f"tcp://127.0.0.1:{port}", arguments.requests)))
        finally:
            server.send_signal(signal.SIGTERM)


def measure(url: str, count: int) -> dict[str, object]:
    import zmq
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    with zmq.Context() as context:
        client = RequestClientFactory.create(url, context=context)
        try:
            client.ping(1).result(timeout=START_S)
            prompts = _stored_prompts(client)
            chosen = random.Random(1)
            taken: list[float] = []
            for number in range(count):
                key = _key(chosen.choice(prompts), f"request-{number}")
                began_s = time.perf_counter()
                client.lookup(key, 1).result(timeout=10)
                found = client.wait_prefetch_status(key.request_id, 10.0).result(timeout=10)
                taken.append(time.perf_counter() - began_s)
                assert found == TOKENS // CHUNK_TOKENS, f"found {found} chunks"
                client.free_lookup_locks(key, 1).result(timeout=10)
                client.end_session(key.request_id).result(timeout=10)
                time.sleep(STEP_S)
        finally:
            client.close()
    return {"chunk_tokens": CHUNK_TOKENS, "lookup_s": taken}


def _stored_prompts(client: Any) -> list[list[int]]:  # Any: LMCache's own
    from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload

    layout = RegisterEngineDrivenContextPayload(1, MODEL, 1, 16, 1, 8, "float16", False, CHUNK_TOKENS)
    client.register_kv_cache_engine_driven_context(layout).result(timeout=10)
    numbers = random.Random(2)
    prompts = [[numbers.randrange(32000) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    for number, prompt in enumerate(prompts):
        key = _key(prompt, f"store-{number}", worker=0)
        client.prepare_store(key, 1).result(timeout=10)
        assert client.commit_store(key, 1, b"").result(timeout=10), "a prompt was not stored"
        client.end_session(key.request_id).result(timeout=10)
    return prompts


def _key(tokens: Sequence[int], request_id: str, worker: int | None = None) -> Any:
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

    return IPCCacheServerKey(MODEL, 1, worker, tuple(tokens), 0, len(tokens), request_id, num_kv_readers=1)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
