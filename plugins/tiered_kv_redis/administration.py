"""Administration of the servers without a stack, through redis-py's clients.

Names are found by SCAN on every master, and removed by UNLINK. SCAN may miss names that are stored or moved to another
server meanwhile, so a purge repeats it until it finds none. The epoch's mark and the readable form go too. A running
stack stays in its epoch and writes its mark again. Foreign names with the namespace's prefix stay, and are reported.
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
from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.administration import (
    DESCRIPTION_BYTES_MAX,
    Census,
    Purged,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.record import HEADER_BYTES, decode_record, record_bytes_max
from tiered_kv.toolkit.small_files import fields_of
from tiered_kv_redis.endpoint import check_tls_files
from tiered_kv_redis.epoch import KEY_PREFIX
from tiered_kv_redis.reasons import (
    MOVED,
    PERMISSION,
    REFUSAL_HINTS,
    TIMEOUT,
    WRONG_TYPE,
    NodeError,
    reason_of_error,
    with_text,
)
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import Topology

_NAMES_AT_ONCE: Final = 500
_SURVEYS_MAX: Final = 20
_BLOCKS_BYTES_MAX: Final = 8 << 20
"""Bytes of blocks that a verification loads at once."""
_NAME: Final = re.compile(
    re.escape(KEY_PREFIX) + rb"(?P<digest>[0-9a-f]{32}):(?:[0-9a-f]{16}:(?P<key>.*)|namespace|epoch)", re.DOTALL
)
"""Every name that the tier gives: see `epoch.py`. A block's key may be any bytes."""
_MISSING_TTL: Final = -2
"""The reply to PTTL for a missing name."""
_NO_TOUCH_MISSING: Final = "the server has no CLIENT NO-TOUCH (Redis 7.2): each check counts as a use of the block"
_USES_UNKNOWN: Final = (
    "whether a block was used again can be told if this stack has a `ttl` and the server does not evict by frequency"
)
_NO_PERMISSION: Final = (
    "does not permit a purge; its user needs +scan +strlen +unlink +get on keys 'tkv1:*', in a cluster +cluster|slots"
)


