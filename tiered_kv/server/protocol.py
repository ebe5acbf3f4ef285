"""The messages between a host's cache server and its clients.

They travel over a unix socket of packets (SOCK_SEQPACKET). A packet holds whole messages, at most `PACKET_BYTES_MAX`.
A message is a header (`HEADER`: code, flags, count, number, bytes of the body; little endian) and its body. `number` is
the client's number of a request, unless the table says otherwise. The functions keep no state: any thread may call.

    client to server
    HELLO     JSON: see `Hello`; the first message of a connection
    BEGIN     `BEGUN`, the id of a request, then its hints as JSON, if it has any
    ACQUIRE   keys that follow the request's earlier keys: lease the blocks that are ready
    EXPECT    `EXPECTED`: the engine schedules the request now; its cost of computing
    RELEASE   rows: end the request's leases of them
    COMMIT    keys, then as many granted rows: their blocks are written
    END       the request has ended: end all its leases
    GRANT     number = rows wanted in advance
    RETURN    granted rows that are not needed
    RESET     forget every block of the namespace; number = its place in the file of resets, 0 if it is in none
    PING      number comes back in PONG; with the flag `WHEN_IDLE`, once no job of a tier is in flight
    MAPPED    this worker has mapped the rows, and pinned them
    BYE       this process uses no row any more

    server to client
    WELCOME   JSON: see `Welcome`; descriptors come with it: the rows, their generations, perhaps the file of resets
    REFUSED   text: why not, and what to do
    WORKERS   number = worker processes of the session that have mapped the rows; count = its schedulers
    ANSWER    `START` (an index of a key), a row or code for each key from it on, then the tier of each (a byte)
    KNOWN     a row or code for each key of an ACQUIRE with `ONLY_KNOWN`, then as many generations: nothing is leased
    STORED    a byte for each key of an ACQUIRE with `ONLY_STORED`: whether a tier has the block
    GRANTED   rows
    EPOCH     number = the namespace's epoch; requests of earlier epochs store and load nothing; count = 1 if the
              client's own RESET began it
    PONG      the number of the PING
    GOODBYE   the server ends

Keys of one message have one length. A row is a uint32. The codes in place of a row are `MISSING` and `WAITING`.
"""

from __future__ import annotations

import array
import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from tiered_kv.base import OffloadKey
from tiered_kv.errors import ConfigError, TieredKVError

VERSION: Final = 1
VERSION_MIN: Final = 1
"""The oldest version of the protocol that this version understands: itself, or the version before."""

PATH_BYTES_MAX: Final = 107
"""Limit of a socket's path (unix(7))."""
PACKET_BYTES_MAX: Final = 64 << 10
KEYS_MAX: Final = 512
"""Keys of a message."""
KEY_BYTES_MAX: Final = 96
ID_BYTES_MAX: Final = 400  # a request's id; clients send 100 characters of it
HINTS_BYTES_MAX: Final = 4096  # a request's hints; clients send some 100
ROWS_MAX: Final = 4096
"""Rows of a message."""
REQUEST_KEYS_MAX: Final = 1 << 17
"""Keys of a request."""

HELLO, BEGIN, ACQUIRE, EXPECT, RELEASE, COMMIT, END, GRANT, RETURN, RESET, PING, MAPPED, BYE = range(1, 14)
WELCOME, REFUSED, WORKERS, ANSWER, KNOWN, STORED, GRANTED, EPOCH, PONG, GOODBYE = range(65, 75)

AHEAD: Final = 1
"""Flag of ACQUIRE: the request waits in the engine's queue. Lease ready blocks, and begin to promote the others."""
ONLY_KNOWN: Final = 2
"""Flag of ACQUIRE: the engine has these blocks; say which are stored."""
ONLY_STORED: Final = 4
"""Flag of ACQUIRE: say which of these blocks any tier has, once all tiers have answered. Nothing is promoted."""
AS_PREFIX: Final = 8
"""Flag of ACQUIRE: the blocks behind a missing one are of no use. Do not promote them."""
WHEN_IDLE: Final = 1
"""Flag of PING: answer once no job of a tier is in flight."""

MISSING: Final = 0xFFFFFFFF
"""No tier has the block, or it would come too late."""
WAITING: Final = 0xFFFFFFFE
"""The block may come; another ANSWER follows."""
ROW_MAX: Final = WAITING - 1
ROW_BYTES: Final = 4

