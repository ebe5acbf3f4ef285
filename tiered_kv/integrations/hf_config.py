"""What the namespaces of engines need of a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping

_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "id2label", "label2id"})

_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional", "mrope"})
"""Rotary embeddings that follow from the configuration alone. Others may depend on the model's length."""


def without_origin(value: object) -> object:
    """Return a configuration, as its `to_dict` gives it, without the entries that no key or value depends on."""
    if isinstance(value, Mapping):
        return {str(name): without_origin(item) for name, item in value.items() if name not in _NOT_OF_THE_MODEL}
    return value


def depends_on_length(described: object, model_type: object, *, is_foreign_code: bool) -> bool:
    """Return whether keys may depend on the model's maximum length.

    LongRoPE chooses its factors by it, Llama 4 its attention's temperature. Code that is not the engine's may do
    anything. `described` is the configuration as its `to_dict` gives it; `model_type` is the text model's.
    """
    is_rope_fixed = rope_types(described) <= _FIXED_ROPE_TYPES
    return is_foreign_code or not is_rope_fixed or str(model_type).startswith("llama4")


def rope_types(value: object, in_rope: bool = False) -> set[str]:
    """Return the types of rotary embeddings in a configuration; `in_rope` says that `value` describes one."""
    found: set[str] = set()
    if isinstance(value, Mapping):
        for name, item in value.items():
            if in_rope and name in ("rope_type", "type"):
                found.add(str(item))
            found |= rope_types(item, in_rope or name in ("rope_parameters", "rope_scaling"))
    return found
