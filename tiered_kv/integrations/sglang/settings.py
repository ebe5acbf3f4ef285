"""What the user writes into HiCache's extra config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from tiered_kv.config.reading import fill_variables
from tiered_kv.config.settings import StrictModel
from tiered_kv.config.validation import validate
from tiered_kv.direct.settings import OWN_STORAGE, HostSettings
from tiered_kv.errors import ConfigError

LOCATION = "hicache_storage_backend_extra_config"
"""Where all of it stands, for messages."""

RANK_VARIABLE = "TIERED_KV_RANK"
"""In an entry's texts, the number of the process among all those that hold a part of one copy of the model."""
REPLICA_VARIABLE = "TIERED_KV_REPLICA"
"""The number of that copy, with data parallelism."""

_TOLD = "SGLang tells it; what can be set here: model, revision, quantization, tenant, extra"


class NamespaceSaid(StrictModel):
    """What the user says of the namespace."""

    unknown_key_hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dtype", "layout", "hash_algorithm", "hash_seed", "layers", "groups", "parallel"), _TOLD
    )

    model: str | None = Field(default=None, min_length=1, description="The model's name; by default its path.")
    revision: str | None = Field(default=None, min_length=1, description="The revision of its weights.")
    quantization: str | None = Field(default=None, min_length=1, description="How keys and values are quantized.")
    tenant: str | None = Field(default=None, min_length=1, description="Keeps one user's blocks from another's.")
    extra: dict[str, str] = Field(default={}, description="Whatever else must agree, such as the state of adapters.")


class HiCacheSettings(HostSettings):
    """The extra config, without what SGLang takes out of it for itself."""

    location = LOCATION

    backend_name: str = Field(description="a name for messages, such as tiered_kv")
    module_path: str = Field(description="tiered_kv.integrations.sglang")
    class_name: str = Field(description="TieredKVHiCache")
    interface_v1: Literal[1] = Field(description="write 1: then SGLang hands over places in its memory, not copies")
    namespace: NamespaceSaid = Field(default=NamespaceSaid(), description="what SGLang does not tell of the bytes")
    allocator: Literal["shm"] | None = Field(default=None, description="SGLang's own: where its host pools lie")
    file_storage_path: str | None = Field(default=None, description="SGLang's own, not used here")


def read_settings(
    extra_config: Mapping[str, object], environ: Mapping[str, str], own: Mapping[str, int]
) -> HiCacheSettings:
    """Return the extra config, checked, with its variables filled in.

    Args:
        environ: The variables that its texts may name.
        own: Those of them that a path of a tier with storage of its own has to name, and how many values each has.

    Raises:
        ConfigError: A setting cannot be used.
    """
    settings = validate(HiCacheSettings, fill_variables(extra_config, environ), (LOCATION,))
    raw = extra_config["tiers"]
    assert isinstance(raw, (list, tuple))
    for number, (tier, entry) in enumerate(zip(settings.tiers, raw, strict=True)):
        path = entry.get("path") if tier.type in OWN_STORAGE else None
        for name, values in own.items():
            if path is not None and values > 1 and f"${{{name}" not in path:
                raise ConfigError(
                    f"{values} processes would have one directory, which belongs to one; write ${{{name}}} into it, "
                    f"such as {path}-${{{name}}}; the capacity is that of each",
                    location=f"{LOCATION}.tiers.{number}.path",
                )
    return settings
