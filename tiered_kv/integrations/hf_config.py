"""A Hugging Face configuration, as namespaces of engines need it."""

from __future__ import annotations

from collections.abc import Mapping

_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "id2label", "label2id"})

_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional", "mrope"})


def without_origin(value: object) -> object:
    """Return a configuration, as its `to_dict` gives it, without the entries that no key or value depends on."""
    if isinstance(value, Mapping):
        return {str(name): without_origin(item) for name, item in value.items() if name not in _NOT_OF_THE_MODEL}
    return value


def has_fixed_rope(described: object) -> bool:
    """Return whether the rotary embedding follows from the configuration alone; others may look at the model's length.

    `described` is the configuration as its `to_dict` gives it.
    """
    return rope_types(described) <= _FIXED_ROPE_TYPES


def rope_types(value: object, in_rope: bool = False) -> set[str]:
    """Return the types of rotary embeddings in a configuration, or where `in_rope` is True, in its part on these."""
    found: set[str] = set()
    if isinstance(value, Mapping):
        for name, item in value.items():
            if in_rope and name in ("rope_type", "type"):
                found.add(str(item))
            found |= rope_types(item, in_rope or name in ("rope_parameters", "rope_scaling"))
    return found
