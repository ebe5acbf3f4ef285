"""The name of a cache in Transformers: `cache` since 5.24, `past_key_values` before."""

from __future__ import annotations

import inspect
from typing import Any


def given(model: Any, cache: Any) -> dict[str, Any]:
    """Return the argument by which a model, and its `generate`, take a cache."""
    return {_name(model): cache}


def cache_in(model: Any, output: Any) -> Any:
    """Return the cache in what a model returned."""
    return getattr(output, _name(model))


def _name(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
