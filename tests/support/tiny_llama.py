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


def save_llama(directory: Path, **config: Any) -> None:
    """Save a Llama with seeded random weights, unless it exists."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(max_position_embeddings=8192, **config)).save_pretrained(directory)
