"""Tiered KV: a tiered store for the key/value blocks of large-language-model servers.

    import tiered_kv

    with tiered_kv.open_stack("stack.yaml") as stack:
        stack.put(keys, blocks)
        found = stack.get(keys)

`tiered_kv.toolkit` has the tools for the author of a tier, and `tiered_kv.base` has the interface for an engine.

What must stay true: importing this package takes little time. So each name is imported when it is first used, on the
thread that uses it.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all the rest; type checkers know the name
if TYPE_CHECKING:
    from tiered_kv.base import make_offload_key
    from tiered_kv.config.namespace import Namespace
    from tiered_kv.config.stack_config import StackConfig, load_config
    from tiered_kv.direct.tiers import DirectTiers
    from tiered_kv.errors import (
        ConfigError,
        FormatError,
        MissingExtraError,
        ResourceError,
        ShutdownError,
        TierBusyError,
        TieredKVError,
        TierError,
        TierUnavailableError,
    )
    from tiered_kv.received import Received
    from tiered_kv.server.connect import HostStack, connect
    from tiered_kv.stack.async_stack import AsyncStack
    from tiered_kv.stack.open import EngineStack, Stack, open_engine_stack, open_stack
    from tiered_kv.tiering.prefix import PrefixOffloadingManager

__version__ = "0.1.0"

__all__ = [
    "AsyncStack",
    "ConfigError",
    "DirectTiers",
    "EngineStack",
    "FormatError",
    "HostStack",
    "MissingExtraError",
    "Namespace",
    "PrefixOffloadingManager",
    "Received",
    "ResourceError",
    "ShutdownError",
    "Stack",
    "StackConfig",
    "TierBusyError",
    "TierError",
    "TierUnavailableError",
    "TieredKVError",
    "connect",
    "load_config",
    "make_offload_key",
    "open_engine_stack",
    "open_stack",
]

_MODULES = {
    "tiered_kv.stack.async_stack": "AsyncStack",
    "tiered_kv.base": "make_offload_key",
    "tiered_kv.config.namespace": "Namespace",
    "tiered_kv.direct.tiers": "DirectTiers",
    "tiered_kv.errors": "ConfigError FormatError MissingExtraError ResourceError ShutdownError TierBusyError "
    "TierError TierUnavailableError TieredKVError",
    "tiered_kv.received": "Received",
    "tiered_kv.server.connect": "HostStack connect",
    "tiered_kv.stack.open": "EngineStack Stack open_engine_stack open_stack",
    "tiered_kv.config.stack_config": "StackConfig load_config",
    "tiered_kv.tiering.prefix": "PrefixOffloadingManager",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    import warnings

    warnings.warn(
        "tiered_kv is seldom tested without Python's interpreter lock, and not before Python 3.14.1: set PYTHON_GIL=1",
        RuntimeWarning,
        stacklevel=2,
    )


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
