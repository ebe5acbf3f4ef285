"""Which vLLM is installed, and whether this integration knows it."""

from __future__ import annotations

import importlib
import os
import re

from tiered_kv.errors import ConfigError

TESTED_VERSIONS = ("0.32.0", "0.33.0")
"""The versions that this integration's tests run. Their patch releases are taken for the same."""

ANY_VERSION_VARIABLE = "TIERED_KV_ANY_VLLM"
"""Set to 1 in the environment, it lets an untested version through."""


def check_version() -> str:
    """Return the version of the vLLM that is installed.

    Raises:
        ConfigError: There is none, or its interfaces are not known here.
    """
    tested = " and ".join(TESTED_VERSIONS)
    try:
        version = str(importlib.import_module("vllm").__version__)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        message = f"tiered_kv.integrations.vllm needs vLLM ({tested} are tested), and it is not installed here"
        raise ConfigError(message) from None
    if _release(version) in map(_release, TESTED_VERSIONS) or os.environ.get(ANY_VERSION_VARIABLE) == "1":
        return version
    raise ConfigError(
        f"vLLM {version} is installed, and this tiered_kv was tested with {tested}. Its offloading interfaces change "
        f"between releases: install one of these, or another tiered_kv, or set {ANY_VERSION_VARIABLE}=1 to try"
    )


def _release(version: str) -> tuple[str, ...]:
    return tuple(re.split(r"[.+]", version)[:2])
