"""Blocks in servers: stored, loaded and looked up, with everything that fails turned into a counted word."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.record import HEADER_BYTES, record_bytes_max
from tiered_kv.toolkit.unreadable import Unreadable
from tiered_kv_redis.counters import Counters
from tiered_kv_redis.endpoint import check_tls_files
from tiered_kv_redis.exchange import Calls, Exchange, Stores, converse
from tiered_kv_redis.keyspace import KeySpace
from tiered_kv_redis.loads import Loads
from tiered_kv_redis.node import MemoryLimit, Node, NodeDownError
from tiered_kv_redis.reasons import (
    ABSENT,
    CLUSTER_DOWN,
    MOVED,
    NODE_DOWN,
    OF_ONE_SERVER,
    READ_ONLY,
    SERVER_ERROR,
    UNUSABLE,
    WRONG_TYPE,
)
from tiered_kv_redis.replies import Reply, command
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import topology_of

_log = logging.getLogger(__name__)

Failures = dict[int, str]
"""Why blocks failed, by their position."""
_SENDS_BYTES = 4 << 20
_SEND_BYTES_MIN = 1 << 20
"""Of records in one call to send: the server reads them while the next are being hashed. Each call gives up the
interpreter and has to get it back, so many small ones cost more than the server gains by an earlier start. Where
several connections send side by side, the server has enough to read without."""

_LOOKUP_SHARE = 0.5
"""Of `lookup_timeout`: within it each of several servers must answer. The rest is for lookups that come meanwhile."""

Attempt = Callable[[Sequence[int]], Failures]
"""Tries the blocks at some positions, and returns why those that failed did."""
Conversation = TypeVar("Conversation", bound=Exchange)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks of one part of a job.

    Args:
        keys: Their keys.
        wire_keys: What they are called in the servers.
        blocks: The blocks.
        deadline: Of everything that is done with them, in seconds of `time.monotonic()`.
    """

    keys: Sequence[OffloadKey]
    wire_keys: Sequence[bytes]
    blocks: Sequence[memoryview]
    deadline: float


