"""The servers without a stack: whose blocks they hold, and removing them.

Names are found by SCAN, on every master of a cluster, and removed by UNLINK, one name a command: names of one
namespace lie in many slots. SCAN may miss what is stored or moved to another server meanwhile, so it is repeated until
a pass over all servers finds nothing. The epoch's mark and the readable form go too. A stack that
runs stays in its epoch and writes its mark again. Names that begin like the namespace's and are none of the tier's
stay, and are reported.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tiered_kv.errors import TierUnavailableError
from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    Purged,
    StoredNamespace,
    TierAdministration,
    believed,
)
from tiered_kv_redis.connection import Link
from tiered_kv_redis.endpoint import check_tls_files
from tiered_kv_redis.exchange import Calls, Exchange, converse
from tiered_kv_redis.keyspace import KEY_PREFIX
from tiered_kv_redis.listing import scan
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.reasons import (
    CLUSTER_DOWN,
    MOVED,
    NOT_OURS_TO_USE,
    PERMISSION,
    TOO_LONG,
)
from tiered_kv_redis.replies import Refusal, command
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import topology_of

NAMES_AT_ONCE: Final = 500
"""Asked of one SCAN; the server may answer with some more."""
_PASSES_MAX: Final = 20
_STEP_S_MAX: Final = 10.0
"""How long one command, or one batch of them, may take."""
_NAME: Final = re.compile(
    re.escape(KEY_PREFIX) + rb"(?P<digest>[0-9a-f]{32}):(?:(?P<block>[0-9a-f]{16}:.*)|namespace|epoch)",
    re.DOTALL,
)
"""Every name that the tier gives: see `keyspace.py`. A block's key may be any bytes."""
_FOREIGN_MAX: Final = 10_000
"""Foreign names that are told apart, since SCAN may tell a name twice."""
_NAMESPACE_BYTES: Final = 128
_NAMESPACES_BYTES_MAX: Final = 8 << 20
"""Of the namespaces of all servers: the readable forms, seldom 500 bytes each, and so much for each. That is room for
some 13,000; Python may take twenty times as much for text that was made for it."""
_NO_PERMISSION: Final = (
    "does not permit a purge; its user needs +scan +strlen +unlink +get on keys 'tkv1:*', in a cluster also "
    "+cluster|slots"
)


@dataclass(slots=True)
class _Removed:
    """What UNLINK has removed."""

    blocks: int = 0
    size_bytes: int = 0
    foreign: set[int] = field(default_factory=set)  # a hash of each name that is not the tier's: they may be long


