"""Administration of the bucket without a stack: look at namespaces, and delete one with all versions of its objects.

After a reset the mark of the epoch stays, drawn anew, since a process that runs in an epoch from before it would write
its own again. Its older versions go. Foreign objects, whose names are not of the tier's layout (`naming.py`), stay in
every version, and are reported. The tier sends whole objects, so it leaves no uploads in parts behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.counters import Counters
from tiered_kv.errors import TierUnavailableError
from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    DIGEST_HEX,
    Purged,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.epoch import Epoch, EpochMark
from tiered_kv.toolkit.inspection import Census, RecordCheck
from tiered_kv.toolkit.record import DIGEST_BYTES
from tiered_kv.toolkit.small_files import fields_of
from tiered_kv.toolkit.status import RecordStatus
from tiered_kv_s3.account import Account
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.control import Control, Listed
from tiered_kv_s3.counters import COUNTERS, COUNTERS_BY_LABEL
from tiered_kv_s3.mark import MarkObject
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import ABSENCE, Verdict

_SURVEYS_MAX: Final = 20
_READS_AT_ONCE: Final = 8
"""Objects that a check reads side by side."""


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
        self._settings = settings
        self._tier = settings.name
        account = Account(settings, settings.name)
        self._bucket = Bucket(settings, account, Counters(COUNTERS, COUNTERS_BY_LABEL))
        self._control = Control(account, settings, settings.name)

    def purge(self, digest: str, deadline: float) -> Purged:
        naming = Naming(self._prefix, bytes.fromhex(digest))
        self._renew_epoch(naming, deadline)
        removed = _Removed()
        for _ in range(_SURVEYS_MAX):
            before = removed.size_bytes, removed.blocks, removed.refusals
            found = self._delete(naming, removed, deadline)
            if not found or (removed.refusals and before == (removed.size_bytes, removed.blocks, removed.refusals)):
                break
        left = []
        if removed.foreign:
            left.append(f"{len(removed.foreign)} objects that are not of this tool were left")
        if found:
            why = ", ".join(sorted(removed.refusals)) or "a stack stores them"
            left.append(f"{found} objects or versions of them were found by the last survey ({why})")
        if self._control.without_versions == "AccessDenied":
            left.append("these credentials may not list versions: older ones are left if the bucket keeps them")
        notes = ("the server lists no versions; it is taken to keep none",) if self._control.without_versions else ()
        return Purged(removed.blocks, removed.size_bytes, tuple(left), notes)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        census = Census()
        root = f"{self._prefix}/"
        for page in self._control.versions(f"{root}{only}/" if only else root, deadline):
            for each, is_marker in page:
                name, size_bytes = each["Key"], each.get("Size", 0)
                digest = name.removeprefix(root).partition("/")[0]
                naming = Naming(self._prefix, bytes.fromhex(digest)) if DIGEST_HEX.fullmatch(digest) else None
                if naming is None or not naming.owns(name):
                    census.add_foreign(name, size_bytes)
                elif name != naming.epoch:  # it stays after a purge
                    is_block = naming.is_block(name) and not is_marker and each.get("IsLatest", True)
                    written_s = time.time() - each["LastModified"].timestamp()
                    census.add(digest, size_bytes, is_block, written_s=written_s)
        return census.survey(
            lambda digest: self._described(Naming(self._prefix, bytes.fromhex(digest)), deadline),
            "a bucket does not tell when a block was used",
        )

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        naming = Naming(self._prefix, bytes.fromhex(digest))
        check = RecordCheck(naming.namespace_digest, self._settings.open_codecs(), verification.block_bytes)

        def read(listed: Listed) -> RecordStatus | str | None:
            return self._read(listed.name, check, min(deadline, time.monotonic() + self._settings.job_timeout))

        with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="tiered-kv-s3-verify") as readers:
            for page in self._control.listed(naming.blocks):
                blocks = [each for each in page if naming.is_block(each.name)]
                for at in range(0, len(blocks), _READS_AT_ONCE):
                    some = blocks[at : at + _READS_AT_ONCE]
                    for listed, found in zip(some, readers.map(read, some), strict=True):
                        read_bytes = 0 if found == check.too_long else listed.size_bytes
                        if found is None or not verification.note(found, read_bytes):
                            continue
                        verification.repaired += self._bucket.delete(listed.name, deadline) is Verdict.DONE
                    if time.monotonic() >= deadline:
                        raise TierUnavailableError("the time was over", tier=self._tier, operation="verify")

    def _read(self, name: str, check: RecordCheck, deadline: float) -> RecordStatus | str | None:
        """Return what an object of a block holds, None if there is none any more."""
        found: RecordStatus | str = check.too_long
        record: list[memoryview] = []

        def sink(size_bytes: int) -> list[memoryview] | None:
            record[:] = [room] if (room := check.room(size_bytes)) is not None else []
            return record or None

        for _ in range(2):  # what is damaged may have been damaged on its way
            verdict = self._bucket.get(name, sink, deadline, expires=False)
            if verdict is not Verdict.DONE:
                return check.too_long if verdict is Verdict.OVERSIZED else None if verdict in ABSENCE else str(verdict)
            found = check.check(record[0], bytes.fromhex(name[-2 * DIGEST_BYTES :]))
            if found is RecordStatus.OK:
                break
        # A bucket has no mark that says of which version everything in it is: another release may read the block.
        return found.value if found is RecordStatus.BAD_VERSION else found

    def close(self) -> None:
        self._control.close()
        self._bucket.close()

    def _delete(self, naming: Naming, removed: _Removed, deadline: float) -> int:
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
        epoch.saved_value(deadline)

    def _described(self, naming: Naming, deadline: float) -> Mapping[str, object]:
        _, text = self._bucket.read(naming.namespace, DESCRIPTION_BYTES_MAX, deadline)
        return matching_description(fields_of(text).get("namespace"), naming.namespace_digest.hex())
