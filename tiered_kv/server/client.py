"""The manager of an engine that uses a host's cache: it answers from what the server has sent, and never waits."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from tiered_kv.base import (
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from tiered_kv.errors import TieredKVError
from tiered_kv.hints import HintReader, Hints
from tiered_kv.server import protocol
from tiered_kv.server.attach import Attachment, HostLink, HostRows
from tiered_kv.server.attached_request import AttachedRequest, parts_of
from tiered_kv.server.protocol import ROW_MAX, Message, ProtocolError
from tiered_kv.tiering.pace import EngineCost

PACKETS_A_TURN = 64
_ANSWERED = frozenset((protocol.ACQUIRE, protocol.GRANT))
"""Messages that the server owes an answer."""
_NO_HINTS = Hints()


class AttachedManager(OffloadingManager):
    """Answers an engine's scheduler from a host's server. All methods belong to one thread, and only `shutdown` waits.

    While the server is away every block is a miss, and nothing is stored. `TieringOffloadingManager` explains the
    methods that both have.

    Args:
        attachment: Connects to the server; `shutdown` closes it.
        on_attached: Called with each new connection.
        clock: Seconds of a monotonic clock.

    Attributes:
        cost: What computing costs the engine, which an engine that measures it keeps up to date.
        epoch: The number of resets of the namespace that this engine knows.
    """

    keys_are_alike = True
    """Whether all keys have one length."""

    def __init__(
        self,
        attachment: Attachment,
        *,
        on_attached: Callable[[HostLink], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost = EngineCost()
        self.epoch = 0
        self._instance = ""
        self._epochs_before = 0
        """What `epoch` is more than the server's number, which begins with 0 when a server is started."""
        self._resets_owed = 0
        """Resets of this engine that may not have reached the server."""
        self._attachment = attachment
        self._clock = clock
        self._link: HostLink | None = None
        self._lost: HostLink | None = None
        """The last connection, while copies may run."""
        self.on_attached = on_attached
        self._hint_reader = HintReader()
        self._requests: dict[str, AttachedRequest] = {}
        self._by_number: dict[int, AttachedRequest] = {}
        self._number = 0
        self._unsent: dict[int, AttachedRequest] = {}
        """Requests with keys that were looked up and not asked for, by number."""
        self._writing: dict[OffloadKey, int] = {}
        self._transfers = 0
        self._now_s = clock()
        self._heard_s: float | None = None
        """Since when the server owes an answer; None if it owes none."""
        self._is_silent = False
        self._counts = {"loaded_blocks_total": 0, "stored_blocks_total": 0, "lost_connections_total": 0}
        self._misses = {"absent": 0, "too_late": 0}
        self.poll()

    @property
    def is_attached(self) -> bool:
        """Whether the server answers, and all workers have its rows."""
        link = self._link
        return link is not None and not self._is_silent and link.workers >= self._attachment.hello.workers

    @property
    def link(self) -> HostLink | None:
        """The connection; None while the server is away."""
        return self._link

    @property
    def has_unsent(self) -> bool:
        """Whether the end of a step has something to send."""
        return self._link is not None and self._link.channel.has_unsent

    @property
    def is_unused(self) -> bool:
        """Whether the engine has no request, and no copy runs."""
        return not self._requests and not self._transfers

    # Lookups.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        request = self._requests.get(req_context.req_id) or self._begin(req_context)  # hot path: no further call
        row = request.rows.get(key)
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
        self._ask(request, (key,))
        return None if key in request.rows else False  # a request has at most `REQUEST_KEYS_MAX` keys

    def has_row(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether the server has said that a block is in its memory, or is being promoted for the request."""
        request, link = self._requests.get(req_context.req_id), self._link
        if request is not None and key in request.rows and not request.waits_for_answer:
            return request.rows[key] != protocol.MISSING
        return link is not None and link.is_known(key)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return `lookup` of each key, in order."""
        request = self._request_of(req_context)
        if request.is_outdated:
            return [False] * len(keys)
        get = request.rows.get
        return [
            True if (row := get(key)) is not None and row <= ROW_MAX else self.lookup(key, req_context) for key in keys
        ]

    def prefetch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Ask for the prefix of a request in the engine's queue: what is ready is leased, the rest promoted."""
        request = self._request_of(req_context)
        if self.is_attached and not request.is_outdated and not request.hints.skips_load:
            request.is_ahead = True
            self._ask(request, keys)
            self._send_asked(request)
            self._flush()

    def ask_known(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Ask which blocks are stored, of those that the engine has itself and will offer."""
        request = self._request_of(req_context)
        if self.is_attached and not request.is_outdated:
            self._tell(request)
            for part, packed in parts_of(keys, are_alike=self.keys_are_alike):
                if self._link is None:
                    break
                request.known_asked.append(list(part))
                self._send(protocol.ACQUIRE, request.number, len(part), packed, protocol.ONLY_KNOWN)

    def end_prefetch(self, req_context: ReqContext) -> None:
        """The request is scheduled; `expect` says so to the server."""

    def expect(self, blocks: int, req_context: ReqContext, *, before: int = 0, is_whole: bool = False) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None or not request.is_ahead or request.link is not self._link or self._link is None:
            return
        request.is_ahead = False
        if protocol.WAITING in request.rows.values() or request.waits_for_answer:
            cost = self.cost
            seconds = (cost.block_s, cost.growth_s, cost.backlog_s, cost.notice_s)
            body = protocol.EXPECTED.pack(blocks, before, is_whole, cost.stalled, *seconds)
            self._send(protocol.EXPECT, request.number, body=body)
            request.asked_s, request.waits_for_answer = self._clock(), True

    def promoting(self, req_context: ReqContext) -> int:
        """Return for how many blocks a request waits."""
        request = self._requests.get(req_context.req_id)
        return 0 if request is None else sum(row == protocol.WAITING for row in request.rows.values())

    def hit_tier(self, key: OffloadKey, req_context: ReqContext) -> str:
        request, link = self._requests.get(req_context.req_id), self._link
        number = 0 if request is None else request.tier_of(key)
        return "cpu" if link is None else link.welcome.tiers[number]

    # Transfers.

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostRows:
        request = self._requests.get(req_context.req_id)
        found = [-1] if request is None else [request.rows.get(key, -1) for key in keys]
        link = self._link
        if link is None or request is None or request.link is not link or not _are_rows(found):
            raise ValueError("a block is not ready to be loaded; look keys up in the same step")
        self._count_transfers(request, len(set(keys)))
        self._counts["loaded_blocks_total"] += len(found)
        return link.rows_of(found)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None:
            return
        keys = dict.fromkeys(keys)
        self._count_transfers(request, -len(keys))
        if request.link is not None and request.link is self._link:
            rows = [row for key in keys if (row := request.rows.pop(key, protocol.MISSING)) <= ROW_MAX]
            self._release(request, rows)
        self._end_if_over(request)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        request = self._request_of(req_context)
        link = self._link
        if request.is_outdated or request.hints.skips_store or link is None or not self.is_attached:
            return PrepareStoreOutput([], HostRows([], ""), [])
        if request.link not in (None, link):
            return PrepareStoreOutput([], link.rows_of([]), [])
        held, writing, is_known = request.rows, self._writing, link.is_known
        new = [
            key
            for key in dict.fromkeys(keys)
            if key not in writing and held.get(key, protocol.MISSING) > ROW_MAX and not is_known(key)
        ][: link.welcome.grant_max]
        if len(new) > len(link.free):
            self._ask_rows(len(new))
            return None
        rows = [link.free.pop() for _ in new]
        writing.update(zip(new, rows, strict=True))
        self._count_transfers(request, len(new))
        return PrepareStoreOutput(new, link.rows_of(rows), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None:
            return
        written = [(key, row) for key in dict.fromkeys(keys) if (row := self._writing.pop(key, -1)) >= 0]
        link = self._link
        if link is not None and request.link in (None, link):
            rows = [row for _, row in written]
            if success and not request.is_outdated:
                self._tell(request)
                at = 0
                for part, packed in parts_of([key for key, _ in written], are_alike=self.keys_are_alike):
                    packed += protocol.pack_rows(rows[at : at + len(part)])
                    self._send(protocol.COMMIT, request.number, len(part), packed)
                    at += len(part)
                if self._link is link:
                    link.know([key for key, _ in written], rows)
                self._counts["stored_blocks_total"] += len(written)
            else:
                link.free += rows
        self._count_transfers(request, -len(written))
        self._end_if_over(request)

    # Requests and steps.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        before = self._requests.get(req_context.req_id)
        if before is not None and before.transfers > 0:  # told apart by the id alone: its rows stay leased for both
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
        """Treat a request as one from before the last reset."""
        request = self._request_of(req_context)
        request.outdate()

    def on_schedule_end(self) -> None:
        """Send what the step has asked for, and take what the server has answered."""
        for request in self._unsent.copy().values():
            self._send_asked(request)
        link = self._link
        if link is not None:
            self._ask_rows(link.welcome.grant_rows // 2)
        self.poll()

    def poll(self) -> None:
        """Take the server's answers, and notice that it has gone, or has come back."""
        self._now_s = self._clock()
        link = self._link
        if link is None:
            if not self._transfers:  # before that, workers copy to and from the rows of the last connection
                if self._lost is not None:
                    self._attachment.discard(self._lost)
                    self._lost = None
                self._link = self._attachment.take_link()
                if self._link is not None:
                    self._attached(self._link)
            return
        try:
            for message in link.channel.receive(PACKETS_A_TURN):
                self._heard_s, self._is_silent = None, False
                self._handle(message, link)
                if self._link is not link:
                    return
            is_late = self._heard_s is not None and self._now_s - self._heard_s > link.welcome.answer_s
            if is_late and not self._is_silent:
                self._is_silent = True
                link.channel.add(protocol.PING)  # its answer ends the silence, whatever became of the questions
            link.channel.flush()
        except (TieredKVError, ValueError, IndexError, struct.error) as error:  # also what is no message
            self._lose(str(error))

    def reset_cache(self) -> None:
        """Forget every block of the namespace, for all engines."""
        self.epoch += 1
        self._resets_owed += 1
        for request in self._requests.values():
            request.outdate()
        if self._link is not None:
            self._link.forget_known()
            self._send(protocol.RESET)
            self._flush()

    def take_events(self) -> Iterable[Any]:
        """Return nothing: the server publishes the events of its tiers, for all engines."""
        return ()

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the connection. Rows that copies still use stay this engine's until its processes have ended."""
        link, self._link = self._link, None
        if link is not None:
            if not self._transfers:
                link.say_bye()
            link.close()
        lost, self._lost = self._lost, None
        if lost is not None:
            lost.close()
        self._attachment.close()

    def counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        """Return what this engine has counted; the server's metrics have the rest. Any thread may call."""
        state = {"misses_total": dict(self._misses), "connection_state": int(self.is_attached)}
        return {"host": {**self._counts, **state}}

    # Messages from the server.

    def _handle(self, message: Message, link: HostLink) -> None:
        code, count, body = message.code, message.items, message.body
        if code == protocol.ANSWER:
            self._take_answer(message)
        elif code == protocol.GRANTED:
            link.free += protocol.split_rows(body, count)
            link.is_granting = False
        elif code == protocol.KNOWN:
            self._take_known(message, link)
        elif code == protocol.STORED:
            self._take_stored(message)
        elif code == protocol.EPOCH:
            epoch = message.number + self._epochs_before
            if count and self._resets_owed:  # others' resets say nothing of this engine's
                self._resets_owed -= 1
            if epoch > self.epoch:
                self.epoch = epoch
                for request in self._requests.values():
                    request.outdate()
        elif code == protocol.WORKERS:
            link.workers = message.number
        elif code == protocol.PONG:
            link.pong = max(link.pong, message.number)  # 0 answers a silence
        elif code in (protocol.GOODBYE, protocol.REFUSED):
            raise ProtocolError(bytes(body).decode(errors="replace") or "the server ends")

    def _take_answer(self, message: Message) -> None:
        request = self._by_number.get(message.number)
        if request is None:
            return  # END travels, and ends the leases
        misses = request.take_answer(message)
        if misses:
            self._misses["absent"] += misses
            self._ask_rows(misses)  # the engine will compute and store these

    def _take_stored(self, message: Message) -> None:
        """Note which blocks any tier has; for managers that ask."""

    def _take_known(self, message: Message, link: HostLink) -> None:
        request = self._by_number.get(message.number)
        count = message.items
        numbers = protocol.split_rows(message.body, 2 * count)
        if request is None or not request.known_asked:
            return
        keys = request.known_asked.pop(0)
        found = [
            (key, row, generation)
            for key, row, generation in zip(keys, numbers[:count], numbers[count:], strict=True)
            if row <= ROW_MAX
        ]
        link.know([key for key, _, _ in found], [row for _, row, _ in found], [each for _, _, each in found])

    # Messages to the server.

    def _request_of(self, req_context: ReqContext) -> AttachedRequest:
        return self._requests.get(req_context.req_id) or self._begin(req_context)

    def _begin(self, req_context: ReqContext) -> AttachedRequest:
        self._number = self._number % 0xFFFFFFFF + 1
        request = AttachedRequest(self._number, req_context, self._hints_of(req_context), epoch=self.epoch)
        self._requests[req_context.req_id] = self._by_number[request.number] = request
        return request

    def _hints_of(self, req_context: ReqContext) -> Hints:
        return self._hint_reader.read(req_context) or _NO_HINTS

    def _tell(self, request: AttachedRequest) -> None:
        """Let the server know a request before anything is asked for it."""
        if request.link is None and self._link is not None:
            request.link = self._link
            epoch = -1 if request.is_outdated else request.epoch - self._epochs_before
            # The hints as they were understood: what users of the engine have written may be large, or no JSON.
            name = request.req_context.req_id[:100].encode(errors="replace")
            hints = b"" if request.hints is _NO_HINTS else json.dumps(request.hints.given() or {}).encode()
            self._send(protocol.BEGIN, request.number, body=protocol.BEGUN.pack(epoch, len(name)) + name + hints)

    def _ask(self, request: AttachedRequest, keys: Iterable[OffloadKey]) -> None:
        """Note keys to be asked for, once each."""
        if request.ask(keys):
            self._unsent[request.number] = request

    def _send_asked(self, request: AttachedRequest) -> None:
        """Ask for the keys that were noted."""
        self._unsent.pop(request.number, None)
        first, request.unsent = request.unsent, len(request.keys)
        if self._link is None or first == len(request.keys):
            return
        self._tell(request)
        flags = protocol.AHEAD if request.is_ahead else 0
        for part, packed in parts_of(request.keys, first, are_alike=self.keys_are_alike):
            self._send(protocol.ACQUIRE, request.number, len(part), packed, flags)
        request.asked_s, request.waits_for_answer = self._clock(), True

    def _ask_rows(self, wanted: int) -> None:
        """Ask for rows to write if there are fewer than `wanted`."""
        link = self._link
        if link is not None and len(link.free) < wanted and not link.is_granting:
            link.is_granting = True
            wanted = min(max(wanted, link.welcome.grant_rows), link.welcome.grant_max)
            self._send(protocol.GRANT, wanted - len(link.free))

    def _return_rows(self) -> None:
        """Return the rows that were granted for stores which have not come: an idle engine keeps few."""
        link = self._link
        if link is not None and len(link.free) > link.welcome.grant_rows:
            excess = link.free[link.welcome.grant_rows :][: protocol.ROWS_MAX]
            del link.free[link.welcome.grant_rows : link.welcome.grant_rows + len(excess)]
            self._send(protocol.RETURN, count=len(excess), body=protocol.pack_rows(excess))

    def _release(self, request: AttachedRequest, rows: Sequence[int]) -> None:
        for at in range(0, len(rows), protocol.ROWS_MAX):
            part = rows[at : at + protocol.ROWS_MAX]
            self._send(protocol.RELEASE, request.number, len(part), protocol.pack_rows(part))

    def _send(self, code: int, number: int = 0, count: int = 0, body: bytes = b"", flags: int = 0) -> None:
        if self._link is not None:
            if self._heard_s is None and code in _ANSWERED:
                self._heard_s = self._clock()
            try:
                self._link.channel.add(code, number, count, body, flags)
            except ProtocolError as error:
                self._lose(str(error))

    def _flush(self) -> None:
        if self._link is not None:
            try:
                self._link.channel.flush()
            except TieredKVError as error:
                self._lose(str(error))

    # The state of requests and of the connection.

    def _wait(self, request: AttachedRequest) -> bool | None:
        """Return the answer for a block that may come: None, or False once the request has waited too long."""
        link = self._link
        if link is None or self._is_silent:
            return False
        if request.number in self._unsent:  # the step has not ended in which it was looked up
            return None
        limit_s = link.welcome.answer_s if request.waits_for_answer else link.welcome.wait_s
        if self._now_s - request.asked_s <= limit_s:
            return None
        self._misses["too_late"] += 1
        return False

    def _count_transfers(self, request: AttachedRequest, blocks: int) -> None:
        request.transfers += blocks
        self._transfers += blocks

    def _end_if_over(self, request: AttachedRequest) -> None:
        if request.is_finished and request.transfers <= 0:
            if request.link is not None and request.link is self._link:
                self._send(protocol.END, request.number)
            self._forget(request)
            if not self._requests:
                self._return_rows()

    def _forget(self, request: AttachedRequest) -> None:
        if self._requests.get(request.req_context.req_id) is request:
            del self._requests[request.req_context.req_id]
        self._by_number.pop(request.number, None)
        self._unsent.pop(request.number, None)

    def _attached(self, link: HostLink) -> None:
        welcome = link.welcome
        self._heard_s, self._is_silent = None, False
        if self.on_attached is not None:
            self.on_attached(link)
        if welcome.instance != self._instance:
            self._instance, self._epochs_before = welcome.instance, self.epoch
        self._resets_owed = min(self._resets_owed, 1)
        count = welcome.epoch + self._resets_owed
        if count + self._epochs_before > self.epoch:  # resets of others while this engine had no connection
            self.epoch = count + self._epochs_before
            for request in self._requests.values():
                request.outdate()
        self._epochs_before = self.epoch - count
        if self._resets_owed:
            self._send(protocol.RESET)

    def _lose(self, why: str) -> None:
        """The server has gone: what it has answered is not valid any more, but for copies that run."""
        link, self._link = self._link, None
        if link is None:
            return
        self._counts["lost_connections_total"] += 1
        self._lost = link
        link.channel.close()
        self._attachment.lost(why)
        self._unsent.clear()
        for request in self._requests.values():
            request.forget_answers()


def _are_rows(codes: Collection[int]) -> bool:
    return not codes or (min(codes) >= 0 and max(codes) <= ROW_MAX)