class RedisAdministration(TierAdministration):
    """The servers of a redis tier.

    Args:
        settings: The tier's YAML entry.

    Raises:
        ConfigError: A file of certificates or keys cannot be used.
    """

    def __init__(self, settings: RedisSettings) -> None:
        if settings.tls:
            check_tls_files(settings)
        self._tier = settings.name
        self._topology = topology_of(settings)

    def namespaces(self, deadline: float, only: str | None = None) -> list[StoredNamespace]:
        blocks: Counter[str] = Counter()
        room_bytes = _NAMESPACES_BYTES_MAX
        try:
            for node in self._masters(deadline):
                for names in self._pages(node, only, deadline):
                    for match in filter(None, map(_NAME.fullmatch, names)):
                        blocks[match["digest"].decode()] += match["block"] is not None
                    if len(blocks) * _NAMESPACE_BYTES > room_bytes:
                        raise NodeDownError(TOO_LONG)
            room_bytes -= len(blocks) * _NAMESPACE_BYTES
            found = []
            for digest, count in sorted(blocks.items()):
                text = self._description(digest, deadline)
                room_bytes -= len(text)
                if room_bytes < 0:
                    raise NodeDownError(TOO_LONG)
                found.append(StoredNamespace(digest, _read(text, digest), count))
            return found
        except NodeDownError as error:
            raise self._unavailable(error, "list") from error

    def purge(self, digest: str, deadline: float) -> Purged:
        removed = _Removed()
        found = 0
        try:
            for _ in range(_PASSES_MAX):
                found = sum(self._sweep(node, digest, removed, deadline) for node in self._masters(deadline))
                if not found or time.monotonic() >= deadline:
                    break
        except NodeDownError as error:
            raise self._unavailable(error, "purge") from error
        return Purged(removed.blocks, removed.size_bytes, _left(found, removed))

    def close(self) -> None:
        self._topology.close()

    def _masters(self, deadline: float) -> list[Node]:
        """Return the servers that have blocks, as they are known now."""
        self._topology.split([KEY_PREFIX], deadline)
        return self._topology.nodes()

    def _sweep(self, node: Node, digest: str, removed: _Removed, deadline: float) -> int:
        """Remove a namespace's names from one server; return how many were found."""
        found = 0
        for names in self._pages(node, digest, deadline):
            ours = [name for name in names if _NAME.fullmatch(name)]
            if len(ours) < len(names):
                foreign = {hash(name) for name in set(names).difference(ours)} - removed.foreign
                removed.foreign.update(islice(foreign, _FOREIGN_MAX - len(removed.foreign)))
            found += len(ours)
            if ours:
                self._unlink(node, ours, removed, deadline)
        return found

    def _unlink(self, node: Node, names: list[bytes], removed: _Removed, deadline: float) -> None:
        commands = [part for name in names for part in (command(b"STRLEN", name), command(b"UNLINK", name))]
        calls = Calls(node, commands)
        converse([calls], _step(deadline))
        if calls.trouble:
            self._topology.refresh()
            raise NodeDownError(calls.trouble)
        for position, name in enumerate(names):
            length, gone = calls.replies[2 * position : 2 * position + 2]
            if isinstance(gone, Refusal):
                if gone.reason == MOVED:  # it is found on its new server by the next look
                    self._topology.refresh()
                    continue
                raise NodeDownError(gone.reason)
            if gone == 1:
                match = _NAME.fullmatch(name)
                removed.blocks += match is not None and match["block"] is not None
                removed.size_bytes += length if isinstance(length, int) else 0

    def _pages(self, node: Node, digest: str | None, deadline: float) -> Iterator[list[bytes]]:
        """Yield the names on one server, some at a time."""
        pattern = KEY_PREFIX + (f"{digest}:*".encode() if digest else b"*")
        cursor = b"0"
        while True:
            page = scan(node, cursor, pattern, NAMES_AT_ONCE, _step(deadline))
            yield page.names
            cursor = page.cursor
            if cursor == b"0":
                return

    def _description(self, digest: str, deadline: float) -> bytes:
        name = KEY_PREFIX + digest.encode() + b":namespace"
        shares = self._topology.split([name], deadline)
        if not shares:
            raise NodeDownError(CLUSTER_DOWN)
        fetch = _Fetch(shares[0][0], name)
        converse([fetch], _step(deadline))
        return fetch.value

    def _unavailable(self, error: NodeDownError, operation: str) -> TierUnavailableError:
        hint = NOT_OURS_TO_USE.get(error.reason, f"cannot be used now: {error.reason}")
        if error.reason == PERMISSION:
            hint = _NO_PERMISSION
        return TierUnavailableError(f"the server {hint}", tier=self._tier, operation=operation)


def _read(text: bytes, digest: str) -> Mapping[str, object]:
    try:
        return believed(json.loads(text), digest)
    except (ValueError, RecursionError):
        return {}


def _left(found: int, removed: _Removed) -> tuple[str, ...]:
    """Return what is to be said of names that the last look found, and of foreign ones."""
    left = []
    if removed.foreign:
        count = len(removed.foreign)
        least = "at least " if count >= _FOREIGN_MAX else ""
        left.append(f"{least}{count} names that are not of this tool were left")
    if found:
        left.append(f"{found} names were found by the last of several looks: a stack stores them, or it takes too long")
    return tuple(left)


class _Fetch(Exchange):
    """One GET of a readable form; one that is too long, or missing, is an empty one."""

    def __init__(self, node: Node, name: bytes) -> None:
        super().__init__(node, 1)
        self.value = b""
        self._command = command(b"GET", name)

    def begin(self, link: Link, deadline: float) -> None:
        link.stream.send((self._command,), deadline)

    def finish(self, link: Link, deadline: float) -> None:
        length = link.replies.bulk_length(DESCRIPTION_BYTES_MAX, deadline)
        if isinstance(length, int):
            self.value = bytes(link.replies.bulk(length, deadline))
        self.answered = 1


def _step(deadline: float) -> float:
    return min(deadline, time.monotonic() + _STEP_S_MAX)
