"""The manager that vLLM's scheduler calls: it passes the calls on to our manager, and answers with vLLM's types.

vLLM's scheduler and `TieredKVConnector` call it on the scheduler's thread, which owns its state. Only `shutdown` waits.
vLLM reports the end of a transfer with a set of its blocks, so this class remembers their order. What must stay true:
after a reset, the rows of running transfers stay in use until the workers have flushed these transfers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadPolicy,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.base import LoadStoreSpec, OffloadKey, PrepareStoreOutput, ReqContext
from tiered_kv.base import OffloadPolicy as OurPolicy
from tiered_kv.config.settings import PRIMARY_NAME, TierSettings
from tiered_kv.engines.prefill_meter import PROMPT_TOKENS_MIN, PrefillMeter
from tiered_kv.metrics.series import CounterView
from tiered_kv.stack.open import EngineStack
from tiered_kv.system.step import STEP
from tiered_kv.tiering.interface import CacheManager
from tiered_kv_vllm.attached import HostCache
from tiered_kv_vllm.metrics import CounterReport, hit_source, vllm_events

LOOKUP_S_MAX = 0.5
"""After this time a waiting request is looked up again, even if nothing has changed: its wait has a limit."""


class _Transfer(NamedTuple):
    """Blocks that vLLM's workers read or write. At the end of the transfer, vLLM names the same blocks as a set."""

    is_store: bool
    keys: Sequence[OffloadKey]
    req_context: Any


