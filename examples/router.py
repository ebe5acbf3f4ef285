"""A router that brings blocks into memory while their request still waits.

In a clone:

    pip install '.[events,metrics]'
    python examples/router.py

The router knows by events (`events.py`) which blocks the server has on its disk only. It asks the server to prefetch
them while the request is in the router's queue. Then the server's memory serves the request.
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request

import numpy as np
import zmq
from events import STACK, Router

import tiered_kv


def call(server: str, method: str, path: str, asked: object = None) -> dict[str, object]:
    """Call the server; with `metrics.token` in its stack, the header Authorization is needed, too."""
    headers = {"Content-Type": "application/json"}
    body = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(f"http://{server}{path}", body, headers, method=method)
    with urllib.request.urlopen(request, timeout=5.0) as answer:
        return json.load(answer)


def prefetch(router: Router, server: str, hashes: list[int], until_s: float = 10.0) -> str | None:
    """Ask for the blocks that the server has, and not in memory; return the prefetch's id."""
    in_memory = router.tiers.get("CPU", set())
    wanted = [each for each in hashes if each not in in_memory and each in router.tiers.get("nvme", ())]
    if not wanted:
        return None
    return str(call(server, "POST", "/prefetch", {"block_hashes": wanted, "until": until_s})["id"])


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        STACK["secondary"][0]["path"] = f"{directory}/kv"
        with tiered_kv.open_stack({**STACK, "metrics": {"listen": "127.0.0.1:0"}}) as stack:
            server = f"127.0.0.1:{stack.server.port}"
            router = Router(stack.events.publish_address, stack.events.replay_address)
            keys = [f"block-{number:03}".encode() for number in range(40)]
            stack.put(keys, np.zeros((len(keys), 64 << 10), np.uint8))
            stack.flush()
            router.follow(lambda: router.counts() == {"CPU": 16, "nvme": 40})

            # A request comes for two blocks that are on the disk only: the router asks for them, and lets it wait.
            hash_of = {key: int.from_bytes(key[-8:], "big") for key in keys}
            needed = [key for key in keys if hash_of[key] not in router.tiers["CPU"]][:2]
            name = prefetch(router, server, [hash_of[key] for key in needed])
            while (found := call(server, "GET", f"/prefetch/{name}"))["coming"]:
                time.sleep(0.005)
            print("brought to memory:", found["in_memory"])

            received = tiered_kv.Received()
            stack.get(needed, received=received)
            print("served by:", received.blocks)
            print("used:", call(server, "DELETE", f"/prefetch/{name}")["used"])
            zmq.Context.instance().destroy(linger=0)


if __name__ == "__main__":
    main()
