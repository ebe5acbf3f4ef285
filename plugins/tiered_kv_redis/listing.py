"""Commands whose replies are lists, or numbers of any size: what an account is kept with, and what SCAN answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiered_kv_redis.budget import Budget
from tiered_kv_redis.connection import Link
from tiered_kv_redis.exchange import Commands, converse
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.reasons import TOO_LONG, WireError, reason_of_code
from tiered_kv_redis.replies import Refusal, command

Value = bytes | int | Refusal | None | list["Value"]
"""A text, a number, an error, nil, or a list of them."""

_DEPTH_MAX: Final = 2
_TEXT_BYTES_MAX: Final = 1 << 20
_DIGITS_MAX: Final = 20
"""Of a number of 64 bits, a sign included."""


class Listing(Commands[Value]):
    """Commands with replies of any kind but large values."""

    def _read(self, link: Link, deadline: float, budget: Budget) -> Value:
        return _value(link, deadline, budget, 0)


@dataclass(frozen=True, slots=True)
class Page:
    """What one SCAN says.

    Args:
        cursor: Where the next one goes on; b"0" if this was the last.
        names: Some names.
    """

    cursor: bytes
    names: list[bytes]


def scan(node: Node, cursor: bytes, pattern: bytes, count: int, deadline: float) -> Page:
    """Ask a server for some names.

    Args:
        node: The server.
        cursor: Where to go on; b"0" to begin.
        pattern: Of the names, as SCAN has it.
        count: How many to ask for; the server may answer with some more, or fewer.
        deadline: Seconds of `time.monotonic()`.

    Raises:
        NodeDownError: The server is not reached, refuses, or its answer is none.
    """
    listing = Listing(node, [command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % count)])
    converse([listing], deadline)
    if listing.trouble or listing.failures:
        raise NodeDownError(listing.trouble or listing.failures[0])
    match listing.replies[0]:
        case [bytes(following), list(names)] if following.isdigit() and len(following) <= _DIGITS_MAX:
            texts = [name for name in names if isinstance(name, bytes)]
            if len(texts) == len(names):
                return Page(following, texts)
    raise NodeDownError("protocol")


def _value(link: Link, deadline: float, budget: Budget, depth: int) -> Value:
    line = link.replies.line(deadline)
    if not budget.take(len(line)):
        raise WireError(TOO_LONG)
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest
    if kind == b"-":
        return Refusal(reason_of_code(rest))
    number = _number(rest)
    if kind == b":":
        return number
    if number == -1:
        return None
    if kind == b"$" and number >= 0:
        if number > _TEXT_BYTES_MAX or not budget.take(number):
            raise WireError(TOO_LONG)
        return bytes(link.replies.bulk(number, deadline))
    if kind == b"*" and number >= 0 and depth < _DEPTH_MAX:
        if not budget.take(0, number):  # before the first of them is read
            raise WireError(TOO_LONG)
        return [_value(link, deadline, budget, depth + 1) for _ in range(number)]
    raise WireError("protocol")


def _number(digits: bytes) -> int:
    if len(digits) > _DIGITS_MAX or not digits.removeprefix(b"-").isdigit():
        raise WireError("protocol")
    return int(digits)
