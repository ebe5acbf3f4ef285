"""The manager of an engine that uses a host's cache: it answers from the server's messages, and never waits.

An engine's scheduler calls it, on one thread. What must stay true:

- A lookup answers True only for a row that is leased to the request. The lease ends only after the copy from the row.
- A row is written only if the server has granted it, and by one copy. The server learns its key after the copy.
- A request's answers and rows belong to one connection. After its loss all are misses, and no new connection is taken
  while a copy runs.
- A request that began before a reset loads and stores nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from tiered_kv.base import (
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from tiered_kv.hints import HintReader, Hints
from tiered_kv.metrics.registry import Registry
from tiered_kv.received import CPU, Received, count_load, groups_of, received_of
from tiered_kv.server import protocol
from tiered_kv.server.attach import Attachment, HostLink, HostRows
from tiered_kv.server.attached_counts import AttachedCounts
from tiered_kv.server.attached_request import AttachedRequest, parts_of
from tiered_kv.server.attached_requests import AttachedRequests
from tiered_kv.server.attached_stores import AttachedStores
from tiered_kv.server.connection import ServerConnection
from tiered_kv.server.protocol import ROW_MAX, Message
from tiered_kv.tiering.interface import CacheManager
from tiered_kv.tiering.pace import EngineCost

_NO_HINTS = Hints()


class AttachedManager(CacheManager):
    """Answers an engine's scheduler from a host's server.

    While the server is away every block is a miss, and nothing is stored. `on_attached` gets each new connection.

    Args:
        attachment: Connects to the server; `shutdown` closes it.
        clock: Seconds of a monotonic clock.
    """

    keys_are_alike = True
    """Whether all keys have one length."""
    callers_have_timeouts = False
    """Whether the caller limits its waits. An engine does not: its blocks are misses after the server's `wait_s`."""

    def __init__(
        self,
        attachment: Attachment,
        *,
        on_attached: Callable[[HostLink], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost = EngineCost()
        self._clock = clock
        self._requests = AttachedRequests()
        self._stores = AttachedStores()
        self.server = ServerConnection(
            attachment,
            clock,
            on_message=self._handle,
            on_reset=self._requests.outdate,
            on_lost=self._requests.forget_answers,
            on_attached=on_attached,
        )
        self._counts = AttachedCounts(self.server)
        self.registry = Registry()
        self.registry.add(self._counts.measure)
        self._hint_reader = HintReader()
        self._now_s = clock()  # of the last poll
        self.poll()

    @property
    def is_attached(self) -> bool:
        """Whether the server answers, and all workers have its rows."""
        return self.server.is_attached

    @property
    def epoch(self) -> int:
        """The number of resets of the namespace that this engine knows."""
        return self.server.epoch

    @property
    def link(self) -> HostLink | None:
        """The connection; None while the server is away."""
        return self.server.link

    @property
    def has_unsent(self) -> bool:
        link = self.link
        return link is not None and link.channel.has_unsent

    @property
    def num_rows(self) -> int:
        return 0 if self.link is None else self.link.welcome.rows

    @property
    def is_unused(self) -> bool:
        """Whether the engine has no request, and no copy runs."""
        return not self._requests and not self._requests.transfers

    # Lookups.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        request = self._requests.get(req_context.req_id) or self._begin(req_context)  # hot path: no further call
        row = request.rows.get(key) if request.is_unread else request.row_of.get(key)
        if request.is_outdated:
            return False
        if row is not None:
            if row <= ROW_MAX:
                return True
            if row == protocol.MISSING:
                return False
            return self._wait(request)
        if not self.is_attached or request.hints.skips_load:
            return False
        if request.ask((key,)):
            self._requests.unsent[request.number] = request
        return None if key in request.rows else False  # a request has at most `REQUEST_KEYS_MAX` keys

    def has_row(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether the server has said that a block is in its memory, or is being promoted for the request."""
        request, link = self._requests.get(req_context.req_id), self.link
        if request is not None and key in request.rows and not request.waits_for_answer:
            return request.rows[key] != protocol.MISSING
        return link is not None and link.is_known(key)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        request = self._request_of(req_context)
        if request.is_outdated:
            return [False] * len(keys)
        get = request.rows.get
        return [
            True if (row := get(key)) is not None and row <= ROW_MAX else self.lookup(key, req_context) for key in keys
        ]

    def prefetch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Ask for the prefix of a request in the engine's queue: ready blocks are leased, the others promoted."""
        request = self._requests.get(req_context.req_id) or self._begin(req_context)  # hot path, as above
        if self.server.is_attached and not request.is_outdated and not request.hints.skips_load:
            request.is_ahead = True
            if request.ask(keys):
                self._send_asked(request)
                self.server.flush()

    def ask_known(self, keys: Callable[[], Sequence[OffloadKey]], req_context: ReqContext) -> None:
        request = self._request_of(req_context)
        if self.is_attached and not request.is_outdated:
            self._tell(request)
            for part, packed in parts_of(keys(), are_alike=self.keys_are_alike):
                if self.link is None:
                    break
                request.known_asked.append(list(part))
                self.server.send(protocol.ACQUIRE, request.number, len(part), packed, protocol.ONLY_KNOWN)

    def end_prefetch(self, req_context: ReqContext) -> None:
        """Do nothing: `expect` tells the server that the request is scheduled."""

    def expect(self, blocks: int, req_context: ReqContext, *, before: int = 0, is_whole: bool = False) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None or not request.is_ahead:
            return
        if request.waits_for_answer:
            self.poll()  # it has mostly come since the request arrived: else the request would wait for a step
        if request.link is None or request.link is not self.link:
            return
        request.is_ahead = False
        codes = request.rows.values()
        if request.waits_for_answer or max(codes, default=0) > ROW_MAX:
            waits, cost = request.waits_for_answer or protocol.WAITING in codes, self.cost
            seconds = (cost.block_s, cost.growth_s, cost.backlog_s, cost.notice_s)
            expected = blocks if waits else 0  # with its final answer, it only tells the cost, for later requests
            body = protocol.EXPECTED.pack(expected, before, is_whole, cost.stalled, *seconds)
            self.server.send(protocol.EXPECT, request.number, body=body)
            if waits:
                request.asked_s, request.waits_for_answer = self._clock(), True

    def promoting(self, req_context: ReqContext) -> int:
        request = self._requests.get(req_context.req_id)
        return 0 if request is None else sum(row == protocol.WAITING for row in request.rows.values())

    def hit_tier(self, key: OffloadKey, req_context: ReqContext) -> str:
        request = self._requests.get(req_context.req_id)
        return CPU if request is None else request.sources.get(key, CPU)

    def received(self, req_context: ReqContext) -> Received:
        request, link = self._requests.get(req_context.req_id), self.link
        tokens = 0 if link is None else link.welcome.block_tokens
        return Received() if request is None else received_of(request.counts, request.waited_s, tokens)

    # Transfers.

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostRows:
        request = self._requests.get(req_context.req_id)
        found = [] if request is None else [request.rows.get(key, protocol.MISSING) for key in keys]
        link = self.link
        if link is None or request is None or request.link is not link or max(found, default=0) > ROW_MAX:
            raise ValueError("a block is not ready to be loaded; look keys up in the same step")
        self._requests.count_transfers(request, len(set(keys)))
        self._counts.loaded_blocks += len(found)
        request.end_wait(self._now_s)
        count_load(request.counts, groups_of(keys), keys, request.sources)
        return link.rows_of(found)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None:
            return
        keys = dict.fromkeys(keys)
        self._requests.count_transfers(request, -len(keys))
        self._release(keys, request)
        self._end_if_over(request)

    def _release(self, keys: Iterable[OffloadKey], request: AttachedRequest) -> None:
        """End a request's leases of these blocks."""
        if request.link is not None and request.link is self.link:
            rows = [row for key in keys if (row := request.rows.pop(key, protocol.MISSING)) <= ROW_MAX]
            self.server.release(request.number, rows)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        request = self._request_of(req_context)
        link = self.link
        is_kept_out = request.is_outdated or request.hints.skips_store
        if is_kept_out or link is None or not self.is_attached or request.link not in (None, link):
            return PrepareStoreOutput([], HostRows([], ""), [])
        begun = self._stores.begin(keys, request, link)
        if begun is None:
            return None
        new, rows = begun
        self._requests.count_transfers(request, len(new))
        return PrepareStoreOutput(new, link.rows_of(rows), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None:
            return
        written, rows = self._stores.end(keys)
        link = self.link
        if link is not None and request.link in (None, link):
            if success and not request.is_outdated:
                self._commit(written, rows, request, link)
            else:
                link.free += rows
        self._requests.count_transfers(request, -len(written))
        self._end_if_over(request)

    def _commit(
        self, keys: Sequence[OffloadKey], rows: Sequence[int], request: AttachedRequest, link: HostLink
    ) -> None:
        """Tell the server that these blocks are in these rows."""
        self._tell(request)
        at = 0
        for part, packed in parts_of(keys, are_alike=self.keys_are_alike):
            packed += protocol.pack_rows(rows[at : at + len(part)])
            self.server.send(protocol.COMMIT, request.number, len(part), packed)
            at += len(part)
        if self.link is link:
            link.know(keys, rows)
        self._counts.stored_blocks += len(keys)

    # Requests and steps.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        before = self._requests.get(req_context.req_id)
        if before is not None and before.transfers > 0:  # both have one id: the rows stay leased for both
            before.is_finished, before.hints = False, self._hints_of(req_context)
            return RequestOffloadingContext()
        if before is not None:
            before.is_finished = True
            self._end_if_over(before)
        self._begin(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.is_finished = True
            self._end_if_over(request)

    def outdate(self, req_context: ReqContext) -> None:
        self._request_of(req_context).outdate()

    def on_schedule_end(self) -> None:
        """Send the step's messages, and take the server's answers."""
        for request in self._requests.unsent.copy().values():
            self._send_asked(request)
        link = self.link
        if link is not None:
            self.server.ask_rows(link.welcome.grant_rows // 2)
        self.poll()

    def poll(self) -> None:
        """Take the server's answers, and notice that it has gone, or has come back."""
        self._now_s = self._clock()
        self.server.ask_rows(self._stores.take_short())
        self.server.return_rows(self._now_s, is_unused=not self._requests)
        self.server.poll(self._now_s, is_copying=self._requests.transfers > 0)

    def reset_cache(self) -> None:
        """Forget every block of the namespace, for all engines."""
        self._requests.outdate()
        self.server.reset()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return nothing: the server publishes the events of its tiers, for all engines."""
        return ()

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the connection. Rows that copies still use belong to this engine until its processes have ended."""
        self.server.close(is_copying=self._requests.transfers > 0)

    # Messages from the server.

    def _handle(self, message: Message) -> None:
        request, link = self._requests.by_number.get(message.number), self.link
        if request is None or link is None:
            return  # an END is on its way to the server, and ends the leases
        if message.code == protocol.ANSWER:
            misses = request.take_answer(message, link)
            if misses:
                self._counts.absent_blocks += misses
                self.server.ask_rows(misses)  # the engine will compute and store these
        elif message.code == protocol.KNOWN:
            request.take_known(message)
        elif message.code == protocol.STORED:
            request.take_stored(message)

    # Messages to the server.

    def _request_of(self, req_context: ReqContext) -> AttachedRequest:
        return self._requests.get(req_context.req_id) or self._begin(req_context)

    def _begin(self, req_context: ReqContext) -> AttachedRequest:
        return self._requests.begin(req_context, self._hints_of(req_context), self.epoch)

    def _hints_of(self, req_context: ReqContext) -> Hints:
        return self._hint_reader.read(req_context) or _NO_HINTS

    def _tell(self, request: AttachedRequest) -> None:
        """Let the server know a request before the first question for it."""
        if request.link is None and (link := self.server.link) is not None:
            request.link = link
            epoch = -1 if request.is_outdated else self.server.epoch_there(request.epoch)
            # The hints as they were understood: the text of the engine's users may be large, or no JSON.
            hints = None if request.hints is _NO_HINTS else request.hints.given() or {}
            body = protocol.pack_begun(epoch, request.req_context.req_id, hints)
            self.server.send(protocol.BEGIN, request.number, body=body)

    def _send_asked(self, request: AttachedRequest) -> None:
        """Ask for the keys that were noted."""
        self._requests.unsent.pop(request.number, None)
        first, request.unsent = request.unsent, len(request.keys)
        if self.server.link is None or first == len(request.keys):
            return
        self._tell(request)
        flags = protocol.AHEAD * request.is_ahead | protocol.AS_PREFIX * request.is_prefix
        for part, packed in parts_of(request.keys, first, are_alike=self.keys_are_alike):
            self.server.send(protocol.ACQUIRE, request.number, len(part), packed, flags)
        request.asked_s, request.waits_for_answer = self._clock(), True

    # The state of requests.

    def _wait(self, request: AttachedRequest, blocks: int = 1) -> bool | None:
        """Return the answer for blocks that may come: None, or False once the request has waited too long."""
        link = self.link
        if link is None or self.server.is_silent:
            return False
        request.wait(self._now_s)
        if request.number in self._requests.unsent:  # the step has not ended in which it was looked up
            return None
        limit_s = link.welcome.answer_s if request.waits_for_answer else link.welcome.wait_s
        is_unbounded = self.callers_have_timeouts and not request.waits_for_answer
        if is_unbounded or self._now_s - request.asked_s <= limit_s:
            return None
        self._counts.late_blocks += blocks
        return False

    def _end_if_over(self, request: AttachedRequest) -> None:
        if request.is_finished and request.transfers <= 0:
            if request.link is not None and request.link is self.link:
                self.server.send(protocol.END, request.number)
            self._requests.forget(request)
