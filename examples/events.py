"""A router's index of blocks, kept by the events of a stack.

In a clone:

    pip install '.[events]'
    python examples/events.py

The stack stores blocks, runs out of room in its primary tier, and is reset. The subscriber says what it knows of it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from tiered_kv import open_stack

STACK = {
    "namespace": {"model": "example"},
    "block": {"bytes": "64KiB"},
    "primary": {"capacity": "1MiB"},  # 16 blocks
    "secondary": [{"type": "nvme", "capacity": "64MiB"}],
    "events": {"publish": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", "topic": "kv"},
}


class Router:
    """Knows which tier of the server has which blocks, also after a restart of the server."""

    def __init__(self, publish: str, replay: str) -> None:
        self.tiers: dict[str, set[int]] = {}
        self.next_number = 0
        self.last_live = -1
        self.replay = replay
        self.live = connected(zmq.SUB, publish)
        self.live.subscribe(b"kv")
        self.past = connected(zmq.DEALER, replay)
        self.catch_up()  # the events from before

    def follow(self, is_enough: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Read events until that is enough."""
        end_s = time.monotonic() + timeout_s
        while not is_enough() and time.monotonic() < end_s:
            if not self.live.poll(200):
                self.catch_up()  # the last ones may be missing
                continue
            _, number, payload = self.live.recv_multipart()
            live = int.from_bytes(number, "big")
            if live > self.next_number or live <= self.last_live:
                self.catch_up()  # some are missing, or another process sends now, whose clock was set back
            self.last_live = live
            self.note(live, payload)

    def catch_up(self, timeout_s: float = 5.0) -> None:
        """Ask for the events that are missing."""
        self.past.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while self.past.poll(int(1000 * timeout_s)):
            _, _, number, payload = self.past.recv_multipart()
            if not payload:
                return
            self.note(int.from_bytes(number, "big"), payload)
        self.past.close()  # no server answers; a later answer must not be taken for that to the next request
        self.past = connected(zmq.DEALER, self.replay)

    def note(self, number: int, payload: bytes) -> None:
        """Apply one message, unless it is known already."""
        _, events, _ = msgspec.msgpack.decode(payload)
        if number < self.next_number and events[0]["type"] != "AllBlocksCleared":
            return
        self.next_number = number + 1
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.tiers.clear()
                continue
            known = self.tiers.setdefault(event.get("ownership", event["medium"]), set())
            if event["type"] == "BlockStored":
                known.update(event["block_hashes"])
            else:
                known.difference_update(event["block_hashes"])

    def counts(self) -> dict[str, int]:
        return {tier: len(hashes) for tier, hashes in sorted(self.tiers.items())}


def connected(kind: int, address: str) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.connect(address)
    return socket


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        STACK["secondary"][0]["path"] = f"{directory}/kv"
        with open_stack(STACK) as stack:
            router = Router(stack.events.publish_address, stack.events.replay_address)
            keys = [f"block-{number:03}".encode() for number in range(40)]
            blocks = np.zeros((len(keys), 64 << 10), np.uint8)

            stack.put(keys[:10], blocks[:10])
            stack.flush()
            router.follow(lambda: router.counts() == {"CPU": 10, "nvme": 10})
            print("10 blocks stored:", router.counts())

            stack.put(keys, blocks)
            stack.flush()
            router.follow(lambda: router.counts() == {"CPU": 16, "nvme": 40})
            print("40 blocks stored:", router.counts())

            stack.reset_cache()
            router.follow(lambda: not router.tiers)
            print("after a reset:", router.counts())
            zmq.Context.instance().destroy(linger=0)


if __name__ == "__main__":
    main()
