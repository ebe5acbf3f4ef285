"""A client of a cluster's memory: a process whose stack loads and stores blocks at a steady pace, as an engine's does.

`cluster_memory` starts it with `Child`. It prints a line of JSON for each `WINDOW_S`: a `Window`. A line of its input
says which slots a fault is about to hit; the end of its input ends it.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from redis.crc import key_slot

from tiered_kv.base import make_offload_key
from tiered_kv.stack.open import Stack, open_stack

WINDOW_S: Final = 0.25
NAME: Final = "memory.invalid"
"""The only name of a server that the clients' stacks have."""
_BATCH: Final = 48
_FRESH: Final = 4  # new blocks in each round, besides the missing ones
_MISSED_MAX: Final = 3
_PRIMARY_BLOCKS: Final = 8 * _BATCH


@dataclass(slots=True)
class Window:
    """What a client did in a while. Blocks are `hit` if the fault concerns their slots, and `other` if it does not."""

    seconds: float = 0.0
    other_wanted: int = 0
    other_loaded: int = 0
    hit_wanted: int = 0
    hit_loaded: int = 0
    stored: int = 0
    wrong: int = 0
    load_s_max: float = 0.0
    store_s_max: float = 0.0
    """The longest call of `get` and of `put`."""

    def __add__(self, other: Window) -> Window:
        summed = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        for name in ("load_s_max", "store_s_max"):
            summed[name] = max(getattr(self, name), getattr(other, name))
        return Window(**summed)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    addresses_file: str
    """Has host:port of all servers, one in a line. `NAME` leads to these, as the name of a service does."""
    label: str
    block_bytes: int
    blocks: int
    """How many blocks it loads again and again; more than its primary tier holds."""
    rounds_per_s: float
    load_s: float
    """How long a `get` waits."""
    tier: dict[str, object]
    """Further settings of the tier."""


