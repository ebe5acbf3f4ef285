"""Llamas with small random weights, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

TINY_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "dtype": "float32",
}
"""A `config.json`."""
DEPENDENT_WEIGHTS: Final = 0.2
"""An `initializer_range` with which every token depends on all of its context, as the tests make sure."""


def llama_sizes(
    *, vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int
) -> dict[str, int]:
    """Return the sizes of a model by the names that its configuration has for them."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def save_llama(directory: Path, **config: Any) -> None:
    """Save a Llama with seeded random weights, unless it exists."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(max_position_embeddings=8192, **config)).save_pretrained(directory)
