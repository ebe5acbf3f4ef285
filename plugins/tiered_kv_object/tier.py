"""The tiers gcs and azure: an `ObjectTier` over obstore, and what `check` says of the bucket.

A `GuardedTier` calls it on the scheduler's thread, and no such call does I/O. `describe` asks the server, on the
command's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered_kv.toolkit.objects.failures import RequestFailures
from tiered_kv.toolkit.objects.store import ObjectControl, ObjectStore
from tiered_kv.toolkit.objects.tier import ObjectTier
from tiered_kv_object.client import ObjectClient
from tiered_kv_object.control import ObstoreControl
from tiered_kv_object.settings import ObstoreSettings
from tiered_kv_object.store import ObstoreStore


class ObstoreTier(ObjectTier):
    """Blocks as objects in a bucket of GCS or a container of Azure, shared by all stacks of one namespace.

    Raises:
        ConfigError: The settings do not go together, obstore refuses them, a key file cannot be used, or the process
            was forked after obstore had been used. A server that does not answer is no error.
    """

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: ObstoreSettings
    ) -> None:
        self._object = settings
        super().__init__(offloading_spec, primary_kv_view, tier_type, settings)

    def connect(self, name: str, record_bytes: int) -> tuple[ObjectStore, ObjectControl, RequestFailures]:
        self._client = ObjectClient(self._object, name)
        return ObstoreStore(self._client), ObstoreControl(self._client), self._client.failures

    def describe(self) -> Mapping[str, object]:
        self.check_bucket()
        return {
            "medium": self._object.type,
            **self._object.model_dump(include={"bucket", "account", "container", "prefix", "connections", "codec"}),
            "identity": self._client.identity,
            "capacity_bytes": self._object.capacity,
            "ttl_s": self._object.ttl,
        }
