"""Configurations of stacks, and tier types that are registered for the time of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tiered_kv.base import OffloadKey, get_offload_block_hash
from tiered_kv.config.hooks import TierType, hookimpl, tier_plugins, tier_type_of_class
from tiered_kv.config.settings import ClassArguments
from tiered_kv.stack.open import AnyStack
from tiered_kv.tiering.manager import TieringOffloadingManager

BUILT_IN_TIERS: dict[str, dict[str, object]] = {
    "azure": {
        "account": "store",
        "container": "blocks",
        "endpoint": "http://127.0.0.1:1",
        "account_key": "a2V5",
        "capacity": "64MiB",
        "attempts": 1,
    },
    "fs": {"capacity": "64MiB"},
    "gcs": {
        "bucket": "bucket",
        "endpoint": "http://127.0.0.1:1",
        "access_token": "token",
        "capacity": "64MiB",
        "attempts": 1,
    },
    "host": {"socket": "unix:/nonexistent"},
    "memory": {"capacity": "64MiB"},
    "nvme": {"capacity": "64MiB"},
    "redis": {"url": "redis://127.0.0.1:1"},
    "s3": {
        "bucket": "bucket",
        "endpoint_url": "http://127.0.0.1:1",
        "region": "us-east-1",
        "access_key_id": "id",
        "secret_access_key": "secret",
        "capacity": "64MiB",
        "attempts": 1,
    },
}
"""Entries of all built-in tiers, with every setting that adds a counter; no server listens at their addresses."""
IN_DIRECTORIES = ("fs", "nvme")
"""Those that need a `path`, too."""
PATIENT: dict[str, object] = {"lookup_timeout": "1h", "job_timeout": "1h"}
"""For a tier that must answer, however long its thread is held up."""
Register = Callable[[str, Any], None]
"""Makes a tier class known by a name for one test: the fixture `register`."""
ReplaceModule = Callable[..., None]
"""Has an import find another module, or none, for one test: the fixture `replace_module`."""


def block_hashes(keys: Iterable[OffloadKey]) -> list[bytes]:
    """Return the hashes by which `put` and `get` name blocks that a manager has under `keys`, of group 0."""
    return [get_offload_block_hash(key) for key in keys]


def manager_of(stack: AnyStack) -> TieringOffloadingManager:
    """Return a stack's manager, for tests that call it while nothing puts or gets."""
    return stack.observed().manager


def forget_memory(manager: TieringOffloadingManager) -> None:
    """Empty the primary tier and keep the tiers below, as a restart does; between calls, with no request open."""
    manager._forget_primary()  # of the primary tier alone the manager would not know


def stack_of(
    *tiers: Mapping[str, object],
    blocks: int = 16,
    block_bytes: int = 4096,
    block: Mapping[str, object] | None = None,
    primary: Mapping[str, object] | None = None,
    **top: Any,
) -> dict[str, object]:
    """Return the configuration of a stack; `block` and `primary` add settings to these sections."""
    return {
        "namespace": {"model": "m"},
        "block": {"bytes": block_bytes, **(block or {})},
        "primary": {"capacity": blocks * block_bytes, **(primary or {})},
        "secondary": list(tiers),
        **top,
    }


def stack_file(directory: Path, *tiers: str, capacity: str = "1MiB") -> str:
    """Write the file of a stack over tiers, each as `type: memory, capacity: 1MiB`; return its path."""
    file = directory / "stack.yaml"
    lines = ["namespace: {model: test}", "block: {bytes: 4KiB}", f"primary: {{capacity: {capacity}}}", "secondary:"]
    file.write_text("\n".join([*lines, *(f"  - {{{tier}}}" for tier in tiers)]) + "\n")
    return str(file)


@contextmanager
def plugged(*tier_types: TierType) -> Iterator[None]:
    """Register a plugin with these tier types during the `with` block."""

    class Plugin:
        @hookimpl
        def tiered_kv_register_tiers(self) -> list[TierType]:
            return list(tier_types)

    name = " ".join(each.name for each in tier_types)
    tier_plugins().register(Plugin(), name)
    try:
        yield
    finally:
        tier_plugins().unregister(name)


def plugged_class(name: str, tier: Any) -> AbstractContextManager[None]:
    """Register a class, or a callable that returns one, during the `with` block."""
    return plugged(tier_type_of_class(name, tier) if isinstance(tier, type) else TierType(name, ClassArguments, tier))
