"""Blocks in servers: the commands for each server, and the failure of each block.

`RedisTier` calls it on the toolkit's workers. A store succeeds only once its server has confirmed it, and a load only
once its block is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tiered_kv.metrics.counters import Counters
from tiered_kv.reasons import UNREADABLE, Reason
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, Unreadable, decode_record, record_bytes_max
from tiered_kv_redis import reasons as why
from tiered_kv_redis.connection import Link
from tiered_kv_redis.exchange import Batch, Calls, Exchange, Failures, Stores, Transfer, run
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import NodeError, RedisReason, ServerFailure
from tiered_kv_redis.replies import Refusal, command
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import Topology

_SENDS_BYTES = 4 << 20
_SEND_BYTES_MIN = 1 << 20
"""One call sends `_SENDS_BYTES` of records, divided by the number of connections, but at least this. The server reads
them while the next are hashed. Each call releases and takes the interpreter lock, so many small calls cost more than
the server gains by an earlier start. The connections together give the server enough to read."""

AnyExchange = TypeVar("AnyExchange", bound=Exchange)

_REPLY_BYTES_FREE = 16 << 10
"""Bytes of replies that do not count for a server's `client-output-buffer-limit`."""
_CRLF = b"\r\n"
_PIECES = 3  # pieces of memory for one expected reply: its head, the block, the end of the line
_IOV_PIECES = 1023  # pieces of one call: a multiple of `_PIECES`, below IOV_MAX (1024)
_PENDING_MIN = 2  # blocks to request at once: while one is received and verified, the server sends the next


