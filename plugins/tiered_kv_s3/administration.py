"""Administration of the bucket without a stack: list namespaces, and delete one with all versions of its objects.

After a reset the mark of the epoch stays, drawn anew, since a process that runs in an epoch from before it would write
its own again. Its older versions go. Foreign objects, whose names are not of the tier's layout (`naming.py`), stay in
every version, and are reported. The tier sends whole objects, so it leaves no uploads in parts behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    DIGEST_HEX,
    Purged,
    StoredNamespace,
    TierAdministration,
    believed,
)
from tiered_kv.toolkit.epoch import Epoch, EpochMark
from tiered_kv.toolkit.small_files import fields_of
from tiered_kv_s3.account import Account
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.control import Control
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.mark import MarkObject
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.settings import S3Settings

_PASSES_MAX: Final = 20


@dataclass(slots=True)
class _Removed:
    """The deleted objects, and those that the server refused to delete."""

    blocks: int = 0
    size_bytes: int = 0
    foreign: set[str] = field(default_factory=set)
    refusals: set[str] = field(default_factory=set)


class S3Administration(TierAdministration):
    """The bucket of an s3 tier.

    Raises:
        ConfigError: boto3 refuses the settings, or the file of authorities cannot be read.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._prefix = settings.prefix
        self._tier = settings.name
        account = Account(settings, settings.name)
        self._bucket = Bucket(settings, account, Counters())
        self._control = Control(account, settings, settings.name)

    def namespaces(self, deadline: float, only: str | None = None) -> list[StoredNamespace]:
        folders = [only] if only else self._control.folders(f"{self._prefix}/")
        stored = [self._stored(digest, deadline) for digest in folders if DIGEST_HEX.fullmatch(digest)]
        return [each for each in stored if each is not None]

    def purge(self, digest: str, deadline: float) -> Purged:
        naming = Naming(self._prefix, bytes.fromhex(digest))
        self._renew_epoch(naming, deadline)
        removed = _Removed()
        for _ in range(_PASSES_MAX):
            before = removed.size_bytes, removed.blocks, removed.refusals
            found = self._pass(naming, removed, deadline)
            if not found or (removed.refusals and before == (removed.size_bytes, removed.blocks, removed.refusals)):
                break
        left = []
        if removed.foreign:
            left.append(f"{len(removed.foreign)} objects that are not of this tool were left")
        if found:
            why = ", ".join(sorted(removed.refusals)) or "a stack stores them"
            left.append(f"{found} objects or versions of them were found by the last look ({why})")
        if self._control.without_versions == "AccessDenied":
            left.append("these credentials may not list versions: older ones are left if the bucket keeps them")
        notes = ("the server lists no versions; it is taken to keep none",) if self._control.without_versions else ()
        return Purged(removed.blocks, removed.size_bytes, tuple(left), notes)

    def close(self) -> None:
        self._control.close()
        self._bucket.close()

    def _pass(self, naming: Naming, removed: _Removed, deadline: float) -> int:
        """Delete the tier's objects; return how many there were."""
        found = 0
        removed.foreign, removed.refusals = set(), set()
        mark_is_deleted = False
        for page in self._control.versions(naming.root, deadline):
            doomed = []
            for each, is_marker in page:
                name = each["Key"]
                mark_is_deleted |= is_marker and name == naming.epoch and each["IsLatest"]
                is_live = not is_marker and each.get("IsLatest", True)
                if not naming.owns(name):
                    removed.foreign.add(name)
                elif not (name == naming.epoch and is_live and not mark_is_deleted):
                    doomed.append((each, is_marker))
            found += len(doomed)
            refusals = self._control.delete([each for each, _ in doomed]) if doomed else set()
            removed.refusals |= refusals
            if not refusals:  # the next listing shows which are left
                removed.size_bytes += sum(each.get("Size", 0) for each, _ in doomed)
                removed.blocks += sum(not is_marker and naming.is_block(each["Key"]) for each, is_marker in doomed)
        return found

    def _renew_epoch(self, naming: Naming, deadline: float) -> None:
        """Replace the epoch; delete its mark where no reset was before. What is written later is of a later reset."""
        store = MarkObject(self._bucket, naming.epoch, self._tier)
        data = store.read(deadline)
        if data is None:
            return
        mark = EpochMark.decode(data)
        if mark is not None and mark.number == 0:
            self._control.delete([{"Key": naming.epoch}])
            return
        epoch = Epoch(store)
        epoch.renew()
        epoch.saved_token(deadline)

    def _stored(self, digest: str, deadline: float) -> StoredNamespace | None:
        """Return what is stored of a namespace; None if it is nothing but a mark of an epoch, and foreign objects."""
        naming = Naming(self._prefix, bytes.fromhex(digest))
        blocks = size_bytes = others = 0
        for page in self._control.versions(naming.root, deadline):
            for each, is_marker in page:
                if naming.owns(each["Key"]):
                    size_bytes += each.get("Size", 0)
                    blocks += not is_marker and naming.is_block(each["Key"])
                    others += each["Key"] != naming.epoch
        if not others:
            return None
        _, text = self._bucket.read(naming.namespace, DESCRIPTION_BYTES_MAX, deadline)
        return StoredNamespace(digest, believed(fields_of(text).get("namespace"), digest), blocks, size_bytes)
