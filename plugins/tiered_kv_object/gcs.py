"""The tier type gcs. The stack's plugins import it; nothing else does."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.config.hooks import TierType, hookimpl, imported
from tiered_kv.toolkit.objects.metrics import OBJECT_METRICS
from tiered_kv_object.settings import GcsSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "gcs",
            GcsSettings,
            imported("tiered_kv_object.tier:ObstoreTier", library="obstore", extra="gcs"),
            "Objects in a bucket of Google Cloud Storage.",
            imported("tiered_kv_object.administration:ObstoreAdministration", library="obstore", extra="gcs"),
            is_shared=True,
            key_store=imported("tiered_kv.toolkit.objects.simulation:ObjectKeys"),
            metrics=OBJECT_METRICS,
        )
    ]
