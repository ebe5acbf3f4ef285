"""What `tiered-kv size` says of a model's layers and blocks, beside what vLLM says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import printed_by
from tests.support.model_facts import FACTS, write_model
from tiered_kv.engines.model.architectures import read_model
from tiered_kv.engines.model.layers import Kind, row_aligned

pytestmark = pytest.mark.slow

COMPARED = ("Llama 3.1 8B", "DeepSeek-V3", "gpt-oss-120b", "Gemma 3 27B", "Qwen3-Next 80B-A3B", "Jamba v0.1")
"""Grouped heads, latent attention, windows, several groups of windows, a gated delta net, and Mamba."""
SPECS = {
    Kind.FULL: "FullAttentionSpec",
    Kind.LATENT: "MLAAttentionSpec",
    Kind.WINDOW: "SlidingWindowSpec",
    Kind.CHUNK: "ChunkedLocalAttentionSpec",
    Kind.STATE: "MambaSpec",
}


def test_layers_and_blocks_have_the_bytes_that_vllm_gives_them(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    compared = 0
    for theirs in printed_by("0.32.0", "vllm_sizes_program.py", str(tmp_path / "vllm"), *COMPARED):
        model = read_model(write_model(tmp_path / str(compared), FACTS[theirs["model"]]))
        ours = [
            [SPECS[each.kind], each.state_bytes or each.token_bytes(model.dtype, 1), each.span, each.number]
            for each in model.layers
        ]
        assert sorted(ours, key=str) == sorted(theirs["layers"], key=str), theirs["model"]
        assert len(model.groups()) == theirs["groups"], theirs["model"]
        assert model.block_tokens(theirs["block_tokens"]) == theirs["block_tokens"], theirs["model"]
        assert model.row_bytes(theirs["block_tokens"]) == row_aligned(theirs["block_bytes"]), theirs["model"]
        compared += 1
    assert compared == len(COMPARED)