class Client:
    def __init__(self, stack: Stack, settings: ClientSettings) -> None:
        self._stack = stack
        self._settings = settings
        self._keys = [f"{settings.label}/{number}".encode() for number in range(settings.blocks)]
        self._memory = np.empty((_BATCH + _FRESH, settings.block_bytes), np.uint8)
        self._noise = np.random.default_rng(0).integers(0, 256, settings.block_bytes, np.uint8)
        self._sums: dict[bytes, int] = {}
        self._hit: set[bytes] = set()
        self._at = 0
        self._fresh = 0
        self.window = Window()

    def store_all(self) -> None:
        for start in range(0, len(self._keys), _BATCH):
            self._store(self._keys[start : start + _BATCH])
        assert self._stack.flush(60.0)

    def expect(self, prefix: bytes, ranges: Sequence[Sequence[int]]) -> None:
        """Count blocks in these slots on their own from now on; their names in the servers begin with `prefix`."""
        slots = {slot for first, last in ranges for slot in range(first, last + 1)}
        self._hit = {key for key in self._keys if key_slot(prefix + make_offload_key(key, 0)) in slots}

    def step(self) -> None:
        """Load a batch, compute what is missing, and store that and a few new blocks."""
        batch = [self._keys[(self._at + each) % len(self._keys)] for each in range(_BATCH)]
        self._at += _BATCH
        # A `get` ends at the first missing block, as an engine does. So the blocks of a dead server come last.
        batch.sort(key=self._hit.__contains__)
        missing = self._load(batch)
        fresh = [f"{self._settings.label}/fresh {self._fresh + each}".encode() for each in range(_FRESH)]
        self._fresh += _FRESH
        self._store(missing + fresh)

    def _load(self, batch: list[bytes]) -> list[bytes]:
        """Return the blocks that are missing. After `_MISSED_MAX` misses in a row, the rest counts as missing."""
        missing: list[bytes] = []
        at = missed = 0
        while at < len(batch) and missed < _MISSED_MAX:
            wanted = batch[at:]
            began_s = time.monotonic()
            loaded = self._stack.get(wanted, self._memory[: len(wanted)], self._settings.load_s)
            self.window.load_s_max = max(self.window.load_s_max, time.monotonic() - began_s)
            for key, block in zip(wanted[:loaded], self._memory, strict=False):
                self.window.wrong += xxhash.xxh3_64_intdigest(block.data) != self._sum_of(key)
            self._count(wanted[:loaded], 1)
            self._count(wanted[loaded : loaded + 1], 0)
            missing += wanted[loaded : loaded + 1]
            missed = 1 if loaded else missed + 1
            at += loaded + 1
        self._count(batch[at:], 0)
        return missing + batch[at:]

    def _count(self, keys: Sequence[bytes], is_loaded: int) -> None:
        hit = sum(key in self._hit for key in keys)
        self.window.hit_wanted += hit
        self.window.hit_loaded += hit * is_loaded
        self.window.other_wanted += len(keys) - hit
        self.window.other_loaded += (len(keys) - hit) * is_loaded

    def _store(self, keys: Sequence[bytes]) -> None:
        for key, block in zip(keys, self._memory, strict=False):
            block[:] = self._content(key)
        began_s = time.monotonic()
        self.window.stored += self._stack.put(keys, self._memory[: len(keys)])
        self.window.store_s_max = max(self.window.store_s_max, time.monotonic() - began_s)

    def _content(self, key: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return the bytes of a block; those of two keys differ everywhere."""
        digest = xxhash.xxh3_128_digest(key)
        content = np.roll(self._noise, int.from_bytes(digest) % len(self._noise))
        content[: len(digest)] = np.frombuffer(digest, np.uint8)
        return content

    def _sum_of(self, key: bytes) -> int:
        if key not in self._sums:
            self._sums[key] = xxhash.xxh3_64_intdigest(self._content(key).data)
        return self._sums[key]


def main() -> None:
    """Run a client; its only argument is `ClientSettings` in JSON. Printed first: "stored"."""
    settings = ClientSettings(**json.loads(sys.argv[1]))
    config = {
        "namespace": {"model": "cluster"},
        "block": {"bytes": settings.block_bytes},
        "primary": {"capacity": _PRIMARY_BLOCKS * settings.block_bytes},
        "secondary": [{"type": "redis", "mode": "cluster", "nodes": [f"{NAME}:6379"], **settings.tier}],
    }
    _resolve_by(Path(settings.addresses_file))
    with open_stack(config) as stack:
        client = Client(stack, settings)
        client.store_all()
        print("stored", flush=True)
        began_s = next_s = time.monotonic()
        while (line := _line_of_input()) != "":
            if line is not None:
                told = json.loads(line)
                client.expect(told["prefix"].encode(), told["ranges"])
            client.step()
            next_s = max(next_s + 1 / settings.rounds_per_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
            if (seconds := time.monotonic() - began_s) >= WINDOW_S:
                client.window.seconds = seconds
                print(json.dumps(asdict(client.window)), flush=True)
                client.window, began_s = Window(), began_s + seconds


def _resolve_by(file: Path) -> None:
    """Let `NAME` have the addresses in a file, in this process."""
    look_up = socket.getaddrinfo

    def looked_up(host: Any, port: Any, *more: Any, **named: Any) -> Any:  # Any: as the function that it replaces
        if host != NAME:
            return look_up(host, port, *more, **named)
        if named.get("flags"):
            raise socket.gaierror("a name")
        pairs = (line.rpartition(":") for line in file.read_text().split())
        return [each for host, _, port in pairs for each in look_up(host, int(port), type=socket.SOCK_STREAM)]

    socket.getaddrinfo = looked_up


def _line_of_input() -> str | None:
    """Return the next line; "" at the end, None if there is none yet."""
    return sys.stdin.readline() if select.select([sys.stdin], [], [], 0.0)[0] else None
