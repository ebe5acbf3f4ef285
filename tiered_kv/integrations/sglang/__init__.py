"""Tiered KV inside SGLang: our tiers as the storage of its HiCache.

`TieredKVHiCache` is used as `--hicache-storage-backend dynamic`, with this module's name as `module_path`;
docs/how-to/sglang.md has the configuration.

Raises:
    ConfigError: On import, where SGLang is not installed or its version is unknown.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from tiered_kv.errors import ConfigError

if TYPE_CHECKING:
    from tiered_kv.integrations.sglang.backend import TieredKVHiCache

__all__ = ["SGLANG_VERSION", "TESTED_VERSIONS", "TieredKVHiCache"]

TESTED_VERSIONS = ("0.5.23",)
"""The versions that this integration's tests run."""

ANY_VERSION_VARIABLE = "TIERED_KV_ANY_SGLANG"
"""Set to 1 in the environment, it lets an untested version through."""


def _check_version() -> str:
    """Return the version of the SGLang that is installed.

    Raises:
        ConfigError: There is none, or its interfaces are not known here.
    """
    tested = " and ".join(TESTED_VERSIONS)
    try:
        version = str(importlib.import_module("sglang").__version__)
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        message = f"tiered_kv.integrations.sglang needs SGLang ({tested} is tested), and it is not installed here"
        raise ConfigError(message) from None
    if version.partition("+")[0] in TESTED_VERSIONS or os.environ.get(ANY_VERSION_VARIABLE) == "1":
        return version
    raise ConfigError(
        f"SGLang {version} is installed, and this tiered_kv was tested with {tested}. Its storage interfaces and host "
        f"pools change between releases: install {tested}, or another tiered_kv, or set {ANY_VERSION_VARIABLE}=1 to try"
    )


SGLANG_VERSION = _check_version()
"""The version that is installed."""


def __getattr__(name: str) -> Any:  # Any: the class above
    if name != "TieredKVHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("tiered_kv.integrations.sglang.backend").TieredKVHiCache
