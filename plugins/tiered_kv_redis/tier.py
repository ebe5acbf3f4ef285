"""The redis tier: blocks in Redis behind the secondary tier's contract."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tiered_kv.base import OffloadKey
from tiered_kv.config.units import format_bytes
from tiered_kv.errors import TierUnavailableError
from tiered_kv.toolkit.blocking import BlockingTier
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv.toolkit.queued import block_bytes_of
from tiered_kv_redis.blocks import Blocks
from tiered_kv_redis.reasons import NOT_OURS_TO_USE
from tiered_kv_redis.settings import RedisSettings

_log = logging.getLogger(__name__)

_PARTS_BYTES = 32 << 20
_PART_BYTES_MIN = 8 << 20
"""Of a job, for one thread: between two parts its connection is idle for a round trip and for what Python does around
it. Several connections fill each other's pauses; a single one needs long parts, of which all may be `_PARTS_BYTES`."""
_SHUTDOWN_TIMEOUT_S = 2.0


class RedisTier(BlockingTier):
    """Blocks in a Redis server or cluster, for every machine that reaches it.

    A server that does not answer when the tier is opened is used as soon as it does; one that refuses the
    password, the user or TLS is an error.

    Args:
        offloading_spec, primary_kv_view, tier_type: As in `SecondaryTierManager`. A `TierSpec` gives the
            namespace; without one all stacks of one block size share one.
        settings: The tier's YAML entry.

    Raises:
        ConfigError: A file of certificates or keys cannot be used.
        MissingExtraError: The codec's library is not installed.
        TierUnavailableError: The server refuses this client.
    """

    def __init__(
        self,
        offloading_spec: Any,  # Any: an engine's own class; read by getattr
        primary_kv_view: memoryview,
        tier_type: str,
        settings: RedisSettings,
    ) -> None:
        name = getattr(offloading_spec, "name", None) or tier_type
        self._settings = settings
        # First what can fail for good reasons: a tier that was not opened holds no view of the region.
        self._blocks = Blocks(
            name,
            settings,
            block_bytes_of(primary_kv_view),
            getattr(offloading_spec, "namespace_digest", bytes(16)),
            getattr(offloading_spec, "namespace", {}),
        )
        try:
            refusal = self._blocks.contact()
            if refusal in NOT_OURS_TO_USE:
                raise TierUnavailableError(f"the server {NOT_OURS_TO_USE[refusal]}", tier=name, operation="open")
            if refusal:
                _log.warning("tier '%s': no server can be used yet (%s); it is used when one can", name, refusal)
            super().__init__(
                offloading_spec,
                primary_kv_view,
                tier_type,
                threads=settings.connections,
                part_bytes=max(_PART_BYTES_MIN, _PARTS_BYTES // settings.connections),
                lookup_timeout_s=settings.lookup_timeout,
                shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
                lookup_thread=True,
            )
        except BaseException:
            self._blocks.close()
            raise

    # The scheduler's thread.

    @property
    def lookup_failures(self) -> int:
        return super().lookup_failures + self._blocks.counters["unanswered_lookups_total"]

    def reset_cache(self) -> bool:
        self.begin_epoch()
        self._blocks.reset()  # after `begin_epoch`: a store that sees this epoch sees that it is too old for it
        return True

    def stats(self) -> Mapping[str, Any]:
        return {
            **super().stats(),
            **self._blocks.counters.snapshot(),
            "epoch_repairs_total": self._blocks.epoch_repairs,
        }

    def describe(self) -> Mapping[str, object]:
        """Return where the blocks are and how they get there; asks the server.

        Raises:
            TierUnavailableError: It does not answer, or refuses.
        """
        refusal = self._blocks.contact()
        if refusal:
            hint = NOT_OURS_TO_USE.get(refusal, f"cannot be used now: {refusal}")
            raise TierUnavailableError(f"the server {hint}", tier=self.name, operation="describe")
        settings = self._settings
        return {
            "medium": "redis",
            "mode": settings.mode,
            "servers": ", ".join(self._blocks.servers()),
            "tls": settings.tls,
            "tls_verified": settings.tls and settings.tls_verify,
            "codec": settings.codec,
            "connections": settings.connections,
            "pipeline_bytes": settings.pipeline,
            "ttl": "none" if settings.ttl is None else f"{settings.ttl:g} s",
            **self._limits(),
        }

    def _limits(self) -> Mapping[str, object]:
        """Return what limits the servers' memory, and a warning where nothing does."""
        limits = self._blocks.limits()
        if not limits:
            return {"maxmemory": "unknown: the user has no right to INFO"}
        told: dict[str, object] = {
            "maxmemory": ", ".join(sorted({format_bytes(each.memory_bytes) for each in limits})),
            "maxmemory_policy": ", ".join(sorted({each.policy for each in limits})),
        }
        if any(not each.memory_bytes for each in limits):
            told["warning"] = "maxmemory is 0: the server takes memory until there is none; set it"
        elif any(each.policy == "noeviction" for each in limits):
            told["warning"] = "the policy is noeviction: a full server refuses stores; set allkeys-lru"
        return told

    # Worker threads.

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._blocks.store(keys, blocks, self._transfer_deadline(), lambda: self.part_epoch == self.epoch)

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._blocks.load(keys, blocks, self._transfer_deadline())

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._blocks.contains(keys)

    def close(self) -> None:
        self._blocks.close()

    def _transfer_deadline(self) -> float:
        return min(self.part_deadline, time.monotonic() + self._settings.timeout)