_CODES: Final = b"\xff\xff\xff"  # bytes that both codes have

HEADER: Final = struct.Struct("<BBHII")
BEGUN: Final = struct.Struct("<qH")
"""The epoch in which a request began, and the bytes of its id."""
START: Final = struct.Struct("<I")
EXPECTED: Final = struct.Struct("<IIII4d")
"""Arguments of `CacheManager.expect` (blocks, before, is_whole); then of `EngineCost` `stalled`, and the seconds."""


class ProtocolError(TieredKVError):
    """The other side sent a forbidden message, or does not read. The connection ends."""


class ClosedError(TieredKVError):
    """The other side has closed the connection."""


class Message(NamedTuple):
    """A message that has come."""

    code: int
    flags: int
    items: int
    number: int
    body: memoryview


_Small = Annotated[int, Field(ge=0, lt=1 << 16)]
_Number = Annotated[int, Field(ge=0, le=0xFFFFFFFF)]
_Seconds = Annotated[float, Field(ge=0, le=3600)]
_Name = Annotated[str, Field(min_length=1, max_length=200)]


@dataclass(frozen=True, slots=True)
class Hello:
    """The identity of a client.

    Args:
        name: The session's name: the same in all processes of an engine, and in no other engine.
        role: "scheduler" for the process that stores and loads, "worker" for one that only copies.
        workers: How many worker processes the session has.
        settings: `namespace` and `block` of the client, as in a stack's file; None for the server's own.
        version: The newest version of the protocol that the client speaks.
    """

    name: _Name
    role: Annotated[str, Field(pattern="^(scheduler|worker)$")]
    workers: _Small = 0
    settings: dict[str, Any] | None = None  # Any: JSON
    version: _Small = VERSION


