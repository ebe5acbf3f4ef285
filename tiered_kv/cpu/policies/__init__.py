"""Eviction policies of the primary tier."""

from __future__ import annotations

import importlib
from inspect import isabstract
from typing import Final

from tiered_kv.config.validation import suggestion
from tiered_kv.cpu.backend import RequestChain
from tiered_kv.cpu.policies.base import CachePolicy
from tiered_kv.errors import ConfigError, remedy_of

__all__ = ["BUILT_IN_POLICIES", "CachePolicy", "RequestChain", "make_policy"]

BUILT_IN_POLICIES: Final = {
    "lru": "tiered_kv.cpu.policies.recency:LRUPolicy",
    "arc": "tiered_kv.cpu.policies.recency:ARCPolicy",
    "density": "tiered_kv.cpu.policies.density:DensityPolicy",
}
"""The class of each name that a stack's file may give; it is imported when a primary tier is made."""


def make_policy(name: str, num_blocks: int) -> CachePolicy:
    """Return a policy for `num_blocks` blocks by its name in `BUILT_IN_POLICIES`, or by "module:Class".

    Raises:
        ConfigError: There is no such policy, or the class is not a `CachePolicy`.
    """
    module_name, _, class_name = BUILT_IN_POLICIES.get(name, name).partition(":")
    if not class_name:
        raise ConfigError(
            f"there is no policy {name!r}{suggestion(name, [*BUILT_IN_POLICIES])}; known are "
            f"{', '.join(BUILT_IN_POLICIES)}, or give 'module:Class'",
            location="primary.policy",
        )
    try:
        policy: object = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # any exception that a third-party module raises when it is imported
        if remedy_of(error):
            raise
        raise ConfigError(f"cannot import the policy {name!r}: {error}", location="primary.policy") from error
    if not (isinstance(policy, type) and issubclass(policy, CachePolicy)) or isabstract(policy):
        raise ConfigError(
            f"{name!r} is not a subclass of {CachePolicy.__qualname__} with all of its methods",
            location="primary.policy",
        )
    try:
        return policy(num_blocks)
    except Exception as error:
        if remedy_of(error):
            raise
        raise ConfigError(
            f"the policy {name!r} cannot be made for {num_blocks} blocks: {type(error).__name__}: {error}",
            location="primary.policy",
        ) from error
