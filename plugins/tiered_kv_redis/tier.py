"""The redis tier: blocks in Redis, as a secondary tier.

A `GuardedTier` calls it on the scheduler's thread, and no such call does I/O. The toolkit's workers store, load and
look up. A load verifies the record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.units import format_bytes
from tiered_kv.errors import TierUnavailableError
from tiered_kv.metrics.counters import Counters
from tiered_kv.reasons import Reason
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.blocking import BlockingTier
from tiered_kv.toolkit.failure_texts import OF_LOOKUPS
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.queued import block_bytes_of
from tiered_kv.toolkit.record import codecs_of, record_bytes_max
from tiered_kv.toolkit.touches import Touches
from tiered_kv_redis import reasons as why
from tiered_kv_redis.allocators import room_bytes
from tiered_kv_redis.blocks import Blocks
from tiered_kv_redis.connection import check_tls_files
from tiered_kv_redis.epoch import KeySpace
from tiered_kv_redis.exchange import Batch
from tiered_kv_redis.metrics import METRICS
from tiered_kv_redis.reasons import NodeError, RedisReason, ServerFailure
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import Topology

_log = logging.getLogger(__name__)

_PARTS_BYTES = 32 << 20
_PART_BYTES_MIN = 8 << 20
"""The least bytes of one part of a job; the connections share `_PARTS_BYTES`. Between two parts, a connection is idle
for a round trip and for Python's work. Other connections work meanwhile; a single connection needs long parts."""
_SHUTDOWN_TIMEOUT_S = 2.0
_TOUCH_S = 1.0  # seconds between two reports of uses in a tier above: the server evicts by use, also with `ttl`
_LOOKUP_SHARE = 0.5
"""The share of `lookup_timeout` within which each of several servers must answer. The rest is for later lookups."""


