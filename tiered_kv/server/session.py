"""One engine's use of a namespace: its requests, the rows that they lease, and the rows that it was granted.

The server's thread owns it. What must stay true:

- A row stays the session's until the engine gives it back, or its processes have ended. It is granted, without a key,
  or leased to each request that has it in `leased`; `leases` is their number. A message may name no other row.
- A request in `changed` or `waiting` is in `requests`, and the session then in the stack's `changed` or `waiting`.
- The stack's counts of requests, keys, leases and grants change with the session's, in the same call.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.server import protocol
from tiered_kv.server.channel import Channel
from tiered_kv.server.protocol import ClosedError, Message, ProtocolError
from tiered_kv.server.questions import Questions
from tiered_kv.server.served_stack import KEYS_ALL_MAX, KEYS_MAX, REQUESTS_ALL_MAX, REQUESTS_MAX, ServedStack
from tiered_kv.server.session_request import SessionRequest, params_of
from tiered_kv.tiering.pace import EngineCost

ASKED_AGAIN_MAX = 512
"""Limit of the keys that a session looks up again in a step, since a tier may have answered meanwhile."""


class Session:
    """Server-side state of one engine: its requests, leased rows and granted rows. The engine may copy until `close`.

    Args:
        name: The engine's name, unique among the sessions of the namespace.
        host: The namespace.
    """

    def __init__(self, name: str, host: ServedStack) -> None:
        self.name = name
        self.host = host
        self.channel: Channel | None = None
        """The scheduler's channel; None while it is not connected."""
        self.granted: dict[int, None] = {}
        self.leases = 0
        """Leases of all requests together."""
        self.requests: dict[int, SessionRequest] = {}
        self.waiting: dict[int, SessionRequest] = {}
        """By number, the requests with a key that has no final answer."""
        self.changed: dict[int, SessionRequest] = {}
        """Requests to answer in this step."""
        self.questions = Questions()
        self.cost = EngineCost()
        """The engine's cost of computing. It decides what requests load, unless the server's file has `prefill`."""
        self._keys = 0
        self._handlers: dict[int, Callable[[Message], None]] = {
            protocol.BEGIN: self._begin,
            protocol.ACQUIRE: self._acquire,
            protocol.EXPECT: self._expect,
            protocol.RELEASE: self._release,
            protocol.COMMIT: self._commit,
            protocol.END: lambda message: self._finish(self._request(message)),
            protocol.GRANT: self._grant,
            protocol.RETURN: self._return,
            protocol.RESET: lambda message: self.host.reset(self, message.number),
            protocol.PING: self._ping,
        }

    @property
    def is_waiting(self) -> bool:
        """Whether a request or a question may be answered without a further message."""
        return bool(self.waiting or self.questions)

    @property
    def has_rows(self) -> bool:
        return bool(self.granted or self.leases)

    def handle(self, message: Message) -> None:
        """Carry out a message of the scheduler.

        Raises:
            ProtocolError: The scheduler may not send this message.
        """
        handler = self._handlers.get(message.code)
        if handler is None:
            raise ProtocolError(f"there is no message {message.code} for a server")
        handler(message)

    def send(self, code: int, number: int = 0, count: int = 0, body: bytes = b"") -> None:
        """Add a message for the scheduler, if it is connected."""
        if self.channel is not None:
            with suppress(ProtocolError):  # a scheduler that does not read is disconnected when the server sends
                self.channel.add(code, number, count, body)

    def close(self) -> None:
        """Give back all rows, in later steps: no process of the session copies any more."""
        self.host.ended.add(self.requests.values(), self.granted)
        self.host.leave(self)
        self.requests, self.waiting, self.changed, self.granted = {}, {}, {}, {}
        self.questions = Questions()
        self.leases = self._keys = 0

    # Once a step.

    def answer_changed(self) -> None:
        """Look up the keys that requests named in this step; first look up again for requests that lack leases."""
        for request in [each for each in self.waiting.values() if each.lacks_leases]:
            self._look_up(request, ASKED_AGAIN_MAX)
        changed, self.changed = self.changed, {}
        for request in changed.values():
            if request.is_ahead:
                self._lease_ready(request, is_new=True)
                known, request.prefetched = max(request.answered, request.prefetched), len(request.codes)
                if known < len(request.codes):
                    self.host.manager.prefetch(request.keys[known:], request.context)
            else:
                self._look_up(request)

    def answer_waiting(self) -> None:
        """After the step, answer the requests for which a block may have come."""
        manager, left = self.host.manager, ASKED_AGAIN_MAX
        for request in list(self.waiting.values()):
            promoting = manager.promoting(request.context)
            is_over = request.is_ahead and not manager.is_ahead(request.context)
            if is_over or promoting != request.promoting or promoting < request.unanswered:
                if request.is_ahead:
                    self._lease_ready(request, ends_at_miss=is_over)
                elif left > 0:
                    left -= min(left, request.unanswered)
                    self._look_up(request, ASKED_AGAIN_MAX)
                    if request.number in self.waiting:  # behind the ones that were not looked up
                        self.waiting[request.number] = self.waiting.pop(request.number)
        self.questions.answer(self._tell_stored)
        if self.questions.idle_pings and not manager.jobs_in_flight:
            for number in self.questions.idle_pings:
                self.send(protocol.PONG, number)
            self.questions.idle_pings.clear()

    # Messages.

    def _begin(self, message: Message) -> None:
        epoch, name, hints = protocol.begun_of(message.body)
        if message.number in self.requests:
            raise ProtocolError(f"request {message.number} has begun already")
        if len(self.requests) >= REQUESTS_MAX or self.host.requests >= REQUESTS_ALL_MAX:
            raise ProtocolError(
                f"expected at most {REQUESTS_MAX} requests at a time, {REQUESTS_ALL_MAX} of all engines"
            )
        context = ReqContext(f"{self.name}/{message.number}/{name}", None if hints is None else params_of(hints))
        self.host.ended.forget_id(context.req_id)
        self.requests[message.number] = SessionRequest(message.number, context, epoch)
        self.host.requests += 1

    def _introduce(self, request: SessionRequest) -> None:
        """Let the manager know a request before it does anything for it, or after the first answer."""
        if not request.is_known:
            request.is_known = True
            self.host.manager.on_new_request(request.context)
            if self.host.config.is_prefill_measured:
                self.host.manager.use_cost(self.cost, request.context)
            if request.epoch != self.host.epoch:
                self.host.manager.outdate(request.context)

    def _acquire(self, message: Message) -> None:
        request = self._request(message, introduce=message.flags != protocol.AHEAD)
        count = message.items
        if message.flags & protocol.ONLY_KNOWN:
            self._tell_known(request, protocol.split_keys(message.body, count))
            return
        if message.flags & protocol.ONLY_STORED:
            self.questions.ask(request, protocol.split_keys(message.body, count))
            self.host.waiting[self] = None
            return
        protocol.key_bytes_of(message.body, count)
        if len(request.codes) + count > protocol.REQUEST_KEYS_MAX:
            raise ProtocolError(f"expected at most {protocol.REQUEST_KEYS_MAX} keys of a request")
        if self._keys + count > KEYS_MAX or self.host.keys + count > KEYS_ALL_MAX:
            raise ProtocolError(f"expected at most {KEYS_MAX} keys of all requests, {KEYS_ALL_MAX} of all engines")
        self._keys += count
        self.host.keys += count
        request.is_ahead, request.is_prefix = bool(message.flags & protocol.AHEAD), message.flags == protocol.AS_PREFIX
        request.unsplit.append((bytes(message.body), count))
        request.codes += protocol.codes_of(protocol.MISSING if request.has_hole else protocol.WAITING, count)
        self._change(request)

    def _change(self, request: SessionRequest) -> None:
        """Answer a request in this step."""
        self.changed[request.number] = request
        self.host.changed[self] = None

    def _expect(self, message: Message) -> None:
        request = self._request(message)
        blocks, before, is_whole, stalled, seconds = protocol.expected_of(message.body)
        self.cost.take(EngineCost(*seconds, stalled))
        self.host.show_cost(self)
        request.is_ahead, request.told = False, request.codes[:0]  # the engine waits for an answer, even the same
        self.host.manager.end_prefetch(request.context)
        self.host.manager.expect(blocks, request.context, before=before, is_whole=is_whole)
        self._change(request)

    def _release(self, message: Message) -> None:
        request, rows = self._request(message), protocol.split_rows(message.body, message.items)
        if len(set(rows)) < len(rows) or not request.leased.keys() >= set(rows):
            raise ProtocolError(f"request {request.number} has no lease of a row")
        self.leases -= len(rows)
        self.host.end_leases(request, rows)

    def _commit(self, message: Message) -> None:
        request = self._request(message)
        keys_bytes = max(0, len(message.body) - 4 * message.items)
        keys = protocol.split_keys(message.body[:keys_bytes], message.items)
        rows = protocol.split_rows(message.body[keys_bytes:], message.items)
        unused = self.host.manager.store_granted(keys, self._take_granted(rows), request.context)
        if not unused:
            self.host.index.note(keys, rows)
        else:
            self.host.generations.bump(unused)  # the engine takes them for stored
            self._give(unused)

    def _grant(self, message: Message) -> None:
        self.host.check_grant(message.number)
        self.host.ended.sweep(min(message.number, protocol.ROWS_MAX))  # it may have all rows that are left
        wanted = min(message.number, self.host.grant_max - len(self.granted), self.host.grant_room, protocol.ROWS_MAX)
        rows: list[int] | None = None
        if wanted > 0:
            grant = self.host.manager.primary.grant
            rows = grant(wanted) or grant((wanted + 3) // 4)  # several stores may ask at once: a part helps
        self._give(rows or [])

    def _return(self, message: Message) -> None:
        self.host.free(self._take_granted(protocol.split_rows(message.body, message.items)))

    def _ping(self, message: Message) -> None:
        if message.flags & protocol.WHEN_IDLE:
            self.questions.ask_idle(message.number)
            self.host.waiting[self] = None
        else:
            self.send(protocol.PONG, message.number)

    # Answers.

    def _tell_known(self, request: SessionRequest, keys: Sequence[OffloadKey]) -> None:
        """Tell which blocks are ready, and count a use of them: the engine need not store these blocks."""
        found = map(self.host.manager.primary.row_of, keys)
        rows = [protocol.MISSING if row is None else row for row in found]
        self.host.manager.touch(keys, request.context)  # secondary tiers may have the others
        current = self.host.generations.values
        generations = [current[row] if row != protocol.MISSING else 0 for row in rows]
        self.send(protocol.KNOWN, request.number, len(rows), protocol.pack_rows(rows) + protocol.pack_rows(generations))

    def _tell_stored(self, request: SessionRequest, keys: list[OffloadKey]) -> bool:
        """Tell which blocks any tier has, if all tiers have answered; return whether they have."""
        answers: Sequence[bool | None] = [True] * len(self.host.index.find_all([(b"".join(keys), len(keys))]))
        if len(answers) < len(keys):  # a program asks for what it has just stored: mostly all are in memory
            answers = self.host.manager.contains_many(keys, request.context)
        if None not in answers:
            self.send(protocol.STORED, request.number, len(keys), bytes(map(bool, answers)))
        return None not in answers

    def _look_up(self, request: SessionRequest, keys_max: int = protocol.REQUEST_KEYS_MAX) -> None:
        """Ask all tiers for keys without a final code, `keys_max` at most, and lease ready blocks."""
        manager, codes = self.host.manager, request.codes
        asked = [index for index in range(request.answered, len(codes)) if codes[index] == protocol.WAITING]
        if len(asked) > keys_max:
            first = 0 if request.is_prefix else bisect_left(asked, request.asked_to)
            asked = (asked[first:] + asked[:first])[:keys_max]
            request.asked_to = asked[-1] + 1
        look_up = manager.lookup_prefix if request.is_prefix else manager.lookup_many
        answers = look_up([request.keys[index] for index in asked], request.context)
        room, ready = self._lease_room, list[int]()
        if request.is_prefix:
            self._answer(request, *request.take_head(asked, answers, room, manager.primary))
            return
        for index, answer in zip(asked, answers, strict=True):
            if answer and len(ready) < room:
                row = manager.primary.row_of(request.keys[index])
                assert row is not None
                codes[index] = row
                ready.append(row)
            elif answer is not None:  # a scheduled request does not wait for room
                codes[index] = protocol.MISSING  # later blocks may be of use: an engine asks for a window's end first
        self._answer(request, ready)

    def _lease_ready(self, request: SessionRequest, *, ends_at_miss: bool = False, is_new: bool = False) -> None:
        """Lease the ready blocks at the head of a request that waits in the engine's queue.

        `ends_at_miss` says that no tier promotes the blocks behind the ready ones: then a miss ends the prefix. It also
        does if `is_new` keys have just come, and all tiers lack the block: a new prompt waits for no step in vain.
        """
        codes, first, index = request.codes, request.answered, self.host.index
        if request.epoch != self.host.epoch or request.context.kv_transfer_params:  # the request may skip loads
            self._introduce(request)
        if self.host.manager.loads_nothing(request.context):
            request.cut(first)
            self._answer(request, [])
            return
        # Hot path: few passes over the keys of a prompt, while its engine's step waits for the answer.
        last = min(len(codes), first + self._lease_room)
        rows = index.find_all(request.unsplit_from(first))[: last - first]
        indexed = first + len(rows)
        if indexed < last:
            rows.extend(self._ready_rows(request.keys[indexed:last]))
        end = first + len(rows)
        codes[first:end] = rows
        is_missing = ends_at_miss and end < last
        if is_new and end < len(codes):
            self._introduce(request)
            is_missing = self.host.quick_tiers.lack(request.keys[end], request.context)
        if is_missing:
            primary = self.host.manager.primary
            for row in rows:
                primary.table.step[row] = primary.step  # promoting the next one evicts none of these
            if self.host.manager.lookup_many([request.keys[end]], request.context) == [False]:
                request.cut(end)
        self._answer(request, rows)
        if indexed < end:
            index.note(request.keys[first:end], rows)

    def _ready_rows(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the rows of the ready blocks at the head of a prefix."""
        found = map(self.host.manager.primary.row_of, keys)
        return [row for row in takewhile(lambda row: row is not None, found) if row is not None]

    @property
    def _lease_room(self) -> int:
        return min(self.host.leases_max - self.leases, self.host.lease_room)

    def _answer(self, request: SessionRequest, ready: Sequence[int], behind: int = 0) -> None:
        """Tell the engine the changed codes, and pin the `ready` rows; `behind` others wait only for earlier ones."""
        codes, first = request.codes, request.answered
        waiting = codes.count(protocol.WAITING) if first + len(ready) < len(codes) else 0
        request.unanswered = waiting - behind
        if waiting:
            request.promoting = self.host.manager.promoting(request.context)
            while codes[request.answered] != protocol.WAITING:
                request.answered += 1
            self.waiting[request.number] = request
            self.host.waiting[self] = None
            if codes[first:] != request.told:
                self._tell(request, first)
            request.told = codes[request.answered :]
        else:
            request.answered, request.told = len(codes), codes[:0]
            self.waiting.pop(request.number, None)
            self._tell(request, first)
        self._introduce(request)
        if ready:
            rows = dict.fromkeys(ready)
            if request.leased:
                rows = dict.fromkeys(row for row in rows if row not in request.leased)
            request.leased |= rows
            self.leases += len(rows)
            self.host.leases += len(rows)
            self.host.manager.lease(list(rows), request.context)

    def _tell(self, request: SessionRequest, first: int) -> None:
        sources = self.host.manager.sources_of(request.context)
        for start in range(first, len(request.codes), protocol.ROWS_MAX):
            part = request.codes[start : start + protocol.ROWS_MAX]
            keys = request.keys[start : start + len(part)] if sources else ()
            tiers = self.host.tiers_of(keys, sources) or bytes(len(part))
            body = protocol.START.pack(start) + part.tobytes() + tiers
            self.send(protocol.ANSWER, request.number, len(part), body)
        if self.channel is not None:
            with suppress(ClosedError, ProtocolError):  # the server notices that, too
                self.channel.flush()
                os.sched_yield()  # the kernel may have woken the engine on this processor: it runs first

    # Rows.

    def _finish(self, request: SessionRequest) -> None:
        for requests in (self.requests, self.waiting, self.changed):
            requests.pop(request.number, None)
        self.leases -= len(request.leased)
        self._keys -= len(request.codes)
        self.questions.forget(request)
        self.host.ended.end(request)

    def _take_granted(self, rows: Sequence[int]) -> Sequence[int]:
        if len(set(rows)) < len(rows) or not all(row in self.granted for row in rows):
            raise ProtocolError("a row was not granted to the session")
        self.host.granted -= len(rows)
        for row in rows:
            del self.granted[row]
        return rows

    def _give(self, rows: Sequence[int]) -> None:
        """Grant rows, which the engine may write from now on."""
        self.granted.update(dict.fromkeys(rows))
        self.host.granted += len(rows)
        self.send(protocol.GRANTED, 0, len(rows), protocol.pack_rows(rows))

    def _request(self, message: Message, *, introduce: bool = True) -> SessionRequest:
        request = self.requests.get(message.number)
        if request is None:
            raise ProtocolError(f"there is no request {message.number}")
        if introduce:
            self._introduce(request)
        return request