class TieredKVManager(OffloadingManager):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Answers vLLM's scheduler from a stack, or from a host's cache. The module says which thread calls it.

    Args:
        stack: An open stack, which `shutdown` closes; or a host's cache, whose manager this class opens.
        has_events: Whether vLLM publishes events.
        flush_steps: The number of steps after a `reset_cache` in which the workers flush their transfers, for vLLM
            0.32; None if vLLM calls `on_reset_flushed`.
    """

    def __init__(self, stack: EngineStack | HostCache, *, has_events: bool, flush_steps: int | None) -> None:
        self._stack = stack
        self._manager: CacheManager
        self._reporting: frozenset[str] = frozenset()  # the names of the tiers with `reports_stored`
        if isinstance(stack, HostCache):
            self._manager = stack.open_manager()
            self._block_tokens, is_measured = stack.block_tokens, True  # the server knows whether it counts
            settings: Sequence[TierSettings] = ()
            secrets: set[str] = set()
        else:
            self._manager = stack.manager
            self._block_tokens, is_measured = stack.config.block.tokens, stack.config.is_prefill_measured
            settings, secrets = stack.config.secondary, stack.config.secret_texts()
            tiers = zip(stack.tier_names, stack.secondary_tiers, strict=True)
            self._reporting = frozenset(name for name, tier in tiers if tier.reports_stored)
        self._sources = {tier.name: hit_source(tier) for tier in settings}
        self._report = CounterReport(secrets)
        self._transfers: dict[str, list[_Transfer]] = {}
        """Transfers that the workers have not reported, by request."""
        self._stale: list[_Transfer] = []
        """Transfers from before a reset that the workers have not flushed."""
        self._has_events = has_events
        self._flush_steps = flush_steps
        self._steps_to_flush: int | None = None
        """How many steps are left until `_stale` is flushed; None if no flush is awaited."""
        self._meter = PrefillMeter() if is_measured else None
        if self._meter is not None:
            self._manager.cost.block_s = 0.0  # as long as no prompt was timed, loads only measure the tiers' paces
        self._is_polled = False
        """Whether the jobs that have finished were collected since the last step."""
        self._lacks_answer = False
        """Whether the request of the current lookups waits for a tier's answer or for room, not only for promotions."""
        self._waiting: dict[str, tuple[int, float]] = {}
        """The promotions of each waiting request (0 if the request waits for answers too), and the time of its
        lookup."""
        self._requests: set[str] = set()
        """Ids of the requests that vLLM has."""
        self._computed: dict[str, int] = {}
        """The tokens of each request's prompt that vLLM computes, neither in the GPU's cache nor in a tier."""
        self._uncomputed: dict[str, int] = {}
        """The tokens that vLLM has not scheduled yet, by request that has begun or begins in this step."""

    # Lookups and transfers.

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        tiers = req_context.load_tier_filter
        loads_from_storage = tiers is TierFilter.ALL or tiers.allows(Medium.STORAGE, None)
        if not loads_from_storage and not self._manager.has_row(key, req_context):
            return LookupResult.MISS
        answer = self._manager.lookup(key, req_context)
        if answer:
            return LookupResult.HIT
        if answer is None:
            if self._manager.has_row(key, req_context):
                return LookupResult.HIT_PENDING
            self._lacks_answer = True
            return LookupResult.RETRY
        return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: Any) -> CacheHitSource:
        tier = self._manager.hit_tier(key, req_context)
        if tier == PRIMARY_NAME:
            return CacheHitSource.HOST
        return self._sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: Any) -> LoadStoreSpec:
        spec = self._manager.prepare_load(keys, req_context)
        if keys:
            self._begin(_Transfer(False, list(keys), req_context))
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        transfer = self._end(False, keys, req_context)
        self._manager.complete_load(keys if transfer is None else transfer.keys, req_context)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> PrepareStoreOutput | None:
        output = self._manager.prepare_store(keys, req_context)
        if output is not None and output.keys_to_store:
            self._begin(_Transfer(True, output.keys_to_store, req_context))
        return output

    def complete_store(self, keys: Collection[OffloadKey], req_context: Any, success: bool = True) -> None:
        transfer = self._end(True, keys, req_context)
        # In the order of the prefix, which vLLM's set of keys has lost: tiers read them back in fewer, larger reads.
        self._manager.complete_store(keys if transfer is None else transfer.keys, req_context, success)

    def touch(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        self._manager.touch(keys, req_context)

    def _begin(self, transfer: _Transfer) -> None:
        self._transfers.setdefault(transfer.req_context.req_id, []).append(transfer)

    def _end(self, is_store: bool, keys: Collection[OffloadKey], req_context: Any) -> _Transfer | None:
        transfers = self._transfers.get(req_context.req_id, [])
        for index, transfer in enumerate(transfers):
            if transfer.is_store is is_store and len(transfer.keys) == len(keys) and transfer.keys[0] in keys:
                del transfers[index]
                if not transfers:
                    del self._transfers[req_context.req_id]
                return transfer
        return None

    # Requests and steps.

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        answer = self._manager.on_new_request(req_context)
        self._requests.add(req_context.req_id)
        self._set_stalled()
        is_whole = answer.policy is OurPolicy.REQUEST_LEVEL
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if is_whole else OffloadPolicy.CHUNK_LEVEL)

    def expect(self, req_id: str, keys: Iterable[OffloadKey]) -> None:
        """Promote the prefix of a new request until `was_scheduled`: some of its `keys` at the end of each step."""
        self._manager.prefetch(keys, ReqContext(req_id))

    def ask_known(self, req_id: str, keys: Callable[[], Sequence[OffloadKey]]) -> None:
        """Ask a host's cache which of a request's blocks on the GPU it has stored: the request offers them too."""
        self._manager.ask_known(keys, ReqContext(req_id))

    def outdate(self, req_id: str) -> None:
        """Let a request store and load nothing: the GPU may give it blocks from before a reset."""
        self._manager.outdate(ReqContext(req_id))

    def was_scheduled(self, req_id: str, tokens: int, computed_tokens: int, *, is_whole: bool = False) -> bool:
        """End the prefetch of a request: vLLM now looks up its blocks after the first `computed_tokens` tokens.

        With `is_whole` a part of the blocks is of no use: vLLM has several KV cache groups, or its only group has a
        window.

        Returns:
            False if the request waits, and a lookup would find no more than its last one.
        """
        if not self._is_polled:  # a job that ended during the last step is found in this one
            self._is_polled = True
            self._manager.poll()
        context, size = ReqContext(req_id), self._block_tokens
        promoting, asked_s = self._waiting.get(req_id, (0, 0.0))
        if promoting and promoting == self._manager.promoting(context) and time.monotonic() - asked_s < LOOKUP_S_MAX:
            return False
        if self._uncomputed.pop(req_id, None) is not None:  # it was looked up before, but the GPU had no room for it
            self._set_backlog()
        self._lacks_answer = False
        self._manager.end_prefetch(context)
        blocks, before = (tokens - computed_tokens) // size, computed_tokens // size
        self._manager.expect(blocks, context, before=before, is_whole=is_whole)
        return True

    def is_waited_for(self, req_id: str) -> bool:
        """Return whether a block that the last lookup of a request asked for may still come."""
        return self._lacks_answer or self._manager.promoting(ReqContext(req_id)) > 0

    def was_looked_up(self, req_id: str, uncomputed_tokens: int | None) -> None:
        """Note the tokens of a request that vLLM will compute, after its lookups; None if the request waits."""
        if uncomputed_tokens is None:
            promoting = 0 if self._lacks_answer else self._manager.promoting(ReqContext(req_id))
            self._waiting[req_id] = promoting, time.monotonic()
            return
        self._waiting.pop(req_id, None)
        self._computed.setdefault(req_id, uncomputed_tokens)
        self._uncomputed[req_id] = uncomputed_tokens
        self._set_backlog()

    def report_of(self, req_id: str) -> dict[str, object]:
        """Return what a request got, as JSON."""
        received = self._manager.received(ReqContext(req_id))
        return {
            "blocks": received.blocks,
            "tokens": received.tokens,
            "computed_tokens": self._computed.get(req_id, 0),
            "waited_seconds": received.waited_s,
        }

    def _set_stalled(self) -> None:
        self._manager.cost.stalled = max(0, len(self._requests) - 1)

    def _set_backlog(self) -> None:
        cost = self._manager.cost
        if cost.is_known:
            token_s = cost.block_s / self._block_tokens
            cost.backlog_s = token_s * sum(self._uncomputed.values())

    def step_began(self, output: Any) -> None:
        """Note the tokens of a scheduled step. vLLM calls `get_stats` at the end of each step, in the same order."""
        STEP.end()  # vLLM prepares stores after `on_schedule_end`
        running, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        if self._meter is not None:
            before: dict[str, int] = {}
            if max(scheduled.values(), default=0) >= PROMPT_TOKENS_MIN:  # the meter ignores a step with fewer tokens
                before |= zip(running.req_ids, running.num_computed_tokens, strict=True)
                before |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
            self._meter.begin([(tokens, before.get(name, 0)) for name, tokens in scheduled.items()])
        self._requests -= output.finished_req_ids  # `on_request_finished` comes later, after their stores
        self._set_stalled()
        if self._uncomputed or self._manager.cost.backlog_s:
            left = ((name, tokens - scheduled.get(name, 0)) for name, tokens in self._uncomputed.items())
            self._uncomputed = {name: tokens for name, tokens in left if tokens > 0}
            self._set_backlog()

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.discard(req_context.req_id)
        self._set_stalled()
        self._waiting.pop(req_context.req_id, None)
        self._uncomputed.pop(req_context.req_id, None)
        self._computed.pop(req_context.req_id, None)
        self._manager.on_request_finished(req_context)

    def on_schedule_end(self, context: Any) -> None:
        for req_id in getattr(context, "preempted_req_ids", None) or ():
            self._uncomputed.pop(req_id, None)
        self._manager.on_schedule_end()
        self._is_polled = False
        if self._steps_to_flush is not None:
            self._steps_to_flush -= 1
            if not self._steps_to_flush:
                self.on_reset_flushed()

    def has_pending_work(self) -> bool:
        """Return whether vLLM must run a step without a request: a host's cache waits for messages that it sends.

        Jobs of a stack that end while vLLM is idle are collected in its next step.
        """
        return self._manager.has_unsent

    # Resets, and the end.

    def reset_cache(self) -> None:
        """Forget every block in every tier, as after an update of the weights.

        Requests that vLLM has now store and load nothing until they end, even if it computes them anew.
        vLLM never completes the transfers that its workers have not reported. Their rows stay out of use until the
        workers have flushed them.
        """
        self._manager.reset_cache()
        self._stale += [transfer for transfers in self._transfers.values() for transfer in transfers]
        self._transfers.clear()
        self._steps_to_flush = self._flush_steps

    def on_reset_flushed(self) -> None:
        self._steps_to_flush = None
        stale, self._stale = self._stale, []
        for transfer in stale:
            if transfer.is_store:
                self._manager.complete_store(transfer.keys, transfer.req_context, False)
            else:
                self._manager.complete_load(transfer.keys, transfer.req_context)

    def take_events(self) -> Iterable[Any]:
        return vllm_events(self._manager.take_events(), self._reporting) if self._has_events else ()

    def get_stats(self) -> Any:
        if self._meter is not None and (cost := self._meter.end()) is not None:
            tokens = self._block_tokens
            engine = self._manager.cost
            engine.block_s, engine.growth_s = tokens * cost.token_s, tokens**2 * cost.growth_s
            engine.notice_s = self._meter.step_s
        return self._report.take(self._manager.registry.snapshot)

    def counters(self) -> CounterView:
        return self._manager.counters()

    def config_info(self) -> Sequence[Mapping[str, str | int]]:
        stack = self._stack
        tiers: Sequence[str]
        if isinstance(stack, HostCache):
            tiers, block_bytes, digest = ["host"], stack.block_bytes, stack.digest
        else:
            config = stack.config
            tiers, block_bytes, digest = stack.tier_names, config.block.bytes, config.identity.digest
        return [
            {
                "tiered_kv_tiers": ",".join(tiers),
                "tiered_kv_blocks": self._manager.num_rows,
                "tiered_kv_block_bytes": block_bytes,
                "tiered_kv_namespace": digest.hex(),
            }
        ]

    def shutdown(self) -> None:
        """Close the stack, which first ends its cascades within a time limit; or leave the host's cache."""
        if isinstance(self._stack, HostCache):
            self._manager.shutdown()
        else:
            self._stack.close()


INFO_KEYS = ("tiered_kv_tiers", "tiered_kv_blocks", "tiered_kv_block_bytes", "tiered_kv_namespace")
"""The labels that `TieredKVManager.config_info` fills."""
