"""Tenants with a marker in all of their blocks, for tests that nothing of a tenant is left.

`Place.tenant` makes one.
"""

from __future__ import annotations

import hashlib
import io
import json
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.children import Child
from tests.support.stacks import block_hashes, stack_of
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.cli.main import main
from tiered_kv.config.stack_config import load_config
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import Stack, open_stack

BLOCK_BYTES = 4096
MARKER_BYTES = 32
ROUND_BLOCKS = 16
"""Of `store_and_load_until_input`; the stack's memory holds four rounds of them."""
WAIT_S = 120.0
"""For stores to end, and for a block to come: it ends what hangs."""


class Stored:
    """The blocks of a tenant, whose contents begin with its marker."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.marker = hashlib.sha256(tenant.encode()).hexdigest()[:MARKER_BYTES].encode()

    def keys(self, count: int, first: int = 0) -> list[OffloadKey]:
        """Return keys of blocks, the same for all tenants."""
        return [make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0) for number in range(first, first + count)]

    def content(self, key: OffloadKey) -> bytes:
        """Return a block's bytes: the marker and a digest of the key, repeated."""
        line = self.marker + hashlib.sha256(self.marker + key).hexdigest().encode()
        return (line * (BLOCK_BYTES // len(line) + 1))[:BLOCK_BYTES]

    def put(self, stack: Stack, keys: Sequence[OffloadKey]) -> int:
        """Store blocks; return how many the tier stored."""
        blocks = np.frombuffer(b"".join(map(self.content, keys)), np.uint8).reshape(len(keys), BLOCK_BYTES)
        name = stack.tier_names[0]
        before = count_of(stack.counters(), name, "stored_blocks_total")
        stack.put(block_hashes(keys), blocks, timeout=WAIT_S)
        assert stack.flush(WAIT_S), "the stores do not end"
        return count_of(stack.counters(), name, "stored_blocks_total") - before

    def wrong(self, stack: Stack, keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """Load blocks one by one; return how many were loaded, and how many of them had wrong bytes."""
        came = wrong = 0
        out = np.zeros((1, BLOCK_BYTES), np.uint8)
        for key in keys:
            if stack.get(block_hashes([key]), out, WAIT_S):
                came += 1
                wrong += out.tobytes() != self.content(key)
        return came, wrong


class Tenant(Stored):
    """A tenant's stacks over a tier; their file is in `folder`."""

    def __init__(self, name: str, folder: Path, entry: Mapping[str, object]) -> None:
        super().__init__(name)
        namespace = {"model": "test", "tenant": name}
        text = yaml.safe_dump(stack_of(dict(entry), blocks=64, block_bytes=BLOCK_BYTES, namespace=namespace))
        self.path = Path(str(entry.get("path")))
        """The tier's directory, if it has one."""
        self.file = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.yaml"
        self.file.write_text(text)
        self.digest = load_config(self.file).identity.digest.hex()

    def store(self, count: int, first: int = 0) -> int:
        """Store blocks with a new stack; return how many the tier stored."""
        with open_stack(self.file) as stack:
            return self.put(stack, self.keys(count, first))

    def load(self, count: int, first: int = 0) -> tuple[int, int]:
        """Load blocks with a new stack, whose memory is empty; return as `wrong`."""
        with open_stack(self.file) as stack:
            return self.wrong(stack, self.keys(count, first))

    def inspect(self, *options: str) -> tuple[int, dict[str, Any]]:
        """Run `tiered-kv inspect`; return its status and the tier's section."""
        with redirect_stdout(io.StringIO()) as shown:
            status = main(["inspect", str(self.file), "--json", *options])
        (tier,) = json.loads(shown.getvalue())["tiers"]
        return status, tier

    def verify(self, *options: str) -> tuple[int, dict[str, Any]]:
        """Run `inspect --verify`; return its status and the result for the stack's namespace."""
        status, tier = self.inspect("--verify", *options)
        (found,) = [each["verification"] for each in tier["namespaces"] if each["own"]]
        return status, found


def store_and_load_until_input() -> None:
    """Store and load as the tenant with name and file in `sys.argv` until there is input, and report each round."""
    stored = Stored(sys.argv[1])
    rounds = wrong = came = 0
    with open_stack(sys.argv[2]) as stack:
        while not select.select([sys.stdin], [], [], 0)[0]:
            stored.put(stack, stored.keys(ROUND_BLOCKS, rounds * ROUND_BLOCKS))
            old = stored.keys(ROUND_BLOCKS, max(0, rounds - 6) * ROUND_BLOCKS)
            new_came, new_wrong = stored.wrong(stack, old)
            came, wrong, rounds = came + new_came, wrong + new_wrong, rounds + 1
            report = {"at_s": time.monotonic(), "rounds": rounds, "came": came, "wrong": wrong}
            print(json.dumps(report), flush=True)


class Neighbour:
    """A process in which a tenant stores and loads all the time."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def read(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self._child.line())
        return report

    def go_on(self, rounds: int) -> dict[str, Any]:
        """Wait for so many more rounds from now on; return the last report."""
        now_s = time.monotonic()  # of all processes
        while (report := self.read())["at_s"] < now_s:
            pass
        last = report["rounds"] + rounds
        while report["rounds"] < last:
            report = self.read()
        return report


@contextmanager
def neighbour(tenant: Tenant) -> Iterator[Neighbour]:
    """Run a process that stores and loads as a tenant; it must end without wrong bytes."""
    with Child(store_and_load_until_input, tenant.tenant, str(tenant.file)) as child:
        yield Neighbour(child)
        last_line = child.finish(2 * WAIT_S)
        assert last_line is not None
        assert json.loads(last_line)["wrong"] == 0
