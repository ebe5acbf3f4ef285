"""What the namespaces of engines need of a model's files: which weights these hold, and its configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import xxhash

_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_BESIDE = frozenset({".py"})
"""Code that comes with a model."""
_DESCRIBES = re.compile("quant|processor|index")
"""JSON files that count: of quantizers (with scales of a KV cache), of processors for images and sound, of an index."""

_SAMPLES = 4096
"""Of all files together."""
_SAMPLES_PER_FILE_MIN = 16
_SAMPLE_BYTES = 4096
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "id2label", "label2id"})
_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional", "mrope"})
"""Rotary embeddings that follow from the configuration alone. Others may depend on the model's length."""


def weights_in_files(model: str, commit: str | None, which: str) -> str | None:
    """Return how a namespace describes weights in files: by their digest, or else by the commit of their repository.

    `which` says which of several files with weights the engine reads.
    """
    digest = files_digest(model)
    if digest is not None:
        return f"files {digest} {which}"
    return f"commit {commit} {which}" if commit else None


def files_digest(model: str) -> str | None:
    """Return 32 hexadecimal digits for the weights in a directory, or for a file; None if there are no weights.

    Names, sizes and samples count: at least 16 pages of 4 KiB of each file, spread evenly, and some 4,096 of all. So
    a digest shows other weights, but not a change of a few values. A copy on another machine has the same digest.
    """
    path = Path(model)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(each for each in path.iterdir() if _counts(each))
        if not any(each.suffix in _SUFFIXES for each in files):
            return None
    else:
        return None
    samples = max(_SAMPLES_PER_FILE_MIN, _SAMPLES // len(files))
    digest = xxhash.xxh3_128()
    for each in files:
        size = each.stat().st_size
        digest.update(f"{each.name} {size}\n".encode())
        with each.open("rb", buffering=0) as file:
            for start in _starts(size, samples):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
    return digest.hexdigest()


def content_of(value: object) -> str | None:
    """Return the digest of a file, or of a directory with weights, of which a setting is the path; None if it is none.

    A path without a slash is not recognized.
    """
    try:
        return files_digest(value) if isinstance(value, str) and os.sep in value else None
    except (OSError, ValueError):  # it cannot be read, or is no path
        return None


def _counts(path: Path) -> bool:
    is_named = path.suffix in _SUFFIXES | _BESIDE or (path.suffix == ".json" and _DESCRIBES.search(path.name))
    return bool(is_named) and path.is_file()


def _starts(size: int, samples: int) -> list[int]:
    if size <= samples * _SAMPLE_BYTES:
        return list(range(0, size, _SAMPLE_BYTES))
    last = size - _SAMPLE_BYTES
    return [last * number // (samples - 1) for number in range(samples)]


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
