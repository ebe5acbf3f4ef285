"""Commands whose replies are lists, or numbers of any size: what an account is kept with, and what SCAN answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiered_kv_redis.connection import Link
from tiered_kv_redis.exchange import Exchange
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import TOO_LONG, WireError, reason_of_code
from tiered_kv_redis.replies import Refusal

Value = bytes | int | Refusal | None | list["Value"]
"""A text, a number, an error, nil, or a list of them."""

_DEPTH_MAX: Final = 2
_ITEMS_MAX: Final = 1 << 16
_TEXT_BYTES_MAX: Final = 1 << 20
_DIGITS_MAX: Final = 20
"""Of a signed number of 64 bits."""


class Listing(Exchange):
    """Small commands, with replies of any kind but large values.

    Args:
        node: The server.
        commands: As `replies.command` makes them.
    """

    def __init__(self, node: Node, commands: Sequence[bytes]) -> None:
        super().__init__(node, len(commands))
        self.replies: list[Value] = []
        self._commands = commands

    def begin(self, link: Link, deadline: float) -> None:
        link.stream.send((b"".join(self._commands),), deadline)

    def finish(self, link: Link, deadline: float) -> None:
        for position in range(self.count):
            reply = _value(link, deadline, 0)
            if isinstance(reply, Refusal):
                self.failures[position] = reply.reason
            self.replies.append(reply)
            self.answered += 1


def _value(link: Link, deadline: float, depth: int) -> Value:
    line = link.replies.line(deadline)
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
        if number > _TEXT_BYTES_MAX:
            raise WireError(TOO_LONG)
        return bytes(link.replies.bulk(number, deadline))
    if kind == b"*" and number >= 0 and depth < _DEPTH_MAX:
        if number > _ITEMS_MAX:
            raise WireError(TOO_LONG)
        return [_value(link, deadline, depth + 1) for _ in range(number)]
    raise WireError("protocol")


def _number(digits: bytes) -> int:
    if len(digits) > _DIGITS_MAX or not digits.removeprefix(b"-").isdigit():
        raise WireError("protocol")
    return int(digits)
