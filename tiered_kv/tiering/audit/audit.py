"""The audit: a share of requests is computed anew, and the stored blocks are compared with the computed ones.

A namespace cannot contain everything that shapes a block's bytes. So the lookups of audited requests are answered with
misses. The engine computes their blocks and stores them. Each block is compared with the copy that a tier has:

- In the primary tier: the engine writes into a *spare row* instead, and both rows are compared.
- In a secondary tier: the engine stores the block as a new one, and the tier's copy is loaded into a spare row.

`AuditedManager` calls it, and `GuardedTier` reports its loads to it, on the manager's thread. What must stay true: an
audited request uses no stored block, and a spare row is free once its comparison or its job has ended.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv.base import OffloadKey, PrepareStoreOutput, ReqContext
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.metrics.series import Family, by_label, numbers
from tiered_kv.metrics.vocabulary import AUDIT
from tiered_kv.tiering.audit.comparison import BLOCKS_MAX, Audited, AuditedGroup, Pair, SpareRows, is_known
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob
from tiered_kv.tiering.many_lookups import ask_tier
from tiered_kv.tiering.requests import RequestTable

logger = logging.getLogger("tiered_kv.tiering.audit")

DURATION_MAX_S: Final = 60.0
"""Seconds that an audit may take, from its request's first lookup on."""
LOGGED_KEYS_MAX: Final = 8
_SHOWN_MAX: Final = 1e3
"""The largest difference that a gauge shows. Values of an unknown type, or not finite, have an infinite difference."""


@dataclass(frozen=True, slots=True)
class AuditRules:
    """The audit's settings."""

    share: float  # the part of requests that is audited, above 0 and up to 1
    tolerance: float  # the largest difference (`difference_of`) that counts as close
    stops: bool = False  # whether a tier is not used any more once a block of it differs
    dtype: str = "auto"  # the type of values, from the namespace