class RedisAdministration(TierAdministration):
    """The servers of a redis tier.

    Raises:
        ConfigError: A file of certificates or keys cannot be used.
    """

    def __init__(self, settings: RedisSettings) -> None:
        check_tls_files(settings)
        self._settings = settings
        self._topology = Topology(settings)

    def purge(self, digest: str, deadline: float) -> Purged:
        removed: Counter[str] = Counter()
        foreign: set[bytes] = set()
        found = 0
        with self._translated_errors("purge"):
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
        with self._translated_errors("survey"):
            for client, names in self._names(only, _NAMES_AT_ONCE, deadline):
                self._survey(client, names, census, described)
        return census.survey(lambda digest: described.get(digest, {}), _USES_UNKNOWN)

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        if verification.block_bytes is None:
            raise TierUnavailableError(
                f"the size of the blocks of {digest} is not known: the server has no readable form of the namespace",
                tier=self._settings.name,
                operation="verify",
            )
        verification.checks_tags = True
        codecs, block = self._settings.open_codecs(), memoryview(bytearray(verification.block_bytes))
        at_once = min(_NAMES_AT_ONCE, max(1, _BLOCKS_BYTES_MAX // len(block)))
        with self._translated_errors("verify"):
            for client, names in self._names(digest, at_once, deadline):
                try:
                    client.client_no_touch("ON")
                except ResponseError:
                    if _NO_TOUCH_MISSING not in verification.notes:
                        verification.notes.append(_NO_TOUCH_MISSING)
                for name, found in _verified(client, names, bytes.fromhex(digest), codecs, block):
                    if verification.note(found, len(block)):
                        client.unlink(name)
                        verification.repaired += 1  # also where an engine has deleted it meanwhile

    def close(self) -> None:
        self._topology.close()

    def _names(self, digest: str | None, at_once: int, deadline: float) -> Iterator[tuple[Redis, list[bytes]]]:
        """Yield the names of a namespace, or of all, on each master: some at once, with the master's client."""
        pattern = KEY_PREFIX + (f"{digest}:*".encode() if digest else b"*")
        self._topology.split([KEY_PREFIX], deadline)  # waits for the servers' addresses
        for node in self._topology.nodes():
            with closing(node.client()) as client:
                found = client.scan_iter(pattern, _NAMES_AT_ONCE)
                while names := list(islice(found, at_once)):
                    if time.monotonic() >= deadline:
                        raise NodeError(TIMEOUT)
                    yield client, names

    def _delete(self, digest: str, removed: Counter[str], foreign: set[bytes], deadline: float) -> int:
        """Delete a namespace's names; return how many were found."""
        found = 0
        for client, names in self._names(digest, _NAMES_AT_ONCE, deadline):
            matches = [match for name in names if (match := _NAME.fullmatch(name))]
            foreign.update(set(names).difference(match.string for match in matches))
            found += len(matches)
            pipeline = client.pipeline(transaction=False)
            for match in matches:
                pipeline.strlen(match.string)
                pipeline.unlink(match.string)
            replies = pipeline.execute(raise_on_error=False)
            for match, length, deleted in zip(matches, replies[::2], replies[1::2], strict=True):
                if isinstance(deleted, Exception):
                    if reason_of_error(deleted) != MOVED:
                        raise deleted
                    self._topology.refresh()  # the next survey finds it on its new server
                elif deleted:
                    removed["blocks"] += match["key"] is not None
                    removed["bytes"] += length if isinstance(length, int) else 0
        return found

    def _survey(
        self, client: Redis, names: Sequence[bytes], census: Census, described: dict[str, Mapping[str, object]]
    ) -> None:
        """Count some names, by commands that do not count as a use of the block, as STRLEN would."""
        ttl_s = self._settings.ttl
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
            elif left_ms != _MISSING_TTL:
                digest, is_block = match["digest"].decode(), match["key"] is not None
                left_s = -1.0 if left_ms is None else left_ms / 1000
                written_s = ttl_s - left_s if ttl_s is not None and 0 <= left_s <= ttl_s else None
                census.add(digest, size_bytes, is_block, written_s=written_s, used_s=idle_s)
                if name.endswith(b":namespace") and not is_block:
                    described[digest] = _described(client, name, digest)

    @contextmanager
    def _translated_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (NodeError, RedisError, OSError) as error:
            reason = reason_of_error(error)
            hint = REFUSAL_HINTS.get(reason, f"cannot be used now: {reason}")
            hint = _NO_PERMISSION if reason == PERMISSION else hint
            text = self._topology.said.get(reason, "") if isinstance(error, NodeError) else str(error)
            message = with_text(f"the server {hint}", text, self._settings.secret_texts())
            raise TierUnavailableError(message, tier=self._settings.name, operation=operation) from error


def _verified(
    client: Redis, names: Sequence[bytes], digest: bytes, codecs: CodecSet, block: memoryview
) -> Iterator[tuple[bytes, RecordStatus | str]]:
    """Load the blocks among `names` into `block`, one after the other; yield the name and status of each."""
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    keys = {match.string: OffloadKey(match["key"]) for match in matches if match["key"] is not None}
    values = _replies(client, "STRLEN", list(keys))
    limit = record_bytes_max(len(block))
    readable = [name for name, length in values.items() if isinstance(length, int) and length <= limit]
    values |= _replies(client, "GET", readable)
    for name, value in values.items():
        if isinstance(value, bytes):
            header, payload = memoryview(value)[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
            yield name, decode_record(header, payload, keys[name], block, digest, codecs)
        elif isinstance(value, int):
            yield name, RecordStatus.BAD_LENGTH
        elif isinstance(value, Exception) and (reason := reason_of_error(value)) != MOVED:
            yield name, WRONG_TYPE if str(value).startswith("WRONGTYPE") else reason


def _replies(client: Redis, verb: str, names: Sequence[bytes]) -> dict[bytes, object]:
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.execute_command(verb, name)  # type: ignore[no-untyped-call]  # redis-py has no types for it
    return dict(zip(names, pipeline.execute(raise_on_error=False), strict=True))


def _described(client: Redis, name: bytes, digest: str) -> Mapping[str, object]:
    try:
        text = client.get(name) if client.strlen(name) <= DESCRIPTION_BYTES_MAX else b""
    except ResponseError:  # another program wrote it
        return {}
    return matching_description(fields_of(text), digest)
