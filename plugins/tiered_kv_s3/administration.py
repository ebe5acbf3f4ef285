"""The bucket without a stack: whose blocks it holds, and removing them, every version of them.

After a reset the mark of the epoch stays, drawn anew, since a process that runs in an epoch from before it would write
its own again. Its older versions go. Foreign objects, whose names are not of the tier's layout (`naming.py`), stay in
every version, and are reported.

The tier sends whole objects, so it leaves no uploads in parts behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    DIGEST_HEX,
    Purged,
    StoredNamespace,
    TierAdministration,
    believed,
)
from tiered_kv.toolkit.epoch import Epoch, EpochMark
from tiered_kv_s3.account import Account
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.listing import Listing
from tiered_kv_s3.mark import MarkObject
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import Verdict
from tiered_kv_s3.versions import Known, Version, Versions

_PASSES_MAX: Final = 20


@dataclass(slots=True)
class _Removed:
    """What was deleted, and what the server would not delete."""

    blocks: int = 0
    size_bytes: int = 0
    foreign: int = 0  # objects that the last look found and that are not the tier's
    refusals: set[str] = field(default_factory=set)


class S3Administration(TierAdministration):
    """The bucket of an s3 tier.

    Args:
        settings: The tier's YAML entry.

    Raises:
        ConfigError: boto3 refuses the settings, or the file of authorities cannot be read.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._prefix = settings.prefix
        self._tier = settings.name
        account = Account(settings, settings.name)
        try:
            self._bucket = Bucket(settings, account, Counters())
        except OSError as error:
            raise ConfigError(f"no certificates can be read: {error.strerror}", location="ca_file") from None
        self._versions = Versions(self._bucket, settings.name)
        self._listing = Listing(settings.bucket, self._bucket, settings.name)

    def namespaces(self, deadline: float, only: str | None = None) -> list[StoredNamespace]:
        folders = [only] if only else self._versions.folders(f"{self._prefix}/", deadline)
        stored = [self._stored(digest, deadline) for digest in folders if DIGEST_HEX.fullmatch(digest)]
        return [each for each in stored if each is not None]

    def purge(self, digest: str, deadline: float) -> Purged:
        naming = self._naming(digest)
        self._renew_epoch(naming, deadline)
        removed = _Removed()
        found = 0
        for _ in range(_PASSES_MAX):
            refusals, removed.refusals = removed.refusals, set()
            before = removed.size_bytes, removed.blocks
            found = self._pass(naming, removed, deadline)
            is_stuck = bool(refusals & removed.refusals) and before == (removed.size_bytes, removed.blocks)
            if not found or is_stuck or time.monotonic() >= deadline:
                break
        return Purged(removed.blocks, removed.size_bytes, self._left(found, removed), self._notes())

    def close(self) -> None:
        self._bucket.close()

    def _pass(self, naming: Naming, removed: _Removed, deadline: float) -> int:
        """Delete what is the tier's; return how much of it there was."""
        found = removed.foreign = 0
        foreign = deleted = ""  # an object's versions follow each other, the latest first
        for page in self._versions.pages(naming.root, deadline):
            doomed = []
            for version in page:
                if not naming.owns(version.name):
                    removed.foreign += version.name != foreign
                    foreign = version.name
                    continue
                if version.is_mark and version.is_latest:
                    deleted = version.name  # without the mark, an older version on the next page becomes the latest
                if version.name == deleted or not _stays(version, naming):
                    doomed.append(version)
            found += len(doomed)
            if not doomed:
                continue
            gone, refusals = self._versions.delete(doomed, deadline)
            removed.refusals |= refusals
            if gone == len(doomed):  # which of them are not gone is not worth asking: the next look tells
                removed.size_bytes += sum(version.size_bytes for version in doomed)
                removed.blocks += sum(_is_block(version, naming) for version in doomed)
        return found

    def _left(self, found: int, removed: _Removed) -> tuple[str, ...]:
        left = []
        if removed.foreign:
            left.append(f"{removed.foreign} objects that are not of this tool were left")
        if found:
            why = ", ".join(sorted(removed.refusals)) or "a stack stores them, or it takes too long"
            left.append(f"{found} objects or versions of them were found by the last look ({why})")
        if self._versions.known is Known.DENIED:
            left.append(
                "versions may not be listed with these credentials: older ones are left if the bucket keeps them"
            )
        return tuple(left)

    def _notes(self) -> tuple[str, ...]:
        if self._versions.known is Known.UNKNOWN_HERE:
            return ("the server lists no versions; it is taken to keep none",)
        return ()

    def _renew_epoch(self, naming: Naming, deadline: float) -> None:
        """Replace the epoch; delete its mark where no reset was before. What is written later is of a later reset."""
        store = MarkObject(self._bucket, naming.epoch, self._tier)
        data = store.read(deadline)
        if data is None:
            return
        mark = EpochMark.decode(data)
        if mark is not None and mark.number == 0:
            self._bucket.delete(naming.epoch, deadline)
            return
        epoch = Epoch(store)
        epoch.renew()
        epoch.saved_token(deadline)

    def _stored(self, digest: str, deadline: float) -> StoredNamespace | None:
        """Return what is stored of a namespace; None if it is nothing but what a purge leaves, and foreign objects."""
        naming = self._naming(digest)
        blocks = size_bytes = others = 0
        for page in self._versions.pages(naming.root, deadline):
            for version in filter(lambda each: naming.owns(each.name), page):
                size_bytes += version.size_bytes
                blocks += _is_block(version, naming)
                others += version.name != naming.epoch
        if not others:
            return None
        return StoredNamespace(digest, self._description(naming, digest, deadline), blocks, size_bytes)

    def _description(self, naming: Naming, digest: str, deadline: float) -> Mapping[str, object]:
        text = bytearray()

        def place(size_bytes: int) -> list[memoryview] | None:
            if size_bytes > DESCRIPTION_BYTES_MAX:
                return None
            text[:] = bytes(size_bytes)
            return [memoryview(text)]

        verdict = self._bucket.get(naming.namespace, place, deadline, expires=False)
        if verdict in (Verdict.ABSENT, Verdict.OVERSIZED, Verdict.UNSIZED):
            return {}
        if verdict is not Verdict.DONE:
            raise TierUnavailableError(
                f"the bucket at {self._bucket.authority} does not give a readable form: {verdict.reason}",
                tier=self._tier,
                operation="list",
            )
        try:
            fields = json.loads(bytes(text))
        except (ValueError, RecursionError):
            return {}
        return believed(fields.get("namespace"), digest) if isinstance(fields, dict) else {}

    def _naming(self, digest: str) -> Naming:
        return Naming(self._prefix, bytes.fromhex(digest))


def _is_block(version: Version, naming: Naming) -> bool:
    return not version.is_mark and naming.is_block(version.name)


def _stays(version: Version, naming: Naming) -> bool:
    """Return whether this is the epoch's mark."""
    return version.name == naming.epoch and version.is_latest and not version.is_mark
