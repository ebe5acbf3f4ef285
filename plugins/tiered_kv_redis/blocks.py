"""Blocks in servers: stored, loaded and looked up, with everything that fails turned into a counted word."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.codecs import RAW, codec_by_name
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv_redis.counters import Counters
from tiered_kv_redis.exchange import Calls, Exchange, Stores, converse
from tiered_kv_redis.keyspace import KeySpace
from tiered_kv_redis.loads import Loads
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.reasons import MISSING, MOVED, READ_ONLY, WRONG_TYPE
from tiered_kv_redis.replies import command
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import topology_of

_log = logging.getLogger(__name__)

Attempt = Callable[[Sequence[int]], dict[int, str]]
"""Tries the blocks at some positions, and returns why those that failed did."""


class Blocks:
    """The blocks of one namespace. Any thread may call.

    Args:
        name: The tier's name, for messages.
        settings: The tier's.
        block_bytes: Bytes of a block.
        namespace_digest: 16 bytes.
        namespace: The same in readable form.

    Raises:
        ConfigError, MissingExtraError: The codec's library is missing.
    """

    def __init__(
        self,
        name: str,
        settings: RedisSettings,
        block_bytes: int,
        namespace_digest: bytes,
        namespace: Mapping[str, object],
    ) -> None:
        self.counters = Counters()
        self._name = name
        self._settings = settings
        self._record_bytes_max = HEADER_BYTES + block_bytes
        self._namespace_digest = namespace_digest
        self._codec = codec_by_name(settings.codec)
        self._ttl_ms = None if settings.ttl is None else max(1, round(settings.ttl * 1000))
        self._topology = topology_of(settings)
        self._keyspace = KeySpace(self._topology, namespace_digest, namespace)
        self._noted: set[str] = set()

    def contact(self) -> str:
        """Reach the server once; return the one word for why it cannot be used, or an empty string."""
        try:
            self._keyspace.current(time.monotonic() + self._settings.timeout)
        except NodeDownError as error:
            return error.reason
        return ""

    def servers(self) -> list[str]:
        """Return the addresses of the servers that are known."""
        return sorted(node.label for node in self._topology.nodes())

    def reset(self, epoch: int) -> None:
        """Forget every block, at once."""
        self._keyspace.reset(epoch)

    def store(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], epoch: int) -> Outcome:
        """Store blocks, leaving out those that are there; none if the tier's epoch is no longer `epoch`."""
        deadline = time.monotonic() + self._settings.timeout
        try:
            generation = self._keyspace.current(deadline)
        except NodeDownError as error:
            return self._failed("store", len(keys), error.reason)
        if generation.epoch != epoch:
            return Outcome((), "reset")
        wire_keys = self._keyspace.wire_keys(generation, keys)

        def attempt(positions: Sequence[int]) -> dict[int, str]:
            lengths, failures = self._lengths(positions, wire_keys, deadline)
            absent = [at for at in positions if at not in failures and not self._may_be_block(lengths.get(at))]
            self.counters.add("present_blocks", len(positions) - len(failures) - len(absent))
            return failures | self._store_absent(absent, keys, wire_keys, blocks, deadline)

        return self._outcome("store", keys, self._with_second_attempt(attempt, len(keys)))

    def load(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        """Load blocks into place; those that are damaged are deleted, so that they can be stored again."""
        deadline = time.monotonic() + self._settings.timeout
        try:
            generation = self._keyspace.current(deadline)
        except NodeDownError as error:
            return self._failed("load", len(keys), error.reason)
        wire_keys = self._keyspace.wire_keys(generation, keys)

        def attempt(positions: Sequence[int]) -> dict[int, str]:
            return self._load(positions, keys, wire_keys, blocks, deadline)

        return self._outcome("load", keys, self._with_second_attempt(attempt, len(keys)))

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether something of a block's size is there."""
        deadline = time.monotonic() + min(self._settings.timeout, self._settings.lookup_timeout)
        try:
            wire_keys = self._keyspace.wire_keys(self._keyspace.current(deadline), keys)
        except NodeDownError as error:
            self._failed("lookup", len(keys), error.reason)
            return [False] * len(keys)
        found: dict[int, int] = {}

        def attempt(positions: Sequence[int]) -> dict[int, str]:
            lengths, failures = self._lengths(positions, wire_keys, deadline)
            found.update(lengths)
            return failures

        failures = self._with_second_attempt(attempt, len(keys))
        for reason in set(failures.values()):
            self._failed("lookup", list(failures.values()).count(reason), reason)
        return [self._may_be_block(found.get(at)) for at in range(len(keys))]

    def close(self) -> None:
        """Write what a reset left to be written, if that takes no time, and close every connection."""
        try:
            self._keyspace.flush(time.monotonic() + min(1.0, self._settings.timeout))
        except NodeDownError as error:
            _log.warning("tier '%s': a reset has not reached the server (%s)", self._name, error.reason)
        finally:
            self._topology.close()

    # Conversations. Each takes positions in `keys`, and returns why those that failed did.

    def _store_absent(
        self,
        positions: Sequence[int],
        keys: Sequence[OffloadKey],
        wire_keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        deadline: float,
    ) -> dict[int, str]:
        failures: dict[int, str] = {}
        stores: list[tuple[Exchange, Sequence[int]]] = []
        for node, own in self._split(positions, wire_keys, failures):
            if node.store_refusal:  # it has just refused some: spare the wire
                failures.update(dict.fromkeys(own, node.store_refusal))
                continue
            exchange = Stores(
                node,
                [keys[at] for at in own],
                [wire_keys[at] for at in own],
                [blocks[at] for at in own],
                namespace_digest=self._namespace_digest,
                codec=self._codec,
                ttl_ms=self._ttl_ms,
            )
            stores.append((exchange, own))
        return failures | self._converse(stores, deadline)

    def _load(
        self,
        positions: Sequence[int],
        keys: Sequence[OffloadKey],
        wire_keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        deadline: float,
    ) -> dict[int, str]:
        failures: dict[int, str] = {}
        loads: list[tuple[Loads, Sequence[int]]] = []
        for node, own in self._split(positions, wire_keys, failures):
            exchange = Loads(
                node,
                [keys[at] for at in own],
                [wire_keys[at] for at in own],
                [blocks[at] for at in own],
                namespace_digest=self._namespace_digest,
                pipeline_bytes=self._settings.pipeline,
                expect_raw=self._codec is RAW,
            )
            loads.append((exchange, own))
        failures |= self._converse(loads, deadline)
        damaged = [own[at] for exchange, own in loads for at in exchange.damaged]
        if damaged:
            self.counters.add("corrupt_blocks", len(damaged))
            self._delete([wire_keys[at] for at in damaged], deadline)
        return failures

    def _lengths(
        self, positions: Sequence[int], wire_keys: Sequence[bytes], deadline: float
    ) -> tuple[dict[int, int], dict[int, str]]:
        """Return how many bytes are stored at each position, and why that is not known of others."""
        failures: dict[int, str] = {}
        calls = [
            (Calls(node, [command(b"STRLEN", wire_keys[at]) for at in own]), own)
            for node, own in self._split(positions, wire_keys, failures)
        ]
        failures |= self._converse(calls, deadline)
        lengths: dict[int, int] = {}
        for exchange, own in calls:
            for at, reply in zip(own, exchange.replies, strict=False):  # there are fewer replies after trouble
                if isinstance(reply, int):
                    lengths[at] = reply
                elif failures.get(at) == WRONG_TYPE:  # something lies there, and it is no block
                    lengths[at] = 0
                    del failures[at]
        return lengths, failures

    def _delete(self, wire_keys: Sequence[bytes], deadline: float) -> None:
        """Delete values that are no blocks; if that fails they are found again."""
        shares = self._split(range(len(wire_keys)), wire_keys, {})
        calls = [(Calls(node, [command(b"UNLINK", wire_keys[at]) for at in own]), own) for node, own in shares]
        self._converse(calls, deadline)

    def _split(
        self, positions: Sequence[int], wire_keys: Sequence[bytes], failures: dict[int, str]
    ) -> list[tuple[Node, list[int]]]:
        """Return the servers with the positions of their blocks; where nobody knows them, add to `failures`."""
        if not positions:
            return []
        try:
            shares = self._topology.split([wire_keys[at] for at in positions])
        except NodeDownError as error:
            failures.update(dict.fromkeys(positions, error.reason))
            return []
        return [(node, [positions[at] for at in own]) for node, own in shares]

    def _converse(self, exchanges: Sequence[tuple[Exchange, Sequence[int]]], deadline: float) -> dict[int, str]:
        converse([exchange for exchange, _ in exchanges], deadline)
        failures: dict[int, str] = {}
        for exchange, own in exchanges:
            for at, reason in exchange.failures.items():
                failures[own[at]] = reason
            if exchange.trouble or {MOVED, READ_ONLY} & set(exchange.failures.values()):
                self._topology.refresh()
        return failures

    def _with_second_attempt(self, attempt: Attempt, count: int) -> dict[int, str]:
        """Try all blocks, and those once more that have moved to another server."""
        failures = attempt(range(count))
        moved = [at for at, reason in failures.items() if reason == MOVED]
        if moved:
            for at in moved:
                del failures[at]
            failures |= attempt(moved)
        return failures

    # What became of it.

    def _may_be_block(self, length: int | None) -> bool:
        return length is not None and HEADER_BYTES < length <= self._record_bytes_max

    def _outcome(self, operation: str, keys: Sequence[OffloadKey], failures: Mapping[int, str]) -> Outcome:
        done = "stored_blocks" if operation == "store" else "loaded_blocks"
        self.counters.add(done, len(keys) - len(failures))
        if not failures:
            return ALL_DONE
        reasons = list(failures.values())
        for reason in set(reasons):
            self._failed(operation, reasons.count(reason), reason)
        # What says most about the server comes first: a block that is not there says nothing.
        reason = min(set(reasons), key=lambda each: (each == MISSING, -reasons.count(each)))
        return Outcome([key for at, key in enumerate(keys) if at not in failures], reason)

    def _failed(self, operation: str, count: int, reason: str) -> Outcome:
        """Count blocks that failed for one reason, and log the first of its kind."""
        self.counters.add(f"failed_{operation}s_{reason}", count)
        if operation == "lookup":
            self.counters.add("unanswered_lookups", count)
        kind = f"{operation}s fail: {reason}"
        if reason not in (MISSING, MOVED) and kind not in self._noted:
            self._noted.add(kind)
            _log.warning("tier '%s': %s; further ones are only counted", self._name, kind)
        return Outcome((), reason)
