"""Administration of the bucket without a stack: survey and verify namespaces, and purge one with all its versions.

The commands call it on one thread, through `ListingAdministration`; some threads of its own read blocks. Objects with
names outside of the tier's layout (`epoch.py`) are foreign: they stay, and are reported.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from tiered_kv.reasons import RecordStatus
from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.administration import DESCRIPTION_BYTES_MAX, DIGEST_HEX, Purged, RecordCheck, Verification
from tiered_kv.toolkit.listing_administration import Entry, ListingAdministration
from tiered_kv.toolkit.record import DIGEST_BYTES
from tiered_kv.toolkit.small_files import fields_of
from tiered_kv_s3.access import BucketAccess
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.control import DELETED_AT_ONCE, Control, age_s
from tiered_kv_s3.epoch import EpochObject, Naming
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import ABSENCE, BucketError, Verdict

_PARALLEL_READS: Final = 8


class S3Administration(ListingAdministration):
    """The bucket of an s3 tier.

    Raises `ConfigError`: boto3 refuses the settings, or the file of authorities cannot be read.
    """

    def __init__(self, settings: S3Settings) -> None:
        super().__init__(settings)
        self._access = BucketAccess(settings, settings.name)
        self._bucket = Bucket(settings, self._access)
        self._control = Control(self._access, settings, settings.name)

    @property
    def where(self) -> str:
        return f"{self._access.url}/{self._settings.prefix}"

    def digests(self, deadline: float) -> Iterable[str]:
        self._control.deadline = deadline
        return filter(DIGEST_HEX.fullmatch, self._control.folders(f"{self._settings.prefix}/"))

    def purge(self, digest: str, deadline: float) -> Purged:
        purged = super().purge(digest, deadline)
        if self._control.without_versions == "AccessDenied":
            left = "these credentials may not list versions: older ones are left if the bucket keeps them"
            purged = replace(purged, left=(*purged.left, left))
        notes = ("the server lists no versions; it is taken to keep none",) if self._control.without_versions else ()
        return replace(purged, notes=notes)

    def entries(self, digest: str | None, deadline: float) -> Iterator[Sequence[Entry]]:
        self._control.deadline = deadline
        root = f"{self._settings.prefix}/"
        unmarked = set[str]()  # names of marks with a delete marker on an earlier page, which may be deleted by now
        for page in self._control.versions(f"{root}{digest}/" if digest else root):
            entries = []
            for each, is_marker in page:
                name, size_bytes = each["Key"], each.get("Size", 0)
                found = name.removeprefix(root).partition("/")[0]
                naming = self._naming(found) if DIGEST_HEX.fullmatch(found) else None
                if naming is None or not naming.owns(name):
                    entries.append(Entry(name, None, size_bytes))
                    continue
                is_current = each.get("IsLatest", True)
                if name == naming.epoch:
                    if is_marker and is_current:
                        unmarked.add(name)
                    elif is_current and name not in unmarked:
                        continue  # the current mark stays after a purge
                is_block = naming.is_block(name) and is_current and not is_marker
                written_s = age_s(each, time.time()) if "LastModified" in each else None
                entries.append(Entry(name, found, size_bytes, is_block, written_s, where=each))
            for start in range(0, len(entries), DELETED_AT_ONCE):
                yield entries[start : start + DELETED_AT_ONCE]

    def mark(self, digest: str) -> RemovableObject:
        return RemovableObject(self._bucket, self._naming(digest).epoch, self._settings.name, self._control)

    def delete(self, entries: Sequence[Entry]) -> dict[int, str]:
        return self._control.delete([each.where for each in entries])

    def describe(self, digest: str, deadline: float) -> object:
        _, text = self._bucket.read(self._naming(digest).namespace, DESCRIPTION_BYTES_MAX, deadline)
        return fields_of(text).get("namespace")

    def check(
        self, digest: str, blocks: Iterator[Sequence[Entry]], found: Verification, deadline: float
    ) -> Iterator[tuple[Entry, RecordStatus | str, int]]:
        check = RecordCheck(bytes.fromhex(digest), self._settings.open_codecs(), found.block_bytes)
        read = partial(self._read, check, deadline)
        for listed in blocks:
            for start in range(0, len(listed), _PARALLEL_READS):
                batch = listed[start : start + _PARALLEL_READS]
                reads = run_all(read, batch, "tiered-kv-s3-verify", _PARALLEL_READS)
                for each, status in zip(batch, (each.result() for each in reads), strict=True):
                    if status is not None:
                        # No version is named: the delete of one would make an older version the block again.
                        block = each._replace(where={"Key": each.name})
                        yield block, status, 0 if status == check.too_long else each.size_bytes or 0

    def close(self) -> None:
        self._control.close()
        self._bucket.close()

    def _naming(self, digest: str) -> Naming:
        return Naming(self._settings.prefix, bytes.fromhex(digest))

    def _read(self, check: RecordCheck, deadline: float, listed: Entry) -> RecordStatus | str | None:
        """Return the state of a block's object, None if it is deleted by now."""
        deadline = min(deadline, time.monotonic() + self._settings.job_timeout)
        found: RecordStatus | str = check.too_long
        record: list[memoryview] = []

        def sink(size_bytes: int) -> list[memoryview] | None:
            room = check.room(size_bytes)
            record[:] = [] if room is None else [room]
            return record or None

        for _ in range(2):  # the second time if the first record was damaged, perhaps on its way
            verdict = self._bucket.get(listed.name, sink, check.bytes_max, deadline, expires=False)
            if verdict is not Verdict.DONE:
                return check.too_long if verdict is Verdict.OVERSIZED else None if verdict in ABSENCE else str(verdict)
            found = check.check(record[0], bytes.fromhex(listed.name[-2 * DIGEST_BYTES :]))
            if found is RecordStatus.OK:
                break
        # No damage: a bucket has no mark of its blocks' format version, so another release may read this record.
        return found.value if found is RecordStatus.BAD_VERSION else found


class RemovableObject(EpochObject):
    """An epoch's mark that a purge deletes, by the requests that delete blocks: some servers know no others."""

    def __init__(self, bucket: Bucket, name: str, tier: str, control: Control) -> None:
        super().__init__(bucket, name, tier)
        self._control = control

    def remove(self, deadline: float) -> None:
        for code in self._control.delete([{"Key": self._name}]).values():
            raise BucketError(f"the server refuses to delete it: {code}", code, tier=self._tier, operation="epoch")