class Audit:
    """Chooses requests, one at a time, and follows their blocks until they are compared. Owned by the manager's thread.

    Attributes:
        is_active: Whether lookups have to call `note_lookup`.
        stopped: Names of tiers that must not be used any more.
    """

    def __init__(
        self,
        rules: AuditRules,
        primary: PrimaryRows,
        requests: RequestTable,
        tiers: Sequence[GuardedTier],
        clock: Callable[[], float],
    ) -> None:
        self.is_active = False
        self.stopped: set[str] = set()
        self._rules = rules
        self._primary = primary
        self._tiers = tiers
        self._clock = clock
        self._spare_rows = SpareRows(primary, requests, tiers, rules.dtype)
        self._numbers = itertools.count()
        self._current: Audited | None = None  # the audit that runs
        self._written: dict[OffloadKey, Pair] = {}  # pairs whose spare row the engine is writing
        self._loads: dict[SubmittedJob, list[Pair]] = {}  # pairs whose spare row a job is loading
        self._verdicts = {name: Counter[str]() for name in (PRIMARY_NAME, *(guarded.name for guarded in tiers))}
        self._largest: dict[str, float] = {}  # the largest difference, by tier
        self._abandoned: Counter[str] = Counter()  # blocks, by reason
        self._num_requests = self._busy_requests = 0

    @property
    def in_flight(self) -> int:
        """Comparisons that have not ended."""
        return self._spare_rows.in_flight

    def measure(self) -> Iterator[tuple[str, list[Family]]]:
        """Yield counters, for a `Registry`. Counters of the whole audit are the primary tier's. Any thread may call."""
        largest, stopped = self._largest.copy(), self.stopped.copy()
        for name, verdicts in self._verdicts.items():
            gauges = {"audit_largest_difference_ratio": largest[name]} if name in largest else {}
            if name in stopped:
                gauges["audit_stopped"] = 1
            yield name, [by_label(AUDIT["audited_blocks_total"], dict(verdicts)), *numbers(AUDIT, gauges)]
        counts = {"audited_requests_total": self._num_requests, "audit_busy_requests_total": self._busy_requests}
        abandoned = by_label(AUDIT["audit_abandoned_blocks_total"], dict(self._abandoned))
        yield PRIMARY_NAME, [*numbers(AUDIT, counts), abandoned]

    # The engine's calls.

    def audit_only(self, group: AuditedGroup) -> None:
        """Compare only the blocks of one KV cache group, for an engine with several groups."""
        self._spare_rows.group = group

    def begin(self, req_context: ReqContext) -> None:
        """Audit a new request, if it is chosen and no other request is being audited."""
        req_id, current = req_context.req_id, self._current
        if not req_id or not is_chosen(req_id, self._rules.share) or self.withholds_all:
            return
        if current is None:
            context = ReqContext(f"\0audit-{next(self._numbers)}")
            self._current = Audited(req_id, context, self._clock() + DURATION_MAX_S)
            self.is_active = True
        elif current.req_id != req_id:
            self._busy_requests += 1

    def audits(self, req_context: ReqContext) -> bool:
        return self._current is not None and self._current.req_id == req_context.req_id

    @property
    def withholds_all(self) -> bool:
        """Whether every lookup is a miss, since the primary tier had a wrong block."""
        return PRIMARY_NAME in self.stopped

    def note_lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Note the first key that the audited request looks up. Return whether the lookup is answered with a miss."""
        audited = self._current
        if self.withholds_all:
            return True
        if audited is None or audited.req_id != req_context.req_id:
            return False
        group = self._spare_rows.group
        if audited.first_key is None and (group is None or group.has(key)):
            audited.first_key = key
            audited.until_s = self._clock() + DURATION_MAX_S
        return True

    def prepare(
        self, keys: Collection[OffloadKey], output: PrepareStoreOutput, req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Return `output`, with spare rows added for blocks that the primary tier already has."""
        audited = self._current
        if audited is None:
            return output
        fresh, group = set(output.keys_to_store), self._spare_rows.group
        present: list[OffloadKey] = []
        for key in audited.computed(req_context.req_id, keys):
            if group is not None and not group.is_whole(key, req_context):
                continue
            is_ready = self._primary.row_of(key) is not None
            if key not in fresh and (not is_ready or key in self._written):
                continue
            if key not in self._primary:
                continue
            free_rows = self._spare_rows.room - len(audited.asked) - len(present)
            if len(audited.taken) >= BLOCKS_MAX or free_rows <= 0:
                audited.is_taking = False
                break
            audited.taken.add(key)
            if key in fresh:
                audited.asked[key] = None
            else:
                present.append(key)
        self._ask(audited)
        return self._with_spare_rows(audited, keys, output, present, req_context) if present else output

    def complete(
        self,
        keys: Collection[OffloadKey],
        written: Sequence[int],
        req_id: str,
        context: ReqContext,
        success: bool,
    ) -> None:
        """Process the end of a request's store; `written` are the store's blocks outside of spare rows.

        `context` is the request's context for jobs. If the request is over, it has no request id.
        """
        for pair in [self._written[key] for key in keys if key in self._written]:
            if pair.writer == req_id:
                del self._written[pair.key]
                self._end_pair(pair, "" if success else "failed_store")
        audited = self._current
        if audited is None or audited.storer != req_id or not audited.asked:
            return
        if not success:
            lost = [audited.asked.pop(key) for key in keys if key in audited.asked]
            self._abandon("failed_store", len(lost))
            return
        self._ask(audited)
        found: dict[GuardedTier, list[OffloadKey]] = {}
        for key in map(self._primary.table.key.__getitem__, written):
            if key not in audited.asked:
                continue
            guarded = audited.asked.pop(key)
            if guarded is not None:
                found.setdefault(guarded, []).append(key)
            else:
                self._abandon("unanswered", 1)
        for guarded, of_tier in found.items():
            self._load(audited, guarded, of_tier, context)

    def finish(self, req_context: ReqContext) -> None:
        """Note the end of a request; its stores may still be in flight."""
        audited = self._current
        if audited is None:
            return
        if req_context.req_id == audited.storer:
            audited.is_taking = False
        if req_context.req_id == audited.req_id:
            audited.is_finished = True
            if audited.first_key is None:
                self._end()

    # Events of tiers and of time.

    def ended(self, job: SubmittedJob, result: JobResult) -> None:
        """Process a load that the tier has reported."""
        loaded = job.loaded_keys(result)
        for pair in self._loads.pop(job):
            if job.is_expired:
                self._spare_rows.free(pair)
            else:
                self._end_pair(pair, "" if pair.key in loaded else "failed_load")

    def expired(self, job: SubmittedJob) -> None:
        """Abandon an expired load. Its spare rows stay with the job."""
        for pair in self._loads[job]:
            self._spare_rows.expire(pair)
            self._abandon("failed_load", pair.audited is self._current)

    def tick(self, now_s: float) -> None:
        """Process finished comparisons, and end an audit that is complete or takes too long."""
        for pair, difference in self._spare_rows.take():
            if pair.audited is not self._current:
                continue
            if difference is None:
                self._abandon("error", 1)
            else:
                self._judge(pair.audited, pair.tier, pair.key, difference)
        audited = self._current
        if audited is None:
            return
        self._ask(audited)
        if audited.different and self._rules.stops:
            self._end("stopped")
        elif now_s >= audited.until_s:
            self._end("expired")
        elif not (audited.is_taking or audited.asked or self._spare_rows.pending(audited)):
            self._end()

    def reset(self) -> None:
        """End the current audit: its blocks are forgotten."""
        if self._current is not None:
            self._end("reset")

    def close(self, timeout_s: float) -> None:
        """End the audit and its thread; wait at most `timeout_s` for the last comparison."""
        self.reset()
        self._spare_rows.stop(timeout_s)
        self.tick(self._clock())

    # One step each.

    def _ask(self, audited: Audited) -> None:
        """Look up, tier by tier, the blocks without a known tier."""
        rest = [key for key, guarded in audited.asked.items() if guarded is None]
        for guarded in self._tiers:
            if not rest:
                return
            answers = dict(zip(rest, ask_tier(guarded, rest, audited.context, self._clock()), strict=True))
            audited.asked.update({key: guarded for key, answer in answers.items() if answer})
            rest = [key for key, answer in answers.items() if answer is not None and not answer]
        for key in rest:
            del audited.asked[key]
            audited.is_taking = False  # no tier has usable blocks after a miss

    def _with_spare_rows(
        self,
        audited: Audited,
        keys: Collection[OffloadKey],
        output: PrepareStoreOutput,
        present: list[OffloadKey],
        req_context: ReqContext,
    ) -> PrepareStoreOutput:
        evicted: list[OffloadKey] = []
        pairs = self._spare_rows.pair(audited, present, req_context, evicted)
        self._abandon("no_room", len(present) - len(pairs))
        self._written |= {pair.key: pair for pair in pairs}
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        rows = dict(zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True))
        rows |= {pair.key: pair.spare for pair in pairs}
        ordered = [key for key in dict.fromkeys(keys) if key in rows]
        spec = CPULoadStoreSpec([rows[key] for key in ordered])
        return PrepareStoreOutput(ordered, spec, [*output.evicted_keys, *evicted])

    def _load(self, audited: Audited, guarded: GuardedTier, stored: list[OffloadKey], req_context: ReqContext) -> None:
        """Load into spare rows a tier's copies of blocks that the engine has just stored."""
        pairs = self._spare_rows.pair(audited, stored[: max(guarded.load_room(), 0)], req_context, [], guarded)
        self._abandon("no_room", len(stored) - len(pairs))
        if not pairs:
            return
        keys, rows = [pair.key for pair in pairs], [pair.spare for pair in pairs]
        job = guarded.submit(keys, rows, audited.context, self, is_promotion=True)
        if job is not None:
            self._loads[job] = pairs
            return
        for pair in pairs:
            self._end_pair(pair, "failed_load")

    def _end_pair(self, pair: Pair, failure: str = "") -> None:
        """Compare a pair whose spare row is filled. After a `failure`, or when its audit has ended, release it."""
        if pair.audited is not self._current:  # already counted in `_end`
            self._spare_rows.release(pair)
        elif failure:
            self._spare_rows.release(pair)
            self._abandon(failure, 1)
        else:
            self._spare_rows.compare(pair)

    def _judge(self, audited: Audited, tier: str, key: OffloadKey, difference: float) -> None:
        """Count the verdict on one block of `tier`; stop the tier if the rules say so."""
        audited.compared += 1
        audited.largest = max(audited.largest, difference)
        self._largest[tier] = max(self._largest.get(tier, 0.0), round(min(difference, _SHOWN_MAX), 6))
        verdict = "identical" if not difference else "close" if difference <= self._rules.tolerance else "different"
        self._verdicts[tier][verdict] += 1
        if verdict == "different":
            audited.different.append(key)
            if self._rules.stops:
                self.stopped.add(tier)

    def _abandon(self, reason: str, num_blocks: int) -> None:
        if num_blocks:
            self._abandoned[reason] += num_blocks

    def _end(self, reason: str = "") -> None:
        """End the current audit; `reason` is counted for blocks that were not compared."""
        audited = self._current
        assert audited is not None
        self._current = None
        self.is_active = self.withholds_all
        for guarded in self._tiers:
            guarded.call("on_request_finished", audited.context)
        self._abandon(reason, self._spare_rows.pending(audited) + len(audited.asked))
        self._num_requests += bool(audited.compared)
        if audited.different:
            shown = " ".join(map(_log_name, audited.different[:LOGGED_KEYS_MAX]))
            logger.error(
                "audit: %d of %d stored blocks differ from what the engine computed for request %s; largest difference "
                "%.3g of the values, tolerance %.3g, type %s; blocks %s%s%s",
                len(audited.different),
                audited.compared,
                _log_name(audited.req_id),
                audited.largest,
                self._rules.tolerance,
                self._rules.dtype if is_known(self._rules.dtype) else f"{self._rules.dtype}, compared as bytes",
                shown,
                " ..." if len(audited.different) > LOGGED_KEYS_MAX else "",
                f"; not used any more: {', '.join(sorted(self.stopped))}" if self.stopped else "",
            )


def is_chosen(req_id: str, share: float) -> bool:
    """Return whether a request is in the audited share, by a hash of its id."""
    return int(_log_name(req_id), 16) < share * 2.0**64


def _log_name(named: str | bytes) -> str:
    """Return the digest that stands for a request's id or a key in logs."""
    name = named.encode("utf-8", "surrogatepass") if isinstance(named, str) else named
    return hashlib.blake2b(name, digest_size=8).hexdigest()
