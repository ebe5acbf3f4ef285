"""Tiers over a caller's memory on a bench: a pool of noise, and tiers of a test's own making."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support import stacks
from tests.support.stacks import PATIENT
from tiered_kv.config.namespace import Namespace
from tiered_kv.direct import DirectTiers
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier

BLOCK_BYTES = 4096
WAIT_S = 60.0
NAMESPACE = Namespace(model="direct")

Wrap = Callable[[MemoryTier], SecondaryTierManager]
Register = Callable[[str, Wrap], None]


def memory_tier(spec: TierSpec, view: memoryview) -> MemoryTier:
    return MemoryTier(spec, view, "memory", MemorySettings.model_validate({"type": "memory", "capacity": "64 MiB"}))


@pytest.fixture
def register(register: stacks.Register) -> Register:
    """Make tier types known for one test: a memory tier, wrapped."""

    def wrapped(name: str, wrap: Wrap) -> None:
        class Wrapped(SecondaryTierManager):
            def __new__(cls, spec: TierSpec, view: memoryview, tier_type: str) -> Any:
                return wrap(memory_tier(spec, view))

        register(name, Wrapped)

    return wrapped


@pytest.fixture
def pool() -> Any:
    """A caller's memory."""
    return np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)


def offsets(count: int, start: int = 0, stride: int = BLOCK_BYTES) -> list[int]:
    return [start + number * stride for number in range(count)]


def open_direct(pool: Any, *tiers: dict[str, object], **options: Any) -> DirectTiers:
    return DirectTiers(pool, **{"block_bytes": BLOCK_BYTES, "namespace": NAMESPACE, "tiers": tiers, **options})


MEMORY: dict[str, object] = {"type": "memory", "capacity": "64 MiB", **PATIENT}
