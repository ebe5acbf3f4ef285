"""The s3 tier: an `ObjectTier` over the bucket's requests, and what `check` says of S3's servers.

A `GuardedTier` calls it on the scheduler's thread, and no such call does I/O. `describe` asks the server, on the
command's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered_kv.config.units import rounded_seconds
from tiered_kv.toolkit.objects.failures import RequestFailures
from tiered_kv.toolkit.objects.store import ObjectControl, ObjectStore
from tiered_kv.toolkit.objects.tier import ObjectTier
from tiered_kv_s3.access import BucketAccess
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.control import Control
from tiered_kv_s3.settings import S3Settings

_SKEW_MAX_S = 60.0  # `describe` warns of a larger difference between the clocks
_LOCKS_OBJECTS = "the bucket has object lock: deleted blocks stay until their retention ends; use one without"
_KEEPS_VERSIONS = (
    "the bucket keeps deleted blocks as old versions, which ttl and capacity do not count: "
    "add a lifecycle rule that expires them"
)


class S3Tier(ObjectTier):
    """Blocks as objects in a bucket of S3, shared by all stacks of one namespace.

    Raises:
        ConfigError: The settings do not go together, boto3 refuses them, or a key file cannot be used. A server that
            does not answer is no error.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: S3Settings) -> None:
        self._s3 = settings
        super().__init__(offloading_spec, primary_kv_view, tier_type, settings)

    def connect(self, name: str, record_bytes: int) -> tuple[ObjectStore, ObjectControl, RequestFailures]:
        self._access = BucketAccess(self._s3, name)
        self._bucket = Bucket(self._s3, self._access)
        self._versions = Control(self._access, self._s3, name, record_bytes)
        return self._bucket, self._versions, self._access.failures

    def stats(self) -> Mapping[str, Any]:
        return {**super().stats(), "open_connections": self._bucket.pool.open_connections}

    def describe(self) -> Mapping[str, object]:
        self.check_bucket()
        control = self._versions
        has_limit = self._s3.ttl or self._s3.capacity
        warnings = [_LOCKS_OBJECTS] if control.locks_objects() else []
        warnings += [_KEEPS_VERSIONS] if not warnings and has_limit and control.keeps_versions() else []
        if abs(control.skew_s) > _SKEW_MAX_S:
            way = "ahead of" if control.skew_s > 0 else "behind"
            apart = f"{rounded_seconds(abs(control.skew_s))} {way} the server's"
            warnings.append(f"the clock of this machine is {apart}; set it, since S3 refuses 15 minutes")
        return {
            **({"warning": "; ".join(warnings)} if warnings else {}),
            "medium": "s3",
            **self._s3.model_dump(include={"bucket", "prefix", "connections", "codec"}),
            "server": self._bucket.pool.endpoint.authority,
            "tls": self._bucket.pool.endpoint.is_tls,
            "region": self._access.region,
            "capacity_bytes": self._s3.capacity,
            "ttl_s": self._s3.ttl,
        }
