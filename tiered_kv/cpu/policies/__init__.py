"""Eviction policies of the primary tier: `lru`, `arc`, `s3fifo`, `density`, or any class given as `module:Class`."""

from __future__ import annotations

import importlib

from tiered_kv.cpu.backend import RequestChain
from tiered_kv.cpu.policies.arc import ARCPolicy
from tiered_kv.cpu.policies.base import CachePolicy
from tiered_kv.cpu.policies.density import DensityPolicy
from tiered_kv.cpu.policies.lru import LRUPolicy
from tiered_kv.cpu.policies.s3fifo import S3FIFOPolicy
from tiered_kv.errors import ConfigError

__all__ = [
    "ARCPolicy",
    "CachePolicy",
    "DensityPolicy",
    "LRUPolicy",
    "RequestChain",
    "S3FIFOPolicy",
    "make_policy",
]

_BUILT_IN: dict[str, type[CachePolicy]] = {
    "arc": ARCPolicy,
    "density": DensityPolicy,
    "lru": LRUPolicy,
    "s3fifo": S3FIFOPolicy,
}


def make_policy(name: str, num_blocks: int) -> CachePolicy:
    """Return a policy for `num_blocks` blocks by its name, or by "module:Class".

    Raises:
        ConfigError: There is no such policy, or the class is not a `CachePolicy`.
    """
    policy: object = _BUILT_IN.get(name)
    if policy is None:
        module_name, _, class_name = name.partition(":")
        if not class_name:
            raise ConfigError(
                f"there is no policy {name!r}; known are {', '.join(sorted(_BUILT_IN))}, or give 'module:Class'",
                location="primary.policy",
            )
        try:
            policy = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot import the policy {name!r}: {error}", location="primary.policy") from error
    if not (isinstance(policy, type) and issubclass(policy, CachePolicy)):
        raise ConfigError(f"{name!r} is not a subclass of {CachePolicy.__qualname__}", location="primary.policy")
    return policy(num_blocks)
