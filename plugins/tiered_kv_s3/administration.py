"""Administration of S3's bucket without a stack: as of other buckets, and with all versions of the objects.

The commands call it on one thread, through `ListingAdministration`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tiered_kv.toolkit.administration import Purged
from tiered_kv.toolkit.listing_administration import Entry
from tiered_kv.toolkit.objects.administration import ObjectAdministration
from tiered_kv.toolkit.objects.store import DELETED_AT_ONCE, ObjectControl, ObjectStore
from tiered_kv_s3.access import BucketAccess
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.control import Control, age_s
from tiered_kv_s3.settings import S3Settings


class S3Administration(ObjectAdministration):
    """The bucket of an s3 tier.

    Raises `ConfigError`: boto3 refuses the settings, or the file of authorities cannot be read.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._access = BucketAccess(settings, settings.name)
        self._versions = Control(self._access, settings, settings.name)
        self._bucket = Bucket(settings, self._access)
        super().__init__(settings)

    def connect(self) -> tuple[ObjectStore, ObjectControl]:
        return self._bucket, self._versions

    @property
    def where(self) -> str:
        return f"{self._access.url}/{self._settings.prefix}"

    def purge(self, digest: str, deadline: float) -> Purged:
        purged = super().purge(digest, deadline)
        if self._versions.without_versions == "AccessDenied":
            left = "these credentials may not list versions: older ones are left if the bucket keeps them"
            purged = replace(purged, left=(*purged.left, left))
        notes = ("the server lists no versions; it is taken to keep none",) if self._versions.without_versions else ()
        return replace(purged, notes=notes)

    def entries(self, digest: str | None, deadline: float) -> Iterator[Sequence[Entry]]:
        self._versions.deadline = deadline
        root = f"{self._settings.prefix}/"
        unmarked = set[str]()  # names of marks with a delete marker on an earlier page, which may be deleted by now
        for page in self._versions.versions(f"{root}{digest}/" if digest else root):
            entries = []
            for each, is_marker in page:
                name, size_bytes = each["Key"], each.get("Size", 0)
                naming = self.naming_in(name)
                if naming is None:
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
                entries.append(Entry(name, naming.digest, size_bytes, is_block, written_s, where=each))
            for start in range(0, len(entries), DELETED_AT_ONCE):
                yield entries[start : start + DELETED_AT_ONCE]

    def delete(self, entries: Sequence[Entry]) -> dict[int, str]:
        return self._versions.delete_versions([each.where or {"Key": each.name} for each in entries])
