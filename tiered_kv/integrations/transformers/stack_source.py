"""The stack of a prefix cache: a stack's file that leaves out what the model says, completed from the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tiered_kv.config.namespace import Namespace
from tiered_kv.config.reading import from_source
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.transformers.identity import Weights, namespace_fields
from tiered_kv.integrations.transformers.layout import BlockLayout
from tiered_kv.integrations.transformers.support import layout_of

BLOCK_TOKENS = 16
"""Where neither the caller nor the stack's file says otherwise."""


def complete(
    source: str | os.PathLike[str] | Mapping[str, object],
    model: Any,  # a PreTrainedModel
    block_tokens: int | None,
    weights: Weights,
) -> tuple[StackConfig, BlockLayout]:
    """Return the configuration of a stack for a model's blocks, and their layout.

    Args:
        source: The path of a stack's file, or a mapping of the same form. `block` and `namespace` may be left out, or
            may have what the model does not say: `block.tokens`, and the namespace's `model`, `revision`,
            `tenant`, `hash_seed`, `extra`.
        model, block_tokens, weights: As in `PrefixCache.open`.

    Raises:
        ConfigError: The configuration cannot be used, or contradicts the model or an argument.
        TypeError, ValueError: The model cannot be served.
    """
    return from_source(source, lambda raw: _complete(raw, model, block_tokens, weights))


def _complete(
    raw: Mapping[str, object], model: Any, block_tokens: int | None, weights: Weights
) -> tuple[StackConfig, BlockLayout]:
    given_block, given_names = _mapping(raw, "block"), _mapping(raw, "namespace")
    missing = [name for name in ("model", "revision") if name not in given_names]
    if weights is Weights.REVISION and missing:
        raise ConfigError(
            "weights='revision' takes the namespace's model and revision for the weights; give both",
            location=f"namespace.{missing[0]}",
        )
    names = {"model": str(getattr(getattr(model, "config", None), "model_type", "")) or "model", **given_names}
    if "bytes" in given_block:
        raise ConfigError("the model says this; leave it out", location="block.bytes")
    # Read with blocks of one byte, which fit everywhere; then once more, as it stands, with those of the model.
    draft = load_config({**raw, "block": {"bytes": 1, **given_block}, "namespace": names})
    layout = layout_of(model, _block_tokens(draft.block.tokens if "tokens" in given_block else None, block_tokens))
    namespace = _namespace(draft.namespace, given_names, namespace_fields(model, layout, weights))
    block = {"bytes": layout.block_bytes, "tokens": layout.block_tokens}
    parts = {name: getattr(draft, name) for name in StackConfig.model_fields if name not in ("namespace", "block")}
    return load_config({"namespace": namespace, "block": block, **parts}), layout


def _mapping(raw: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError("expected a mapping, or nothing", location=name)
    return value


def _block_tokens(in_file: int | None, asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise ValueError(f"block_tokens must be at least 1, not {asked}")
    if in_file is not None and asked is not None and in_file != asked:
        raise ConfigError(f"found {in_file}, and block_tokens={asked} was asked for", location="block.tokens")
    return in_file or asked or BLOCK_TOKENS


def _namespace(draft: Namespace, given: Mapping[str, object], fields: Mapping[str, Any]) -> Namespace:
    """Return the namespace of the file with the model's `fields`, of which the file has none."""
    told = [name for name in fields if name != "extra" and name in given]
    told += [f"extra.{name}" for name in fields["extra"] if name in draft.extra]
    if told:
        raise ConfigError("the model says this; leave it out", location=f"namespace.{told[0]}")
    return draft.model_copy(update={**fields, "extra": {**draft.extra, **fields["extra"]}})
