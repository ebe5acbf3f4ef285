"""Loads of blocks, which are received and verified in place."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.reasons import UNREADABLE
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, record_bytes_max
from tiered_kv_redis.connection import Link
from tiered_kv_redis.exchange import Batch, Exchange, Failures, Transfer
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import ABSENT, CUT_OFF, PROTOCOL, TOO_LONG, NodeError
from tiered_kv_redis.replies import Refusal

_CRLF = b"\r\n"
_PIECES = 3
"""Pieces of memory for one expected reply: its head, the block, the end of the line."""
_IOV_PIECES = 1023
_PENDING_MIN = 2
"""Blocks to request at once: while one is received and verified, the server sends the next."""


class Loads(Exchange):
    """Blocks to load from one server.

    The reply to GET is expected to be a raw record of the block's size. So the memory for all pending replies is laid
    out in their order, and one call receives many of them. If a reply is another one, such as nil, the bytes from its
    beginning on are put back and parsed one reply at a time, until none are left.
    """

    def __init__(
        self, node: Node, positions: Sequence[int], failures: Failures, batch: Batch, transfer: Transfer
    ) -> None:
        super().__init__(node, positions, failures)
        self.damaged: list[int] = []  # positions whose value no process can read; no store replaces it, so delete it
        self.unreadable: list[int] = []  # positions of sound records whose codec or key this process lacks
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
        # Twice as many slots as pending replies: the next are requested before the received ones are verified.
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
            raise NodeError(CUT_OFF) from None

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
                    raise NodeError(PROTOCOL)
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
            self.failures[self.positions[number]] = status.value
            (self.unreadable if status in UNREADABLE else self.damaged).append(self.positions[number])

    # Any replies.

    def _read(self, link: Link, deadline: float) -> None:
        """Parse one reply, and the replies that are buffered already."""
        while True:
            self._read_one(link, deadline)
            if not link.replies.buffered_bytes:
                break
            if self._received == self._sent:
                raise NodeError(PROTOCOL)
        self._pieces, self._at = [], 0
        self._lay_out(self._received, self._sent)

    def _read_one(self, link: Link, deadline: float) -> None:
        position = self.positions[self._received]
        try:
            length = link.replies.bulk_length(self._record_bytes_max, deadline)
        except NodeError as error:
            if error.reason == TOO_LONG:  # it can never be loaded; later replies on this connection are lost too
                self.damaged.append(position)
            raise
        self._received += 1
        if isinstance(length, int):
            record = link.replies.bulk(length, deadline)
            self._decode(self._received - 1, record[:HEADER_BYTES], record[HEADER_BYTES:])
        else:
            self.failures[position] = ABSENT
            if isinstance(length, Refusal):
                self.refuse(position, length)
            self.answered += 1