_HELLO: Final = TypeAdapter(Hello)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's answer to HELLO.

    Args:
        instance: Identifies the memory: rows of one instance mean nothing in another.
        namespace: The digest of the namespace and of its block settings: a client uses no other namespace.
        rows, row_bytes, block_tokens: The namespace's rows, without rows that will never be allocated; a row's bytes; a
            block's tokens.
        epoch: The namespace's epoch.
        grant_rows: Rows that the client should have in advance.
        grant_max: The most that it can have.
        tiers: Names of the tiers, the primary tier first.
        answer_s: Seconds without an answer after which the server counts as silent.
        wait_s: Seconds that a request waits for blocks that may come.
        version: Of the protocol of this connection.
        prefault: Whether the rows that the client may touch are allocated. Else their first user pays for them.
    """

    instance: _Name
    namespace: _Name
    rows: Annotated[int, Field(ge=1, le=ROW_MAX + 1)]
    row_bytes: Annotated[int, Field(ge=1, lt=1 << 40)]
    block_tokens: _Number
    epoch: _Number
    grant_rows: _Number
    grant_max: Annotated[int, Field(ge=1)]
    tiers: Annotated[list[_Name], Field(min_length=1, max_length=256)]
    answer_s: _Seconds
    wait_s: _Seconds
    version: _Small = VERSION
    prefault: bool = False


def check_path(path: str, location: str) -> None:
    """Raise `ConfigError` for a path that is too long for a socket; `location` is the setting that has it."""
    size = len(os.fsencode(path))
    if size > PATH_BYTES_MAX:
        raise ConfigError(
            f"expected the path of a socket, at most {PATH_BYTES_MAX} bytes, found one of {size}; give a shorter one",
            location=location,
        )


def to_json(fields: Hello | Welcome) -> bytes:
    return json.dumps(asdict(fields)).encode()


def hello_of(body: memoryview) -> Hello:
    """Return the fields of a HELLO.

    Raises:
        ProtocolError: A field is missing, or has a wrong type or range.
    """
    try:
        return _HELLO.validate_json(bytes(body), strict=True)
    except ValidationError:
        raise ProtocolError("expected the name and role of a client") from None


def object_of(body: memoryview) -> dict[str, Any]:  # Any: JSON
    """Return a JSON object.

    Raises:
        ProtocolError: The body is no JSON object.
    """
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProtocolError("expected a JSON object")
    return found


def pack_begun(epoch: int, req_id: str, hints: dict[str, Any] | None) -> bytes:  # Any: JSON
    """Return the body of a BEGIN."""
    name = req_id[:100].encode(errors="replace")
    return BEGUN.pack(epoch, len(name)) + name + (b"" if hints is None else json.dumps(hints).encode())


def begun_of(body: memoryview) -> tuple[int, str, dict[str, Any] | None]:  # Any: JSON
    """Return the epoch, the id and the hints of a BEGIN.

    Raises:
        ProtocolError: The body is no BEGIN, or too long.
    """
    if len(body) < BEGUN.size:
        raise ProtocolError("expected the epoch and the id of a request")
    epoch, id_bytes = BEGUN.unpack_from(body)
    end = BEGUN.size + id_bytes
    if id_bytes > ID_BYTES_MAX or end > len(body):
        raise ProtocolError(f"expected an id of at most {ID_BYTES_MAX} bytes")
    if len(body) - end > HINTS_BYTES_MAX:
        raise ProtocolError(f"expected hints of at most {HINTS_BYTES_MAX} bytes")
    hints = object_of(body[end:]) if end < len(body) else None
    return epoch, bytes(body[BEGUN.size : end]).decode(errors="replace"), hints


def expected_of(body: memoryview) -> tuple[int, int, bool, int, tuple[float, float, float, float]]:
    """Return of an EXPECT the blocks, those before them, whether they are whole, the stalled requests, and the seconds.

    Raises:
        ProtocolError: The body is no EXPECT, or has impossible times.
    """
    if len(body) != EXPECTED.size:
        raise ProtocolError("expected the cost of computing")
    blocks, before, is_whole, stalled, block_s, *others_s = EXPECTED.unpack(body)
    if not (block_s >= 0 and all(0 <= each < math.inf for each in others_s)):
        raise ProtocolError("expected the cost of computing in seconds")
    return blocks, before, bool(is_whole), stalled, (block_s, *others_s)


def split_keys(body: memoryview | bytes, count: int) -> list[OffloadKey]:
    """Return the keys of a body that has only keys.

    Raises:
        ProtocolError: The body has no `count` keys of one length, or too many.
    """
    return list(struct.unpack(f"{key_bytes_of(body, count)}s" * count, body))  # five times as fast as slices


def key_bytes_of(body: memoryview | bytes, count: int) -> int:
    """Return the length of each key of a body that has only keys. Raises: see `split_keys`."""
    size, rest = divmod(len(body), count) if count else (0, 1)
    if rest or not 4 <= size <= KEY_BYTES_MAX or count > KEYS_MAX:
        raise ProtocolError(f"expected at most {KEYS_MAX} keys of one length, at most {KEY_BYTES_MAX} bytes each")
    return size


def pack_rows(rows: Sequence[int]) -> bytes:
    return array.array("I", rows).tobytes()


def codes_of(code: int, count: int) -> array.array[int]:
    """Return a code for each of `count` keys."""
    return array.array("I", (code,)) * count


def split_rows(body: memoryview, count: int) -> list[int]:
    """Return the rows of a body that has only rows.

    Raises:
        ProtocolError: The body has no `count` rows, or too many.
    """
    if len(body) != 4 * count or count > ROWS_MAX:
        raise ProtocolError(f"expected at most {ROWS_MAX} rows")
    return body.cast("I").tolist()


def may_have_codes(body: bytes) -> bool:
    """Return whether the body of an ANSWER may have a code in place of a row. It is a quick test."""
    return body.find(_CODES) >= 0


def messages_of(packet: memoryview) -> list[Message]:
    """Return the messages of a packet.

    Raises:
        ProtocolError: The packet is too long, or ends within a message.
    """
    at, end, found = 0, len(packet), []
    if end > PACKET_BYTES_MAX:
        raise ProtocolError(f"a packet has more than {PACKET_BYTES_MAX} bytes")
    while at < end:
        if end - at < HEADER.size:
            raise ProtocolError("a packet ends within a message")
        code, flags, count, number, size = HEADER.unpack_from(packet, at)
        at += HEADER.size
        if size > end - at:
            raise ProtocolError("a packet ends within a message")
        found.append(Message(code, flags, count, number, packet[at : at + size]))
        at += size
    return found
