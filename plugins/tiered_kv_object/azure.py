"""The tier type azure. The stack's plugins import it; nothing else does."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.config.hooks import TierType, hookimpl, imported
from tiered_kv.toolkit.objects.metrics import OBJECT_METRICS
from tiered_kv_object.settings import AzureSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "azure",
            AzureSettings,
            imported("tiered_kv_object.tier:ObstoreTier", library="obstore", extra="azure"),
            "Objects in a container of Azure Blob Storage.",
            imported("tiered_kv_object.administration:ObstoreAdministration", library="obstore", extra="azure"),
            is_shared=True,
            key_store=imported("tiered_kv.toolkit.objects.simulation:ObjectKeys"),
            metrics=OBJECT_METRICS,
        )
    ]
