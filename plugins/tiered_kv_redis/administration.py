"""Administration of the servers without a stack, through redis-py's clients.

The commands of `tiered_kv.cli` that look into a storage call it, each on its own thread.

SCAN on every master finds names, and UNLINK removes them. SCAN may miss names that are stored or moved to another
server meanwhile, so a purge repeats it until it finds none. A purge also removes the namespace's readable form. Foreign
names with the namespace's prefix stay, and are reported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from typing import Any, Final

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierUnavailableError
from tiered_kv.reasons import Reason, RecordStatus
from tiered_kv.toolkit.administration import DESCRIPTION_BYTES_MAX, StoredBlock, Verification
from tiered_kv.toolkit.listing_administration import Entry, ListingAdministration
from tiered_kv.toolkit.record import HEADER_BYTES, check_record, decode_record, record_bytes_max
from tiered_kv.toolkit.resolver import words_of
from tiered_kv.toolkit.small_files import fields_of
from tiered_kv_redis import reasons as why
from tiered_kv_redis.connection import check_tls_files
from tiered_kv_redis.epoch import KEY_PREFIX, KeySpace
from tiered_kv_redis.reasons import NodeError, ServerFailure, reason_of_error
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import Topology

_NAMES_AT_ONCE: Final = 500
"""Names that a server looks at in one step of a listing, and entries of one batch."""
_SCANNED: Final = 5000
"""Names that a server looks at in one step of a search for readable forms: few of the names match."""
_BLOCKS_BYTES_MAX: Final = 8 << 20
"""Limit of the bytes of blocks that a verification loads at once."""
_NAME: Final = re.compile(
    re.escape(KEY_PREFIX) + rb"(?P<digest>[0-9a-f]{32}):(?:[0-9a-f]{16}:(?P<key>.*)|namespace|epoch)", re.DOTALL
)
"""Every name that the tier gives: see `epoch.py`. A block's key may be any bytes."""
_RIGHTS: Final = (
    "to inspect and purge, its user needs +scan +strlen +unlink +get +set on keys 'tkv1:*', in a cluster +cluster|slots"
)


