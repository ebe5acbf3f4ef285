"""Administration of the servers without a stack, through redis-py's clients: look at namespaces, and delete one.

Names are found by SCAN on every master of a cluster, and removed by UNLINK. SCAN may miss what is stored or moved to
another server meanwhile, so it is repeated until a survey of all servers finds nothing. The epoch's mark and the
readable form go too. A running stack stays in its epoch and writes its mark again. Foreign names with the
namespace's prefix stay, and are reported.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Final

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierUnavailableError
from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    Purged,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.inspection import Census
from tiered_kv.toolkit.record import HEADER_BYTES, decode_record, record_bytes_max
from tiered_kv.toolkit.small_files import fields_of
from tiered_kv.toolkit.status import RecordStatus
from tiered_kv_redis.endpoint import check_tls_files
from tiered_kv_redis.keyspace import KEY_PREFIX
from tiered_kv_redis.reasons import MOVED, NOT_OURS_TO_USE, PERMISSION, TIMEOUT, WRONG_TYPE, NodeError, reason_of_error
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import Topology

NAMES_AT_ONCE: Final = 500
_SURVEYS_MAX: Final = 20
_BLOCKS_BYTES: Final = 8 << 20
"""Blocks that a check has in memory."""
_KEY_OFFSET: Final = 55
"""Where the key begins in a block's name."""
_TOUCHED: Final = "the server has no CLIENT NO-TOUCH (Redis 7.2): each check counts as a use of the block"
_UNTOLD: Final = (
    "whether a block was used again can be told if this stack has a `ttl` and the server does not evict by frequency"
)
_GONE: Final = -2
"""What PTTL answers for a name that is not there."""
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
        self._settings = settings
        self._tier = settings.name
        self._topology = Topology(settings)

    def purge(self, digest: str, deadline: float) -> Purged:
        removed: Counter[str] = Counter()
        foreign: set[bytes] = set()
        found = 0
        with self._told("purge"):
            for _ in range(_SURVEYS_MAX):
                found = self._delete(digest, removed, foreign, deadline)
                if not found or time.monotonic() >= deadline:
                    break
        left = [f"{len(foreign)} names that are not of this tool were left"] if foreign else []
        if found:
            left.append(f"{found} names were found by the last survey: a stack stores them, or time ran out")
        return Purged(removed["blocks"], removed["bytes"], tuple(left))

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        census = Census()
        described: dict[str, Mapping[str, object]] = {}
        with self._told("survey"):
            for client, names in self._names(only, NAMES_AT_ONCE, deadline):
                _survey(client, names, self._settings.ttl, census, described)
        return census.survey(lambda digest: described.get(digest, {}), _UNTOLD)

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        if verification.block_bytes is None:
            raise TierUnavailableError(
                f"the size of the blocks of {digest} is not known: the server has no readable form of the namespace",
                tier=self._tier,
                operation="verify",
            )
        verification.checks_tags = True
        codecs, block = self._settings.open_codecs(), memoryview(bytearray(verification.block_bytes))
        at_once = min(NAMES_AT_ONCE, max(1, _BLOCKS_BYTES // len(block)))
        with self._told("verify"):
            for client, names in self._names(digest, at_once, deadline):
                try:
                    client.client_no_touch("ON")
                except ResponseError:
                    if _TOUCHED not in verification.notes:
                        verification.notes.append(_TOUCHED)
                blocks = [name for name in names if (match := _NAME.fullmatch(name)) and match["block"]]
                for name, found in _found(client, blocks, bytes.fromhex(digest), codecs, block):
                    if verification.note(found, len(block)):
                        client.unlink(name)
                        verification.repaired += 1  # also where an engine has deleted it meanwhile

    def close(self) -> None:
        self._topology.close()

    def _names(self, digest: str | None, at_once: int, deadline: float) -> Iterator[tuple[Redis, list[bytes]]]:
        """Yield the names of a namespace, or of all, on each master: some at once, and the master's client."""
        pattern = KEY_PREFIX + (f"{digest}:*".encode() if digest else b"*")
        self._topology.split([KEY_PREFIX], deadline)
        for node in self._topology.nodes():
            with closing(node.client()) as client:
                found = client.scan_iter(pattern, NAMES_AT_ONCE)
                while names := list(islice(found, at_once)):
                    if time.monotonic() >= deadline:
                        raise NodeError(TIMEOUT)
                    yield client, names

    def _delete(self, digest: str, removed: Counter[str], foreign: set[bytes], deadline: float) -> int:
        """Delete a namespace's names; return how many were found."""
        found = 0
        for client, names in self._names(digest, NAMES_AT_ONCE, deadline):
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
                    self._topology.refresh()  # it is found on its new server by the next survey
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


def _survey(
    client: Redis,
    names: Sequence[bytes],
    ttl_s: float | None,
    census: Census,
    described: dict[str, Mapping[str, object]],
) -> None:
    """Count some names. No question counts as a use of the block, as one for its length would."""
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.memory_usage(name)
        pipeline.object("IDLETIME", name)
        pipeline.pttl(name)
    # An error is no number: not permitted, moved meanwhile, no IDLETIME where the server evicts by frequency.
    replies = [each if isinstance(each, int) else None for each in pipeline.execute(raise_on_error=False)]
    for name, size_bytes, idle_s, left_ms in zip(names, replies[::3], replies[1::3], replies[2::3], strict=True):
        match = _NAME.fullmatch(name)
        if match is None:
            census.add_foreign(name.decode("utf-8", "backslashreplace"), size_bytes or 0)
        elif left_ms != _GONE:
            digest, is_block = match["digest"].decode(), match["block"] is not None
            left_s = -1.0 if left_ms is None else left_ms / 1000
            written_s = ttl_s - left_s if ttl_s is not None and 0 <= left_s <= ttl_s else None
            census.add(digest, size_bytes, is_block, written_s=written_s, used_s=idle_s)
            if name.endswith(b":namespace") and not is_block:
                described[digest] = _described(client, name, digest)


def _found(
    client: Redis, names: Sequence[bytes], digest: bytes, codecs: CodecSet, block: memoryview
) -> Iterator[tuple[bytes, RecordStatus | str]]:
    """Load blocks into `block`, one after the other; yield the name of each that is still there, and what it holds."""
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.strlen(name)
    values = dict(zip(names, pipeline.execute(raise_on_error=False), strict=True))
    limit = record_bytes_max(len(block))
    possible = [name for name, length in values.items() if isinstance(length, int) and length <= limit]
    for name in possible:
        pipeline.get(name)
    values.update(zip(possible, pipeline.execute(raise_on_error=False), strict=True))
    for name, value in values.items():
        if isinstance(value, bytes):
            header, payload = memoryview(value)[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
            yield name, decode_record(header, payload, OffloadKey(name[_KEY_OFFSET:]), block, digest, codecs)
        elif isinstance(value, int):
            yield name, RecordStatus.BAD_LENGTH
        elif isinstance(value, Exception) and (reason := reason_of_error(value)) != MOVED:
            yield name, WRONG_TYPE if str(value).startswith("WRONGTYPE") else reason


def _described(client: Redis, name: bytes, digest: str) -> Mapping[str, object]:
    try:
        text = client.get(name) if client.strlen(name) <= DESCRIPTION_BYTES_MAX else b""
    except ResponseError:  # another program wrote it
        return {}
    return matching_description(fields_of(text), digest)
