"""Administration of a bucket or container without a stack. The commands call it on one thread."""

from __future__ import annotations

from tiered_kv.toolkit.objects.administration import ObjectAdministration
from tiered_kv.toolkit.objects.store import ObjectControl, ObjectStore
from tiered_kv_object.client import ObjectClient
from tiered_kv_object.control import ObstoreControl
from tiered_kv_object.settings import ObstoreSettings
from tiered_kv_object.store import ObstoreStore


class ObstoreAdministration(ObjectAdministration):
    """The bucket of a gcs tier, or the container of an azure tier.

    Raises `ConfigError`: obstore refuses the settings, or was used before the process was forked.
    """

    def __init__(self, settings: ObstoreSettings) -> None:
        self._client = ObjectClient(settings, settings.name)
        super().__init__(settings)

    def connect(self) -> tuple[ObjectStore, ObjectControl]:
        return ObstoreStore(self._client), ObstoreControl(self._client)

    @property
    def where(self) -> str:
        return f"{self._client.url}/{self._settings.prefix}"
