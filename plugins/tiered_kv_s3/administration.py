"""Administration of the bucket without a stack: survey and verify namespaces, and purge one with all its versions.

After a reset a purge leaves the epoch's mark, drawn anew, because a process in an earlier epoch would write its own
again. Objects whose names are not of the tier's layout (`layout.py`) are foreign: they stay, and are reported.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Final

from tiered_kv.errors import TierUnavailableError
from tiered_kv.metrics.instruments import Counters
from tiered_kv.reasons import RecordStatus
from tiered_kv.threads import run_all
from tiered_kv.toolkit.administration import (
    DESCRIPTION_BYTES_MAX,
    DIGEST_HEX,
    Census,
    Purged,
    RecordCheck,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.epoch import Epoch, EpochMark
from tiered_kv.toolkit.record import DIGEST_BYTES
from tiered_kv.toolkit.small_files import fields_of
from tiered_kv_s3.account import Account
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.control import DELETED_AT_ONCE, Control, Listed, age_s
from tiered_kv_s3.counters import COUNTERS, COUNTERS_BY_LABEL
from tiered_kv_s3.epoch import EpochObject
from tiered_kv_s3.layout import Naming
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import ABSENCE, Verdict

_SURVEYS_MAX: Final = 20
_PARALLEL_READS: Final = 8


class S3Administration(TierAdministration):
    """The bucket of an s3 tier.

    Raises:
        ConfigError: boto3 refuses the settings, or the file of authorities cannot be read.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        account = Account(settings, settings.name)
        self._bucket = Bucket(settings, account, Counters(COUNTERS, COUNTERS_BY_LABEL))
        self._control = Control(account, settings, settings.name)

    def purge(self, digest: str, deadline: float) -> Purged:
        naming = self._naming(digest)
        self._renew_epoch(naming, deadline)
        removed: Counter[str] = Counter()
        found, refusals = 0, set[str]()
        for _ in range(_SURVEYS_MAX):
            earlier = found, refusals
            found, foreign, refusals = self._delete(naming, removed, deadline)
            if not found or (refusals and refusals == earlier[1] and found >= earlier[0]):  # no progress
                break
        left = []
        if foreign:
            left.append(f"{len(foreign)} objects that are not of this tool were left")
        if found:
            why = ", ".join(sorted(refusals)) or "a stack stores them, or the server does not delete"
            left.append(f"{found} objects or versions of them were found by the last survey ({why})")
        if self._control.without_versions == "AccessDenied":
            left.append("these credentials may not list versions: older ones are left if the bucket keeps them")
        notes = ("the server lists no versions; it is taken to keep none",) if self._control.without_versions else ()
        return Purged(removed["blocks"], removed["bytes"], tuple(left), notes)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        census = Census()
        root = f"{self._settings.prefix}/"
        for page in self._control.versions(f"{root}{only}/" if only else root, deadline):
            for each, is_marker in page:
                name, size_bytes = each["Key"], each.get("Size", 0)
                digest = name.removeprefix(root).partition("/")[0]
                naming = self._naming(digest) if DIGEST_HEX.fullmatch(digest) else None
                if naming is None or not naming.owns(name):
                    census.add_foreign(name, size_bytes)
                elif name != naming.epoch:  # it stays after a purge
                    is_block = naming.is_block(name) and not is_marker and each.get("IsLatest", True)
                    written_s = age_s(each, time.time()) if "LastModified" in each else None
                    census.add(digest, size_bytes, is_block, written_s=written_s)
        return census.survey(
            lambda digest: self._description(self._naming(digest), deadline),
            "a bucket does not tell when a block was used",
        )

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        naming = self._naming(digest)
        check = RecordCheck(naming.namespace_digest, self._settings.open_codecs(), verification.block_bytes)
        read = partial(self._read, check, deadline)
        blocks = (each for page in self._control.listed(naming.blocks) for each in page if naming.is_block(each.name))
        while batch := list(islice(blocks, _PARALLEL_READS)):
            reads = run_all(read, batch, "tiered-kv-s3-verify", _PARALLEL_READS)
            for listed, found in zip(batch, (each.result() for each in reads), strict=True):
                read_bytes = 0 if found == check.too_long else listed.size_bytes
                if found is not None and verification.note(found, read_bytes):
                    verification.repaired += self._bucket.delete(listed.name, deadline) is Verdict.DONE
            self._check_time(deadline, "verify")

    def close(self) -> None:
        self._control.close()
        self._bucket.close()

    def _check_time(self, deadline: float, operation: str) -> None:
        if time.monotonic() >= deadline:
            raise TierUnavailableError("the time was over", tier=self._settings.name, operation=operation)

    def _naming(self, digest: str) -> Naming:
        return Naming(self._settings.prefix, bytes.fromhex(digest))

    def _read(self, check: RecordCheck, deadline: float, listed: Listed) -> RecordStatus | str | None:
        """Return the state of a block's object, None if it is deleted by now."""
        deadline = min(deadline, time.monotonic() + self._settings.job_timeout)
        found: RecordStatus | str = check.too_long
        record: list[memoryview] = []

        def sink(size_bytes: int) -> list[memoryview] | None:
            room = check.room(size_bytes)
            record[:] = [] if room is None else [room]
            return record or None

        for _ in range(2):  # a damaged record may have been damaged on its way
            verdict = self._bucket.get(listed.name, sink, check.bytes_max, deadline, expires=False)
            if verdict is not Verdict.DONE:
                return check.too_long if verdict is Verdict.OVERSIZED else None if verdict in ABSENCE else str(verdict)
            found = check.check(record[0], bytes.fromhex(listed.name[-2 * DIGEST_BYTES :]))
            if found is RecordStatus.OK:
                break
        # Not damage: the bucket has no mark of the format version of its blocks, so another release may read this one.
        return found.value if found is RecordStatus.BAD_VERSION else found

    def _delete(self, naming: Naming, removed: Counter[str], deadline: float) -> tuple[int, set[str], set[str]]:
        """Delete the tier's objects; return how many there were, the foreign names, and the reasons of refusals."""
        found = 0
        foreign: set[str] = set()
        refusals: set[str] = set()
        mark_is_deleted = False
        for page in self._control.versions(naming.root, deadline):
            doomed = []
            for each, is_marker in page:
                name = each["Key"]
                # If its delete marker was on an earlier page, an old version is the latest by now.
                mark_is_deleted |= is_marker and name == naming.epoch and each["IsLatest"]
                is_current = not is_marker and each.get("IsLatest", True) and not mark_is_deleted
                if not naming.owns(name):
                    foreign.add(name)
                elif not (name == naming.epoch and is_current):
                    doomed.append((each, is_marker))
            found += len(doomed)
            for start in range(0, len(doomed), DELETED_AT_ONCE):
                self._check_time(deadline, "purge")
                batch = doomed[start : start + DELETED_AT_ONCE]
                refused = self._control.delete([each for each, _ in batch])
                refusals.update(refused.values())
                gone = [each for at, each in enumerate(batch) if at not in refused]
                removed["bytes"] += sum(each.get("Size", 0) for each, _ in gone)
                removed["blocks"] += sum(not is_marker and naming.is_block(each["Key"]) for each, is_marker in gone)
        return found, foreign, refusals

    def _renew_epoch(self, naming: Naming, deadline: float) -> None:
        """Replace the epoch's mark, or delete it if there was no reset; a mark that is written later is of a reset."""
        store = EpochObject(self._bucket, naming.epoch, self._settings.name)
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

    def _description(self, naming: Naming, deadline: float) -> Mapping[str, object]:
        _, text = self._bucket.read(naming.namespace, DESCRIPTION_BYTES_MAX, deadline)
        return matching_description(fields_of(text).get("namespace"), naming.namespace_digest.hex())