class RedisTier(BlockingTier):
    """Blocks in a Redis server or cluster, for every machine that reaches it.

    If a server does not answer when the tier is opened, the tier uses it as soon as it answers.

    Raises:
        ConfigError: A file of certificates or keys cannot be used.
        MissingExtraError: The codec's library is not installed.
        TierUnavailableError: The server refuses the password, the user or TLS.
    """

    takes_records = True

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: RedisSettings
    ) -> None:
        spec = TierSpec.of(offloading_spec, tier_type, primary_kv_view)
        name, digest = spec.name, spec.namespace_digest
        self._settings = settings
        self._counters = Counters(METRICS)
        self._limit = LogLimit()
        # The steps that may fail come first: a tier whose opening failed must hold no view of the region.
        check_tls_files(settings)
        self._topology = Topology(settings, lambda: self._keyspace.epoch.recheck())
        try:
            block_bytes = block_bytes_of(primary_kv_view)
            codecs = codecs_of(spec, settings)
            self._stored = Blocks(
                settings, codecs, self._topology, self._counters, block_bytes, digest, self._note_failures
            )
            self._keyspace = KeySpace(self._topology, digest, spec.namespace, name)
            refusal = self._contact()
            if refusal in why.REFUSALS:
                raise TierUnavailableError(self._topology.sentence(refusal), tier=name, operation="open")
            if refusal is not None:
                _log.warning("tier '%s' is used as soon as it can be: %s", name, self._topology.sentence(refusal))
            super().__init__(
                spec,
                primary_kv_view,
                tier_type,
                threads=settings.connections,
                part_bytes=max(_PART_BYTES_MIN, _PARTS_BYTES // settings.connections),
                lookup_timeout_s=settings.lookup_timeout,
                shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
                lookup_thread=True,
            )
            every_s = _TOUCH_S if settings.ttl is None else min(_TOUCH_S, settings.ttl / 2)
            self._touches = Touches(self._note_uses, f"tiered-kv-{name}-touches", every_s)
        except BaseException:
            self._topology.close()
            raise

    # The scheduler's thread.

    @property
    def lookup_failures(self) -> int:
        return super().lookup_failures + self._counters["unanswered_lookups_total"]

    @property
    def has_saved_reset(self) -> bool:
        return self._keyspace.epoch.is_saved

    def reset_cache(self) -> bool:
        self.begin_epoch()
        self._touches.clear()
        self._keyspace.epoch.renew()  # after `begin_epoch`: an older store that reads this value finds itself outdated
        return True

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._touches.note(keys)

    def take_absent(self) -> list[OffloadKey]:
        return self._touches.take_absent()

    def shutdown(self) -> None:
        self._touches.stop(_SHUTDOWN_TIMEOUT_S / 4)
        super().shutdown()

    def stats(self) -> Mapping[str, int]:
        return {**super().stats(), **self._counters.snapshot(), "epoch_repairs_total": self._keyspace.epoch.repairs}

    def describe(self) -> Mapping[str, object]:
        refusal = self._contact()
        if refusal:
            raise TierUnavailableError(self._topology.sentence(refusal), tier=self.name, operation="describe")
        settings = self._settings
        return {
            "medium": "redis",
            "mode": settings.mode,
            "servers": ", ".join(sorted(node.label for node in self._topology.nodes())),
            "tls": settings.tls,
            "tls_verified": settings.tls and settings.tls_verify,
            "codec": settings.codec,
            "connections": settings.connections,
            "pipeline_bytes": settings.pipeline,
            "ttl": "none" if settings.ttl is None else f"{settings.ttl:g} s",
            **self._limits(),
            **self._refused_writes(),
        }

    def _limits(self) -> Mapping[str, object]:
        """Return the limits of the servers' memory, what a block takes of it, and a warning if there are none."""
        servers = [memory for node in self._topology.nodes() if (memory := node.memory()) is not None]
        if not servers:
            return {"maxmemory": "unknown: the server answers no INFO"}
        limits, policies = {each.limit_bytes for each in servers}, {each.policy for each in servers}
        allocators = sorted({each.allocator for each in servers})
        rooms = [room_bytes(record_bytes_max(self.block_bytes), each.allocator) for each in servers]
        described: dict[str, object] = {
            "maxmemory": ", ".join(sorted(map(format_bytes, limits))),
            "maxmemory_policy": ", ".join(sorted(policies)),
            "allocator": ", ".join(allocators),
        }
        if known := [room for room in rooms if room is not None]:
            described["block_room_bytes"] = max(known)
        if len(known) == len(servers) and 0 not in limits:
            described["blocks_max"] = sum(each.limit_bytes // room for each, room in zip(servers, known, strict=True))
        told = self._settings.allocator
        if 0 in limits:
            described["warning"] = "maxmemory is 0: the server takes memory until there is none; set it"
        elif "noeviction" in policies:
            described["warning"] = "the policy is noeviction: a full server refuses stores; set allkeys-lru"
        elif told is not None and allocators != [told]:
            described["warning"] = f"'allocator' is {told}, and the server's is {allocators[0]}: simulations are wrong"
        return described

    def _refused_writes(self) -> dict[str, object]:
        """Return a warning if the server serves loads and refuses stores, as a replica does."""
        try:
            self._keyspace.check_writes(time.monotonic() + self._settings.timeout, self.block_bytes)
        except NodeError as error:
            return {"warning": f"a write fails, so stores may fail too: {self._topology.sentence(error.reason)}"}
        return {}

    def _contact(self) -> RedisReason | None:
        """Ask the server once; return the reason why it cannot be used."""
        try:
            self._keyspace.contact(time.monotonic() + self._settings.timeout)
        except NodeError as error:
            # Only a cluster's member says MOVED: then `mode` is wrong.
            is_wrong_mode = error.reason is ServerFailure.MOVED and self._settings.mode != "cluster"
            return ServerFailure.SERVER_ERROR if is_wrong_mode else self._topology.explained(error.reason)
        return None

    # Worker threads.

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._transfer_blocks("store", keys, blocks)

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._transfer_blocks("load", keys, blocks)

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> list[bool]:
        now_s = time.monotonic()
        limit_s = min(self._settings.timeout, self._settings.lookup_timeout)
        # If one of several servers does not answer, the answers of the other servers must still be in time.
        deadline = now_s + limit_s * (_LOOKUP_SHARE if len(self._topology.nodes()) > 1 else 1.0)
        try:
            prefix = self._keyspace.prefix(now_s + limit_s * _LOOKUP_SHARE / 2)
        except NodeError as error:
            self._note_failures("lookup", len(keys), error.reason)
            return [False] * len(keys)
        answers, failures = self._stored.contains(Batch(keys, [prefix + key for key in keys], (), deadline))
        self._keyspace.recheck(deadline)
        reasons = list(failures.values())
        for reason in set(reasons):
            self._note_failures("lookup", reasons.count(reason), reason)
        return answers

    def _note_uses(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        deadline = time.monotonic() + self._settings.timeout
        try:
            prefix = self._keyspace.prefix(deadline, is_saved=True)  # as before a store: so the mark is used, too
        except NodeError:
            return []
        absent = self._stored.touch(Batch(keys, [prefix + key for key in keys], (), deadline))
        return [keys[at] for at in absent]

    def close(self) -> None:
        """Save the epoch's mark, for a second at most, and close every connection.

        The mark of a reset may not be saved yet. Or the server may have evicted the mark since the last read.
        """
        deadline = time.monotonic() + min(1.0, self._settings.timeout)
        try:
            if self._keyspace.epoch.is_saved:
                self._keyspace.epoch.check(deadline)
            else:
                self._keyspace.prefix(deadline, is_saved=True)
        except NodeError as error:
            about = "tier '%s': a reset has not reached the server: %s"
            _log.warning(about, self.name, self._topology.sentence(error.reason))
        finally:
            self._topology.close()

    def _transfer_blocks(
        self, operation: Literal["store", "load"], keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> Outcome:
        deadline = min(self.part_deadline, time.monotonic() + self._settings.timeout)
        try:
            prefix = self._keyspace.prefix(deadline, is_saved=operation == "store")
        except NodeError as error:
            return Outcome((), self._note_failures(operation, len(keys), error.reason))
        if self.part_epoch != self.epoch:  # checked after the prefix, which may be of a later epoch
            return Outcome((), Reason.RESET)
        transfer = self._stored.store if operation == "store" else self._stored.load
        failures = transfer(Batch(keys, [prefix + key for key in keys], blocks, deadline))
        self._keyspace.recheck(deadline)
        if not failures:
            return ALL_DONE
        reasons = list(failures.values())
        # The job's reason is the most frequent one; an absent block says nothing about the server.
        ordered = sorted(set(reasons), key=lambda each: (each is Reason.ABSENT, -reasons.count(each)))
        reported = [self._note_failures(operation, reasons.count(reason), reason) for reason in ordered]
        return Outcome([key for at, key in enumerate(keys) if at not in failures], reported[0])

    def _note_failures(self, operation: str, count: int, reason: RedisReason) -> RedisReason:
        """Count blocks that failed for one reason, and log it at a bounded rate; return the reason for the breaker.

        A failure of one of several servers is no failure of the tier.
        """
        if operation == "lookup":
            self._counters.add("failed_lookups_total", reason.value, count=count)
        else:
            self._counters.add("failed_blocks_total", operation, reason.value, count=count)
        nodes = self._topology.nodes()
        has_others = len(nodes) > 1 and not all(node.is_down for node in nodes)
        reported = Reason.UNANSWERED if reason in why.OF_ONE_SERVER and has_others else reason
        if operation == "lookup" and reported is not Reason.UNANSWERED:
            self._counters.add("unanswered_lookups_total", count=count)
        if reason in why.ELSEWHERE | {Reason.ABSENT}:
            return reported
        said = self._topology.sentence(reason)
        self._failure_texts.note(OF_LOOKUPS if operation == "lookup" else reported, said)
        if self._limit.take((operation, reason)) is not None:
            about = "tier '%s': %ss fail: %s; %s, as '%s'"
            _log.warning(about, self.name, operation, said, self._limit.about, reason)
        return reported
