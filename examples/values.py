"""Embeddings of texts, of different lengths, which a second run finds: python examples/values.py"""

from __future__ import annotations

import hashlib

import numpy as np

import tiered_kv

STACK = {
    "namespace": {"model": "embeddings"},
    "block": {"bytes": 4096},
    "primary": {"capacity": "1MiB"},
    "secondary": [{"type": "nvme", "path": "embeddings-cache", "capacity": "64MiB"}],
}


def embedding(text: str) -> np.ndarray:
    """Return what a model would compute: a row for each word."""
    return np.array([[len(word), ord(word[0])] for word in text.split()], np.float32)


def embeddings(stack: tiered_kv.Stack, texts: list[str]) -> list[np.ndarray]:
    keys = [hashlib.sha256(text.encode()).digest() for text in texts]
    found = stack.values.get_many(keys)
    computed = {key: embedding(text) for key, text, value in zip(keys, texts, found, strict=True) if value is None}
    stack.values.put_many(computed)
    print(f"{len(computed)} of {len(texts)} computed")
    return [
        computed[key] if value is None else np.frombuffer(value, np.float32).reshape(-1, 2)
        for key, value in zip(keys, found, strict=True)
    ]


def main() -> None:
    for texts in (["one", "two words"], ["two words", "now three words", "one"]):
        with tiered_kv.open_stack(STACK) as stack:
            print([rows.shape for rows in embeddings(stack, texts)])


if __name__ == "__main__":
    main()