class RedisAdministration(ListingAdministration):
    """The servers of a redis tier.

    An entry's `where` is a pair: the client of the server that listed the entry, and the name. `entries` yields one
    batch for each step of one server's listing. So all entries of a batch have one client, which `delete` and `check`
    take from the first entry. The client is open until `entries` goes on to the next server.

    Raises:
        ConfigError: A file of certificates or keys cannot be used.
    """

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        check_tls_files(settings)
        self._topology = Topology(settings)

    @property
    def where(self) -> str:
        return f"{self._topology.endpoints}, database {self._settings.db}, names {KEY_PREFIX.decode()}*"

    def digests(self, deadline: float) -> Iterator[str]:
        self._topology.split([KEY_PREFIX], deadline)  # waits for the servers' addresses
        for node in self._topology.nodes():
            with closing(node.client()) as client:
                for name in self._scan(client, KEY_PREFIX + b"*:namespace", _SCANNED, deadline):
                    if (match := _NAME.fullmatch(name)) and match["key"] is None:
                        yield match["digest"].decode()

    def entries(self, digest: str | None, deadline: float) -> Iterator[Sequence[Entry]]:
        pattern = KEY_PREFIX + (f"{digest}:*".encode() if digest else b"*")
        self._topology.split([KEY_PREFIX], deadline)  # waits for the servers' addresses
        for node in self._topology.nodes():
            with closing(node.client()) as client:
                found = self._scan(client, pattern, _NAMES_AT_ONCE, deadline)
                while names := list(islice(found, _NAMES_AT_ONCE)):
                    yield list(_entries(client, list(dict.fromkeys(names))))  # SCAN may repeat a name

    def _scan(self, client: Redis, pattern: bytes, at_once: int, deadline: float) -> Iterator[bytes]:
        """Yield names as `scan_iter` does, until the deadline: among many foreign names, a search may take long."""
        names: Any  # redis-py's type has text, too
        cursor: int | None = None
        while cursor != 0:
            cursor, names = client.scan(cursor or 0, pattern, at_once)
            self.check_time(deadline, "survey")
            yield from names

    def mark(self, digest: str) -> KeySpace:
        return KeySpace(self._topology, bytes.fromhex(digest), None)

    def delete(self, entries: Sequence[Entry]) -> dict[int, str]:
        refused: dict[int, str] = {}
        if entries:
            client = _client_of(entries)
            for at, reply in enumerate(_replies(client, [("UNLINK", each.where[1]) for each in entries])):
                if isinstance(reply, Exception):
                    refused[at] = reason_of_error(reply)
                    if refused[at] not in why.ELSEWHERE:
                        raise reply
                    self._topology.refresh()  # the next listing finds the entry on its new server
        return refused

    def describe(self, digest: str, deadline: float) -> object:
        name = KEY_PREFIX + f"{digest}:namespace".encode()
        for node, _ in self._topology.split([name], deadline):
            with closing(node.client()) as client:
                try:
                    if client.strlen(name) <= DESCRIPTION_BYTES_MAX:
                        return fields_of(client.get(name))
                except ResponseError:  # another program wrote it
                    break
        return None

    def check(
        self, digest: str, blocks: Iterator[Sequence[Entry]], found: Verification, deadline: float
    ) -> Iterator[tuple[Entry, RecordStatus | str, int]]:
        if found.block_bytes is None:
            raise TierUnavailableError(
                f"the size of the blocks of {digest} is not known: the server has no readable form of the namespace",
                tier=self._settings.name,
                operation="verify",
            )
        found.checks_tags = True
        codecs, block = self._settings.open_codecs(), memoryview(bytearray(found.block_bytes))
        namespace, limit = bytes.fromhex(digest), record_bytes_max(len(block))
        at_once = max(1, _BLOCKS_BYTES_MAX // len(block))
        for listed in blocks:
            for start in range(0, len(listed), at_once):
                batch = listed[start : start + at_once]
                client = _client_of(batch)
                with suppress(ResponseError):  # Redis before 7.2 refuses it: there each check counts as a use
                    client.client_no_touch("ON")
                for each, value in _loaded(client, batch, limit):
                    if isinstance(value, bytes):
                        record, key = memoryview(value), OffloadKey(each.key)
                        header, payload = record[:HEADER_BYTES], record[HEADER_BYTES:]
                        yield each, decode_record(header, payload, key, block, namespace, codecs), len(block)
                    elif isinstance(value, int):
                        yield each, RecordStatus.BAD_LENGTH, len(block)
                    elif isinstance(value, Exception) and (reason := reason_of_error(value)) not in why.ELSEWHERE:
                        yield (
                            each,
                            ServerFailure.WRONG_TYPE if str(value).startswith("WRONGTYPE") else reason,
                            len(block),
                        )

    needs_keys = False

    def blocks_of_epoch(self, digest: str, epoch: str, deadline: float) -> Iterator[Sequence[StoredBlock]]:
        prefix = KEY_PREFIX + f"{digest}:{epoch}:".encode()
        for listed in self.entries(digest, deadline):
            blocks = [each for each in listed if each.is_block and each.where[1].startswith(prefix)]
            if blocks:
                now_s, idle = time.time(), _idle_s(_client_of(blocks), blocks)
                yield [
                    StoredBlock(OffloadKey(each.key), each.size_bytes, None if idle_s is None else now_s - idle_s)
                    for each, idle_s in zip(blocks, idle, strict=True)
                ]

    def read_stored(
        self, digest: str, epoch: str, keys: Sequence[OffloadKey], rows: Sequence[memoryview], deadline: float
    ) -> list[RecordStatus | str]:
        prefix, namespace = KEY_PREFIX + f"{digest}:{epoch}:".encode(), bytes.fromhex(digest)
        names = [prefix + key for key in keys]
        found: list[RecordStatus | str] = [Reason.UNAVAILABLE] * len(keys)  # a slot without a server
        for node, positions in self._topology.split(names, deadline):
            with closing(node.client()) as client:
                with suppress(ResponseError):  # Redis before 7.2 refuses it: there each copy counts as a use
                    client.client_no_touch("ON")
                entries = [Entry(repr(names[at]), digest, None, where=(client, names[at])) for at in positions]
                for at, (_, value) in zip(positions, _loaded(client, entries, len(rows[0])), strict=True):
                    found[at] = _record_of(value, rows[at], keys[at], namespace)
                    if found[at] in why.ELSEWHERE:
                        self._topology.refresh()
        return found

    def close(self) -> None:
        self._topology.close()

    @contextmanager
    def opened(self, operation: str) -> Iterator[bool]:
        """Translate the errors of redis-py."""
        try:
            yield True
        except (NodeError, RedisError, OSError) as error:
            found = reason_of_error(error)
            reason = self._topology.explained(found)
            text = None if isinstance(error, NodeError) or reason != found else words_of(error)
            message = self._topology.sentence(reason, text, wants=_RIGHTS if reason == ServerFailure.PERMISSION else "")
            raise TierUnavailableError(message, tier=self._settings.name, operation=operation) from error


def _client_of(entries: Sequence[Entry]) -> Redis:
    """Return the client of a batch, which has at least one entry."""
    client: Redis = entries[0].where[0]
    assert all(each.where[0] is client for each in entries), "one server listed all entries of a batch"
    return client


def _entries(client: Redis, names: Sequence[bytes]) -> Iterator[Entry]:
    """Yield an entry for each name. MEMORY USAGE gives its size and, unlike STRLEN, does not count as a use."""
    for name, size_bytes in zip(names, _replies(client, [("MEMORY USAGE", name) for name in names]), strict=True):
        known_bytes = size_bytes if isinstance(size_bytes, int) else None  # an error: not permitted, or moved
        match = _NAME.fullmatch(name)
        if match is None:
            yield Entry(name.decode("utf-8", "backslashreplace"), None, known_bytes)
        elif size_bytes is not None and (match["key"] is not None or not name.endswith(b":epoch")):
            key, shown = match["key"], repr(name)[2:-1]  # escaped as by redis-cli
            where = client, name
            yield Entry(shown, match["digest"].decode(), known_bytes, key is not None, where=where, key=key or b"")


def _loaded(client: Redis, entries: Sequence[Entry], limit: int) -> Iterator[tuple[Entry, object]]:
    """Yield the bytes of each block; its length if that is more than `limit`; or the error."""
    lengths = _replies(client, [("STRLEN", each.where[1]) for each in entries])
    is_short = [isinstance(length, int) and length <= limit for length in lengths]
    short_names = [each.where[1] for each, short in zip(entries, is_short, strict=True) if short]
    values = iter(_replies(client, [("GET", name) for name in short_names]))
    for each, length, short in zip(entries, lengths, is_short, strict=True):
        yield each, next(values) if short else length


def _record_of(value: object, row: memoryview, key: OffloadKey, namespace: bytes) -> RecordStatus | str:
    """Put the value of a block's name into `row`; return its status."""
    if isinstance(value, bytes):
        row[: len(value)] = value
        return check_record(row, len(value), key, namespace)
    if isinstance(value, Exception):
        is_foreign = str(value).startswith("WRONGTYPE")
        return ServerFailure.WRONG_TYPE if is_foreign else reason_of_error(value)
    return RecordStatus.BAD_LENGTH if value else Reason.ABSENT


def _idle_s(client: Redis, entries: Sequence[Entry]) -> list[int | None]:
    """Return for how many seconds each block was not used; None where the server's policy counts uses instead."""
    replies = _replies(client, [("OBJECT IDLETIME", each.where[1]) for each in entries])
    return [reply if isinstance(reply, int) else None for reply in replies]


def _replies(client: Redis, commands: Sequence[tuple[str, bytes]]) -> list[object]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py has no types for it
    replies: list[object] = pipeline.execute(raise_on_error=False)
    return replies