class Blocks:
    """The blocks of one namespace. Worker threads call, several at once.

    `note_failures` is called with an operation, how many blocks failed, and why.
    """

    def __init__(
        self,
        settings: RedisSettings,
        codecs: CodecSet,
        topology: Topology,
        counters: Counters,
        block_bytes: int,
        namespace_digest: bytes,
        note_failures: Callable[[str, int, RedisReason], object],
    ) -> None:
        self._topology = topology
        self._counters = counters
        self._note_failures = note_failures
        self._record_bytes_max = record_bytes_max(block_bytes)
        self._transfer = Transfer(
            namespace_digest,
            codecs,
            ttl_ms=None if settings.ttl is None else max(1, round(settings.ttl * 1000)),
            send_bytes=max(_SEND_BYTES_MIN, _SENDS_BYTES // settings.connections),
            pipeline_bytes=settings.pipeline,
        )
        self._unreadable: Unreadable[bytes] = Unreadable()
        """The blocks that could not be read, by their names in the servers."""
        # Whether the next store asks first which blocks exist: if half of the last store's blocks existed.
        # Threads overwrite each other's value: that costs a round trip, or some needless sends.
        self._asks_first = False
        self._refuses_renewals = False  # whether a server has refused PEXPIRE

    def store(self, batch: Batch) -> Failures:
        """Store blocks that are missing, and replace values that are no blocks or that this process cannot read."""
        return _with_second_attempt(lambda positions: self._store(positions, batch), batch)

    def load(self, batch: Batch) -> Failures:
        """Load blocks into place. Delete values that no process can load, so that they are stored again."""
        return _with_second_attempt(lambda positions: self._load(positions, batch), batch)

    def contains(self, batch: Batch) -> tuple[list[bool], Failures]:
        """Return for each name whether a value of a possible size exists that this process did not find unreadable.

        The answer is False also where the server did not answer; the failures have the reason.
        """
        lengths: dict[int, int] = {}
        failures = _with_second_attempt(lambda positions: self._ask_lengths(positions, batch, lengths), batch)
        answers = [
            self._may_be_block(lengths.get(at)) and name not in self._unreadable for at, name in enumerate(batch.names)
        ]
        return answers, failures

    def touch(self, batch: Batch) -> list[int]:
        """Let the servers count a use of blocks, and begin their `ttl` anew; return the positions of missing ones."""
        ttl_ms = self._transfer.ttl_ms
        absent: list[int] = []
        renews = ttl_ms is not None and not self._refuses_renewals

        def ask(positions: Sequence[int]) -> Failures:
            failures: Failures = {}
            replies = self._ask(b"PEXPIRE", positions, batch, failures, b"%d" % (ttl_ms or 0)) if renews else {}
            if not renews:  # a read is a use, for the eviction
                replies = self._ask(b"STRLEN", positions, batch, failures)
            absent.extend(at for at, reply in replies.items() if reply == 0)
            return failures

        reasons = Counter(_with_second_attempt(ask, batch).values())
        for reason, count in reasons.items() if renews else ():
            self._note_failures("renewal", count, reason)
        self._refuses_renewals |= renews and not {ServerFailure.PERMISSION, ServerFailure.SERVER_ERROR}.isdisjoint(
            reasons
        )
        return absent

    # A position is a block's place in the batch.

    def _store(self, positions: Sequence[int], batch: Batch) -> Failures:
        unreadable = {at for at in positions if batch.names[at] in self._unreadable}
        occupied, failures = positions, Failures()
        if not self._asks_first:
            occupied, failures = self._send(positions, batch, overwrite=False)
        if not occupied:
            return failures
        lengths: dict[int, int] = {}
        unknown = self._ask_lengths(occupied, batch, lengths)
        replaced = [
            at for at in occupied if at not in unknown and (at in unreadable or not self._may_be_block(lengths.get(at)))
        ]
        present = len(occupied) - len(unknown) - len(replaced)
        self._counters.add("present_blocks_total", count=present)
        self._asks_first = 2 * present >= len(positions)
        return failures | unknown | self._send(replaced, batch, overwrite=True)[1]

    def _send(self, positions: Sequence[int], batch: Batch, *, overwrite: bool) -> tuple[list[int], Failures]:
        """Send blocks; return the positions where servers kept existing values, and the failures."""
        failures: Failures = {}
        exchange = partial(Stores, batch=batch, transfer=self._transfer, overwrite=overwrite)
        done = self._run(positions, batch, failures, exchange)
        occupied = [at for exchange in done for at in exchange.occupied]
        left = {*occupied, *failures}
        self._unreadable.forget(batch.names[at] for at in positions if at not in left)
        return occupied, failures

    def _load(self, positions: Sequence[int], batch: Batch) -> Failures:
        failures: Failures = {}
        exchange = partial(Loads, batch=batch, transfer=self._transfer)
        while positions:
            failed: Failures = {}
            done = self._run(positions, batch, failed, exchange)
            self._unreadable.note(batch.names[at] for each in done for at in each.unreadable)
            self._unreadable.forget(batch.names[at] for at in positions if at not in failed)
            damaged = [at for each in done for at in each.damaged]
            if damaged:
                for at in damaged:
                    self._counters.add("corrupt_blocks_total", failed[at].value)
                kept: Failures = {}
                self._ask(b"UNLINK", damaged, batch, kept)
                self._unreadable.note(batch.names[at] for at in kept)  # no permission, or no answer
                for reason, count in Counter(kept.values()).items():
                    self._note_failures("delete", count, reason)
            # A value that is too long ends its connection, and the replies to later commands are lost. A server that
            # keeps fewer replies ends it too; after each time, half as many are pending.
            lost = {ServerFailure.CUT_OFF, ServerFailure.TOO_LONG} if damaged else {ServerFailure.CUT_OFF}
            positions = [at for at, reason in failed.items() if reason in lost and at not in damaged]
            failures |= {at: reason for at, reason in failed.items() if at not in positions}
        return failures

    def _ask_lengths(self, positions: Sequence[int], batch: Batch, lengths: dict[int, int]) -> Failures:
        """Put the stored bytes at each position into `lengths`."""
        failures: Failures = {}
        replies = self._ask(b"STRLEN", positions, batch, failures)
        lengths.update({at: reply for at, reply in replies.items() if isinstance(reply, int)})
        for at in [at for at, reason in failures.items() if reason is ServerFailure.WRONG_TYPE]:
            lengths[at] = 0  # the value exists, and is no block
            del failures[at]
        return failures

    def _ask(
        self, verb: bytes, positions: Sequence[int], batch: Batch, failures: Failures, *arguments: bytes
    ) -> dict[int, object]:
        """Send one short command for each block; return the received replies."""
        commands = {at: command(verb, batch.names[at], *arguments) for at in positions}
        done = self._run(positions, batch, failures, partial(Calls, commands=commands))
        return {at: reply for exchange in done for at, reply in exchange.replies.items()}

    def _run(
        self,
        positions: Sequence[int],
        batch: Batch,
        failures: Failures,
        exchange_with: Callable[[Node, Sequence[int], Failures], AnyExchange],
    ) -> list[AnyExchange]:
        """Run one exchange with each server that has some of the blocks, in parallel, and add to `failures`."""
        if not positions:
            return []
        try:
            shares = self._topology.split([batch.names[at] for at in positions], batch.deadline)
        except NodeError as error:
            failures.update(dict.fromkeys(positions, error.reason))
            return []
        placed = [(node, [positions[at] for at in own]) for node, own in shares]
        if sum(len(own) for _, own in placed) < len(positions):
            failures.update(
                dict.fromkeys(set(positions).difference(*(own for _, own in placed)), ServerFailure.CLUSTER_DOWN)
            )
        exchanges = [exchange_with(node, own, failures) for node, own in placed]
        run(exchanges, batch.deadline)
        for exchange in exchanges:
            reasons = exchange.reasons()
            if {ServerFailure.MOVED, ServerFailure.READ_ONLY} & {*reasons}:
                self._topology.refresh()
            elif len(reasons) == exchange.count and why.UNUSABLE.issuperset(reasons) and not exchange.node.is_down:
                exchange.node.note_failure(reasons[0])  # it answers, but cannot be used
        return exchanges

    def _may_be_block(self, length: int | None) -> bool:
        return length is not None and HEADER_BYTES < length <= self._record_bytes_max


def _with_second_attempt(attempt: Callable[[Sequence[int]], Failures], batch: Batch) -> Failures:
    """Attempt all blocks, and once more the blocks that have moved to another server."""
    failures = attempt(range(len(batch.names)))
    moved = [at for at, reason in failures.items() if reason is ServerFailure.MOVED]
    if moved:
        for at in moved:
            del failures[at]
        failures |= attempt(moved)
    return failures


class Loads(Exchange):
    """Blocks to load from one server, received and verified in place.

    The reply to GET is expected to be a raw record of the block's size. So the memory for all pending replies is laid
    out in their order, and one call receives many of them. If another reply comes, such as nil, its bytes and all later
    ones are put back. They are parsed one reply at a time, until no byte is left.
    """

    def __init__(
        self, node: Node, positions: Sequence[int], failures: Failures, batch: Batch, transfer: Transfer
    ) -> None:
        super().__init__(node, positions, failures)
        self.damaged: list[int] = []  # positions of values that no process can read, and no store replaces: delete them
        self.unreadable: list[int] = []  # positions of sound records with a codec or key that this process lacks
        self._keys = [batch.keys[at] for at in positions]
        self._names = [batch.names[at] for at in positions]
        self._blocks = [batch.blocks[at] for at in positions]
        self._transfer = transfer
        self._expect_raw = transfer.codecs.writes_raw
        raw_record_bytes = HEADER_BYTES + len(self._blocks[0])
        self._record_bytes_max = record_bytes_max(len(self._blocks[0]))
        self._opening = b"$%d\r\n" % raw_record_bytes
        self._head_bytes = len(self._opening) + HEADER_BYTES
        reply_bytes = len(self._opening) + raw_record_bytes + len(_CRLF)
        self._reply_bytes = reply_bytes
        self._pending_max = max(_PENDING_MIN, transfer.pipeline_bytes // reply_bytes)
        if (narrowed_bytes := node.pending_bytes_max) is not None:
            self._pending_max = max(1, min(self._pending_max, narrowed_bytes // reply_bytes))
        # Twice as many slots as pending replies: the next replies are requested before the received ones are verified.
        self._slots = min(2 * self._pending_max, self.count)
        self._sent = 0  # commands
        self._received = 0  # complete replies
        self._heads = memoryview(bytearray(self._slots * (self._head_bytes + len(_CRLF))))
        self._pieces: list[memoryview] = []  # memory for requested replies
        self._at = 0  # the next piece to receive into

    def begin(self, link: Link, deadline: float) -> None:
        self._ask(link, deadline)

    def finish(self, link: Link, deadline: float) -> None:
        try:
            self._finish(link, deadline)
        except ConnectionError:
            pending = self._sent - self._received
            if pending <= 1:
                raise
            # A server closes a connection whose pending replies exceed its client-output-buffer-limit.
            self.node.narrow(pending * self._reply_bytes // 2)
            raise NodeError(ServerFailure.CUT_OFF) from None
        self.node.note_loaded()

    def closing_reason(self) -> RedisReason | None:
        is_limited = self._reply_bytes > _REPLY_BYTES_FREE and self.node.pending_bytes_max is not None
        return ServerFailure.OUTPUT_BUFFER if is_limited else None

    def _finish(self, link: Link, deadline: float) -> None:
        while self.answered < self.count:
            if self._expect_raw:
                self._receive(link, deadline)
            if not self._expect_raw or link.replies.buffered_bytes:
                self._verify()
                self._read(link, deadline)
            if self._sent - self._received <= self._pending_max // 2:
                self._ask(link, deadline)
            self._verify()

    def _ask(self, link: Link, deadline: float) -> None:
        end = min(self.count, self._received + self._pending_max)
        if end <= self._sent:
            return
        commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in self._names[self._sent : end]]
        link.stream.send((b"".join(commands),), deadline)
        if self._at >= len(self._pieces):
            self._pieces, self._at = [], 0
        self._lay_out(self._sent, end)
        self._sent = end

    def _lay_out(self, start: int, end: int) -> None:
        stride = self._head_bytes + len(_CRLF)
        for number in range(start, end):
            slot = number % self._slots * stride
            self._pieces.append(self._heads[slot : slot + self._head_bytes])
            self._pieces.append(self._blocks[number])
            self._pieces.append(self._heads[slot + self._head_bytes : slot + stride])

    # Expected replies.

    def _receive(self, link: Link, deadline: float) -> None:
        """Receive the available bytes in place; put them back from the first unexpected reply on."""
        count = link.stream.receive(self._pieces[self._at : self._at + _IOV_PIECES], deadline)
        pieces, at = self._pieces, self._at
        while count:
            piece = pieces[at]
            taken = min(count, len(piece))
            kind = at % _PIECES
            if kind == 0 and not self._begins_as_expected(len(piece) - taken):
                before = self._head_bytes - len(piece)
                head = self._heads[self._slot() : self._slot() + self._head_bytes]
                link.replies.put_back([head, *pieces[at + 1 : at + _IOV_PIECES]], before + count)
                return
            if taken < len(piece):
                pieces[at] = piece[taken:]
                break
            count -= taken
            at += 1
            if kind == _PIECES - 1:
                end = self._slot() + self._head_bytes
                if self._heads[end : end + len(_CRLF)] != _CRLF:
                    raise NodeError(ServerFailure.PROTOCOL)
                self._received += 1
        self._at = at

    def _begins_as_expected(self, missing: int) -> bool:
        """Return whether the next reply's head, of which `missing` bytes are to come, may be a raw record's."""
        start, known = self._slot(), min(len(self._opening), self._head_bytes - missing)
        return self._heads[start : start + known] == self._opening[:known]

    def _slot(self) -> int:
        return self._received % self._slots * (self._head_bytes + len(_CRLF))

    def _verify(self) -> None:
        for number in range(self.answered, self._received):
            start = number % self._slots * (self._head_bytes + len(_CRLF)) + len(self._opening)
            self._decode(number, self._heads[start : start + HEADER_BYTES], self._blocks[number])

    def _decode(self, number: int, header: memoryview, payload: memoryview) -> None:
        key, block = self._keys[number], self._blocks[number]
        self.answered += 1
        digest, codecs = self._transfer.namespace_digest, self._transfer.codecs
        status = decode_record(header, payload, key, block, digest, codecs)
        if status is not RecordStatus.OK:
            self.failures[self.positions[number]] = status.cause
            (self.unreadable if status in UNREADABLE else self.damaged).append(self.positions[number])

    # Any replies.

    def _read(self, link: Link, deadline: float) -> None:
        """Parse one reply, and the replies that are buffered already."""
        while True:
            self._read_one(link, deadline)
            if not link.replies.buffered_bytes:
                break
            if self._received == self._sent:
                raise NodeError(ServerFailure.PROTOCOL)
        self._pieces, self._at = [], 0
        self._lay_out(self._received, self._sent)

    def _read_one(self, link: Link, deadline: float) -> None:
        position = self.positions[self._received]
        try:
            length = link.replies.bulk_length(self._record_bytes_max, deadline)
        except NodeError as error:
            if (
                error.reason is ServerFailure.TOO_LONG
            ):  # it can never be loaded; later replies on this connection are lost too
                self.damaged.append(position)
            raise
        self._received += 1
        if isinstance(length, int):
            record = link.replies.bulk(length, deadline)
            self._decode(self._received - 1, record[:HEADER_BYTES], record[HEADER_BYTES:])
        else:
            self.failures[position] = Reason.ABSENT
            if isinstance(length, Refusal):
                self.refuse(position, length)
            self.answered += 1
