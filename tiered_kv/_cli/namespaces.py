"""Other namespaces in a tier's storage: the same keys under a namespace that differs are a miss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from tiered_kv.config.namespace import differences
from tiered_kv.config.redaction import error_text
from tiered_kv.config.settings import TierSettings
from tiered_kv.hooks import tier_plugins
from tiered_kv.stack_config import StackConfig

NAMESPACES_MAX = 64
"""For each tier."""


@dataclass(frozen=True, slots=True)
class OtherNamespace:
    """A namespace, other than the stack's own, with data in a tier's storage.

    Attributes:
        digest: 32 hexadecimal digits.
        differences: For each field that differs, such as "namespace.revision": the stack's value and this one's, None
            without a value. Empty if the storage has no readable form of the namespace.
    """

    digest: str
    differences: Mapping[str, tuple[object, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierNamespaces:
    """The namespaces in the storage of one tier.

    Attributes:
        has_own: Whether it has data of the stack's namespace.
        others: The fewest differences first.
        error: Why they could not be listed; empty if they were.
    """

    tier: str
    has_own: bool = False
    others: tuple[OtherNamespace, ...] = ()
    error: str = ""


def tier_namespaces(config: StackConfig, settings: TierSettings, deadline: float) -> TierNamespaces:
    """Return the namespaces in a tier's storage, by I/O until `deadline` (of `time.monotonic()`). It opens no stack."""
    own = config.identity
    try:
        load = tier_plugins().resolve(settings.type).administration
        if load is None:
            return TierNamespaces(settings.name, error=f"tiers of type '{settings.type}' cannot list their namespaces")
        with closing(load()(settings)) as administration:
            stored = administration.survey(deadline).namespaces
    except Exception as error:  # a third-party administration may raise anything
        return TierNamespaces(settings.name, error=error_text(error, settings.secret_texts()))
    digest = own.digest.hex()
    others = [
        OtherNamespace(each.digest, differences(own.described, each.described))
        for each in stored
        if each.digest != digest
    ]
    others.sort(key=lambda other: (not other.differences, len(other.differences), other.digest))
    has_own = any(each.digest == digest and each.blocks != 0 for each in stored)  # an open stack has made its directory
    return TierNamespaces(settings.name, has_own, tuple(others[:NAMESPACES_MAX]))
