"""Administration of the servers without a stack, through redis-py's clients: list namespaces, and delete one.

Names are found by SCAN on every master of a cluster, and removed by UNLINK. SCAN may miss what is stored or moved to
another server meanwhile, so it is repeated until a pass over all servers finds nothing. The epoch's mark and the
readable form go too. A running stack stays in its epoch and writes its mark again. Foreign names with the
namespace's prefix stay, and are reported.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import islice
from typing import Final

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from tiered_kv.errors import TierUnavailableError
from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    Purged,
    StoredNamespace,
    TierAdministration,
    believed,
)
from tiered_kv.toolkit.small_files import fields_of
from tiered_kv_redis.endpoint import check_tls_files
from tiered_kv_redis.keyspace import KEY_PREFIX
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import MOVED, NOT_OURS_TO_USE, PERMISSION, TIMEOUT, NodeError, reason_of_error
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import Topology

NAMES_AT_ONCE: Final = 500
_PASSES_MAX: Final = 20
_NAME: Final = re.compile(
    re.escape(KEY_PREFIX) + rb"(?P<digest>[0-9a-f]{32}):(?:(?P<block>[0-9a-f]{16}:.*)|namespace|epoch)", re.DOTALL
)
"""Every name that the tier gives: see `keyspace.py`. A block's key may be any bytes."""
_NO_PERMISSION: Final = (
    "does not permit a purge; its user needs +scan +strlen +unlink +get on keys 'tkv1:*', in a cluster +cluster|slots"
)


class RedisAdministration(TierAdministration):
    """The servers of a redis tier.

    Raises:
        ConfigError: A file of certificates or keys cannot be used.
    """

    def __init__(self, settings: RedisSettings) -> None:
        if settings.tls:
            check_tls_files(settings)
        self._tier = settings.name
        self._topology = Topology(settings)

    def namespaces(self, deadline: float, only: str | None = None) -> list[StoredNamespace]:
        blocks: Counter[str] = Counter()
        described: dict[str, Mapping[str, object]] = {}
        with self._told("list"):
            for node in self._masters(deadline):
                with closing(node.client()) as client:
                    for name in _names(client, only, deadline):
                        match = _NAME.fullmatch(name)
                        if match is None:
                            continue
                        digest = match["digest"].decode()
                        blocks[digest] += match["block"] is not None
                        if name.endswith(b":namespace") and match["block"] is None:
                            described[digest] = _described(client, name, digest)
        return [StoredNamespace(digest, described.get(digest, {}), count) for digest, count in sorted(blocks.items())]

    def purge(self, digest: str, deadline: float) -> Purged:
        removed: Counter[str] = Counter()
        foreign: set[bytes] = set()
        found = 0
        with self._told("purge"):
            for _ in range(_PASSES_MAX):
                found = sum(self._sweep(node, digest, removed, foreign, deadline) for node in self._masters(deadline))
                if not found or time.monotonic() >= deadline:
                    break
        left = [f"{len(foreign)} names that are not of this tool were left"] if foreign else []
        if found:
            left.append(f"{found} names were found by the last of several looks: a stack stores them, or time ran out")
        return Purged(removed["blocks"], removed["bytes"], tuple(left))

    def close(self) -> None:
        self._topology.close()

    def _masters(self, deadline: float) -> list[Node]:
        self._topology.split([KEY_PREFIX], deadline)
        return self._topology.nodes()

    def _sweep(self, node: Node, digest: str, removed: Counter[str], foreign: set[bytes], deadline: float) -> int:
        """Remove a namespace's names from one server; return how many were found."""
        found = 0
        with closing(node.client()) as client:
            told = _names(client, digest, deadline)
            while names := list(islice(told, NAMES_AT_ONCE)):
                ours = [name for name in names if _NAME.fullmatch(name)]
                foreign.update(set(names).difference(ours))
                found += len(ours)
                pipeline = client.pipeline(transaction=False)
                for name in ours:
                    pipeline.strlen(name)
                    pipeline.unlink(name)
                replies = pipeline.execute(raise_on_error=False)
                for name, length, gone in zip(ours, replies[::2], replies[1::2], strict=True):
                    if isinstance(gone, Exception):
                        if reason_of_error(gone) != MOVED:
                            raise gone
                        self._topology.refresh()  # it is found on its new server by the next pass
                    elif gone:
                        removed["blocks"] += name[54:55] == b":"
                        removed["bytes"] += length if isinstance(length, int) else 0
        return found

    @contextmanager
    def _told(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (NodeError, RedisError, OSError) as error:
            reason = reason_of_error(error)
            hint = NOT_OURS_TO_USE.get(reason, f"cannot be used now: {reason}")
            hint = _NO_PERMISSION if reason == PERMISSION else hint
            raise TierUnavailableError(f"the server {hint}", tier=self._tier, operation=operation) from error


def _names(client: Redis, digest: str | None, deadline: float) -> Iterator[bytes]:
    for name in client.scan_iter(KEY_PREFIX + (f"{digest}:*".encode() if digest else b"*"), NAMES_AT_ONCE):
        if time.monotonic() >= deadline:
            raise NodeError(TIMEOUT)
        yield name


def _described(client: Redis, name: bytes, digest: str) -> Mapping[str, object]:
    try:
        text = client.get(name) if client.strlen(name) <= DESCRIPTION_BYTES_MAX else b""
    except ResponseError:  # another program wrote it
        return {}
    return believed(fields_of(text), digest)
