"""HiCache's extra config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from tiered_kv.config.reading import fill_variables
from tiered_kv.config.validation import validate
from tiered_kv.direct.settings import OWN_STORAGE, HostSettings
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.user_namespace import UserModelNamespace

LOCATION = "hicache_storage_backend_extra_config"
"""Path of the extra config, for messages."""

RANK_VARIABLE = "TIERED_KV_RANK"
"""In an entry's texts, the number of the process among all those that hold a part of one copy of the model."""
REPLICA_VARIABLE = "TIERED_KV_REPLICA"
"""The number of that copy, with data parallelism."""


class HiCacheNamespace(UserModelNamespace):
    """What the extra config may say of the namespace."""

    unknown_key_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dtype", "layout", "hash_algorithm", "hash_seed", "layers", "groups", "parallel"),
        "SGLang sets it; known keys: model, revision, quantization, tenant, extra",
    )


class HiCacheSettings(HostSettings):
    """The extra config, without the settings that SGLang takes out of it."""

    location = LOCATION

    backend_name: str = Field(description="a name for messages, such as tiered_kv")
    module_path: str = Field(description="tiered_kv.integrations.sglang")
    class_name: str = Field(description="TieredKVHiCache")
    interface_v1: Literal[1] = Field(description="write 1: then SGLang hands over places in its memory, not copies")
    namespace: HiCacheNamespace = Field(
        default=HiCacheNamespace(), description="what SGLang does not report of the bytes"
    )
    allocator: Literal["shm"] | None = Field(default=None, description="SGLang's own: where its host pools are")
    file_storage_path: str | None = Field(default=None, description="SGLang's own, not used here")


def read_settings(
    extra_config: Mapping[str, object], environ: Mapping[str, str], processes: Mapping[str, int]
) -> HiCacheSettings:
    """Return the extra config, checked, with its variables filled in.

    Args:
        environ: The variables that its texts may name.
        processes: For each variable that identifies an engine's process, the number of processes. If there are
            several, the path of a tier with its own storage has to name the variable.
    """
    settings = validate(HiCacheSettings, fill_variables(extra_config, environ), (LOCATION,))
    raw = extra_config["tiers"]
    assert isinstance(raw, (list, tuple))
    for number, (tier, entry) in enumerate(zip(settings.tiers, raw, strict=True)):
        path = entry.get("path") if tier.type in OWN_STORAGE else None
        for name, count in processes.items():
            if path is not None and count > 1 and f"${{{name}" not in path:
                raise ConfigError(
                    f"{count} processes would have one directory, which belongs to one; write ${{{name}}} into it, "
                    f"such as {path}-${{{name}}}; the capacity is that of each",
                    location=f"{LOCATION}.tiers.{number}.path",
                )
    return settings