class Blocks:
    """The blocks of one namespace. Any thread may call.

    Args:
        name: The tier's name, for messages.
        settings: The tier's.
        block_bytes: Bytes of a block.
        namespace_digest: 16 bytes.
        namespace: The same in readable form.

    Raises:
        ConfigError: A file of certificates or keys cannot be used.
        MissingExtraError: The codec's library is not installed.
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
        self._record_bytes_max = record_bytes_max(block_bytes)
        self._namespace_digest = namespace_digest
        self._codecs = settings.open_codecs()
        check_tls_files(settings)
        self._ttl_ms = None if settings.ttl is None else max(1, round(settings.ttl * 1000))
        self._send_bytes = max(_SEND_BYTES_MIN, _SENDS_BYTES // settings.connections)
        self._topology = topology_of(settings)
        self._keyspace = KeySpace(self._topology, namespace_digest, namespace)
        self._noted: set[str] = set()
        self._unreadable: Unreadable[bytes] = Unreadable()  # by their names in the servers
        # Whether the next store asks what is there before it sends: so if half of what the last one offered was there.
        # Threads overwrite each other's answer, which costs one a round trip, or the wire some blocks.
        self._asks_first = False

    def contact(self) -> str:
        """Reach the server once; return the one word for why it cannot be used, or an empty string."""
        try:
            self._keyspace.contact(time.monotonic() + self._settings.timeout)
        except NodeDownError as error:
            # Only a member of a cluster says that something has moved.
            is_misnamed = error.reason == MOVED and self._settings.mode != "cluster"
            return SERVER_ERROR if is_misnamed else error.reason
        return ""

    def servers(self) -> list[str]:
        """Return the addresses of the servers that are known."""
        return sorted(node.label for node in self._topology.nodes())

    def limits(self) -> list[MemoryLimit]:
        """Return what limits the memory of each server that answers and permits the question."""
        return [limit for node in self._topology.nodes() if (limit := node.memory_limit()) is not None]

    @property
    def epoch_repairs(self) -> int:
        """How often the server had lost the epoch's mark or fallen back to an older one, and got it again."""
        return self._keyspace.repairs

    def reset(self) -> None:
        """Forget every block, at once."""
        self._keyspace.reset()

    def store(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
        deadline: float,
        is_current: Callable[[], bool],
    ) -> Outcome:
        """Store blocks, leaving those that are there and can be read.

        Args:
            keys, blocks: What to store.
            deadline: Seconds of `time.monotonic()`.
            is_current: Asked once the epoch is known: False where a reset came after these blocks were submitted.
        """
        try:
            prefix = self._keyspace.prefix(deadline, is_saved=True)
        except NodeDownError as error:
            return self._failed("store", len(keys), error.reason)
        if not is_current():
            return Outcome((), "reset")
        batch = _Batch(keys, [prefix + key for key in keys], blocks, deadline)
        return self._outcome("store", batch, _with_second_attempt(lambda at: self._store(at, batch), len(keys)))

    def load(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], deadline: float) -> Outcome:
        """Load blocks into place. What nobody can load is deleted, so that it can be stored again."""
        try:
            prefix = self._keyspace.prefix(deadline, is_saved=False)
        except NodeDownError as error:
            return self._failed("load", len(keys), error.reason)
        batch = _Batch(keys, [prefix + key for key in keys], blocks, deadline)
        return self._outcome("load", batch, _with_second_attempt(lambda at: self._load(at, batch), len(keys)))

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether something of a block's size is there that was not found to be unreadable here."""
        now_s = time.monotonic()
        limit_s = min(self._settings.timeout, self._settings.lookup_timeout)
        # Where one of several servers does not answer, the others' answers must still come in time.
        deadline = now_s + limit_s * (_LOOKUP_SHARE if len(self._topology.nodes()) > 1 else 1.0)
        try:
            prefix = self._keyspace.prefix(now_s + limit_s * _LOOKUP_SHARE / 2, is_saved=False)
        except NodeDownError as error:
            self._failed("lookup", len(keys), error.reason)
            return [False] * len(keys)
        wire_keys = [prefix + key for key in keys]
        found: dict[int, int] = {}

        def attempt(positions: Sequence[int]) -> Failures:
            lengths, failures = self._lengths(positions, wire_keys, deadline)
            found.update(lengths)
            return failures

        failures = _with_second_attempt(attempt, len(keys))
        self._keyspace.recheck(deadline)
        for reason in set(failures.values()):
            self._failed("lookup", list(failures.values()).count(reason), reason)
        return [self._may_be_block(found.get(at)) and name not in self._unreadable for at, name in enumerate(wire_keys)]

    def close(self) -> None:
        """Write what a reset left to be written, if that takes no time, and close every connection."""
        try:
            self._keyspace.flush(time.monotonic() + min(1.0, self._settings.timeout))
        except NodeDownError as error:
            _log.warning("tier '%s': a reset has not reached the server (%s)", self._name, error.reason)
        finally:
            self._topology.close()

    # Conversations. Each is about positions in a batch, and returns why those that failed did.

    def _store(self, positions: Sequence[int], batch: _Batch) -> Failures:
        """Store blocks where nothing lies, or nothing that can be a block, or what cannot be read here."""
        unreadable = [at for at in positions if batch.wire_keys[at] in self._unreadable]
        occupied, failures = positions, Failures()
        if not self._asks_first:
            occupied, failures = self._send(positions, batch, overwrite=False)
        if not occupied:
            return failures
        lengths, unknown = self._lengths(occupied, batch.wire_keys, batch.deadline)
        vacant = [at for at in occupied if at not in unknown and not self._may_be_block(lengths.get(at))]
        foreign = sorted({*occupied}.intersection(unreadable).difference(unknown, vacant)) if unreadable else []
        replaced = sorted([*vacant, *foreign])
        present = len(occupied) - len(unknown) - len(replaced)
        self.counters.add("present_blocks_total", count=present)
        self._asks_first = 2 * present >= len(positions)
        return failures | unknown | self._send(replaced, batch, overwrite=True)[1]

    def _send(self, positions: Sequence[int], batch: _Batch, *, overwrite: bool) -> tuple[list[int], Failures]:
        """Store blocks.

        Returns:
            Where something lies already and was left there, besides the failures.
        """

        def stores(node: Node, own: Sequence[int]) -> Stores:
            return Stores(
                node,
                [batch.keys[at] for at in own],
                [batch.wire_keys[at] for at in own],
                [batch.blocks[at] for at in own],
                namespace_digest=self._namespace_digest,
                codec=self._codecs.writer,
                ttl_ms=self._ttl_ms,
                overwrite=overwrite,
                send_bytes=self._send_bytes,
            )

        failures: Failures = {}
        shares: list[tuple[Node, list[int]]] = []
        for node, own in self._split(positions, batch.wire_keys, batch.deadline, failures):
            if node.store_refusal:  # it has just refused some: spare the wire
                failures.update(dict.fromkeys(own, node.store_refusal))
            else:
                shares.append((node, own))
        done = self._converse(shares, stores, batch.deadline, failures)
        occupied = [own[at] for exchange, own in done for at in exchange.occupied]
        left = {*occupied, *failures}
        self._unreadable.forget(batch.wire_keys[at] for at in positions if at not in left)
        return occupied, failures

    def _load(self, positions: Sequence[int], batch: _Batch) -> Failures:
        """Load blocks, delete what nobody can load, and note what only others can."""

        def loads(node: Node, own: Sequence[int]) -> Loads:
            return Loads(
                node,
                [batch.keys[at] for at in own],
                [batch.wire_keys[at] for at in own],
                [batch.blocks[at] for at in own],
                namespace_digest=self._namespace_digest,
                pipeline_bytes=self._settings.pipeline,
                codecs=self._codecs,
            )

        failures: Failures = {}
        shares = self._split(positions, batch.wire_keys, batch.deadline, failures)
        done = self._converse(shares, loads, batch.deadline, failures)
        self._unreadable.note(batch.wire_keys[own[at]] for exchange, own in done for at in exchange.unreadable)
        self._unreadable.forget(batch.wire_keys[at] for at in positions if at not in failures)
        damaged = [own[at] for exchange, own in done for at in exchange.damaged]
        if damaged:
            for at in damaged:
                self.counters.add("corrupt_blocks_total", failures[at])
            replies = self._ask(b"UNLINK", damaged, batch.wire_keys, batch.deadline, {})
            gone = {at for at, reply in replies if isinstance(reply, int)}
            # The user may not be allowed to, or the server does not answer any more.
            self._unreadable.note(batch.wire_keys[at] for at in damaged if at not in gone)
        return failures

    def _lengths(
        self, positions: Sequence[int], wire_keys: Sequence[bytes], deadline: float
    ) -> tuple[dict[int, int], Failures]:
        """Return how many bytes are stored at each position, and why that is not known of others."""
        failures: Failures = {}
        lengths: dict[int, int] = {}
        for at, reply in self._ask(b"STRLEN", positions, wire_keys, deadline, failures):
            if isinstance(reply, int):
                lengths[at] = reply
            elif failures.get(at) == WRONG_TYPE:  # something lies there, and it is no block
                lengths[at] = 0
                del failures[at]
        return lengths, failures

    def _ask(
        self, name: bytes, positions: Sequence[int], wire_keys: Sequence[bytes], deadline: float, failures: Failures
    ) -> list[tuple[int, Reply]]:
        """Send one short command a block, and return the replies that came, each with its position."""

        def calls(node: Node, own: Sequence[int]) -> Calls:
            return Calls(node, [command(name, wire_keys[at]) for at in own])

        shares = self._split(positions, wire_keys, deadline, failures)
        done = self._converse(shares, calls, deadline, failures)
        return [answered for exchange, own in done for answered in zip(own, exchange.replies, strict=False)]

    def _split(
        self, positions: Sequence[int], wire_keys: Sequence[bytes], deadline: float, failures: Failures
    ) -> list[tuple[Node, list[int]]]:
        """Return the servers with the positions of their blocks; where there is none, add to `failures`."""
        if not positions:
            return []
        try:
            shares = self._topology.split([wire_keys[at] for at in positions], deadline)
        except NodeDownError as error:
            failures.update(dict.fromkeys(positions, error.reason))
            return []
        placed = [(node, [positions[at] for at in own]) for node, own in shares]
        if sum(len(own) for _, own in placed) < len(positions):
            homeless = set(positions).difference(*(own for _, own in placed))
            failures.update(dict.fromkeys(homeless, CLUSTER_DOWN))
        return placed

    def _converse(
        self,
        shares: Sequence[tuple[Node, list[int]]],
        exchange_with: Callable[[Node, Sequence[int]], Conversation],
        deadline: float,
        failures: Failures,
    ) -> list[tuple[Conversation, list[int]]]:
        """Run one exchange with each server, all at once; return them with their positions, and add to `failures`."""
        exchanges = [(exchange_with(node, own), own) for node, own in shares]
        converse([exchange for exchange, _ in exchanges], deadline)
        for exchange, own in exchanges:
            for at, reason in exchange.failures.items():
                failures[own[at]] = reason
            reasons = set(exchange.failures.values())
            if {MOVED, READ_ONLY} & reasons:
                self._topology.refresh()
            elif len(exchange.failures) == len(own) and reasons <= UNUSABLE and not exchange.node.is_down:
                exchange.node.note_failure(exchange.failures[0])  # it answers, and cannot be used
        return exchanges

    # What became of it.

    def _may_be_block(self, length: int | None) -> bool:
        return length is not None and HEADER_BYTES < length <= self._record_bytes_max

    def _outcome(self, operation: str, batch: _Batch, failures: Failures) -> Outcome:
        self._keyspace.recheck(batch.deadline)
        if not failures:
            return ALL_DONE
        reasons = list(failures.values())
        # What says most about the server comes first: a block that is not there says nothing.
        ordered = sorted(set(reasons), key=lambda each: (each == ABSENT, -reasons.count(each)))
        told = [self._failed(operation, reasons.count(reason), reason).reason for reason in ordered]
        return Outcome([key for at, key in enumerate(batch.keys) if at not in failures], told[0])

    def _failed(self, operation: str, count: int, reason: str) -> Outcome:
        """Count blocks that failed for one reason, and log the first of its kind.

        Returns:
            What the tier's breaker makes of it: nothing, where the reason says something of one of several servers.
        """
        if operation == "lookup":
            self.counters.add("failed_lookups_total", reason, count=count)
        else:
            self.counters.add("failed_blocks_total", operation, reason, count=count)
        if reason in OF_ONE_SERVER and self._has_other_servers():
            told = NODE_DOWN
        else:
            told = reason
            if operation == "lookup":
                self.counters.add("unanswered_lookups_total", count=count)
        kind = f"{operation}s fail: {reason}"
        if reason not in (ABSENT, MOVED) and kind not in self._noted:
            self._noted.add(kind)
            _log.warning("tier '%s': %s; further ones are only counted", self._name, kind)
        return Outcome((), told)

    def _has_other_servers(self) -> bool:
        """Return whether some server of several is not down."""
        nodes = self._topology.nodes()
        return len(nodes) > 1 and not all(node.is_down for node in nodes)


def _with_second_attempt(attempt: Attempt, count: int) -> Failures:
    """Try all blocks, and those once more that have moved to another server."""
    failures = attempt(range(count))
    moved = [at for at, reason in failures.items() if reason == MOVED]
    if moved:
        for at in moved:
            del failures[at]
        failures |= attempt(moved)
    return failures
