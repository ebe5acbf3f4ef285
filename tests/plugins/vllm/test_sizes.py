"""What `tiered-kv size` says of a model's layers and blocks, beside what vLLM says of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.engines import printed_by
from tests.support.model_facts import FACTS, write_model
from tiered_kv.engines.model.architectures import read_model
from tiered_kv.engines.model.layers import Kind, row_aligned
from tiered_kv.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.full]

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
    for theirs in printed_by("0.32.0", "vllm_sizes_program.py", str(tmp_path / "vllm"), *FACTS):
        path = write_model(tmp_path / str(compared), FACTS[theirs["model"]])
        model = read_model(path)
        ours = [
            [SPECS[each.kind], each.state_bytes or each.token_bytes(model.dtype, 1), each.span, each.number]
            for each in model.layers
        ]
        assert sorted(ours, key=str) == sorted(theirs["layers"], key=str), theirs["model"]
        assert len(model.groups()) == theirs["groups"], theirs["model"]
        assert model.block_tokens(theirs["block_tokens"]) == theirs["block_tokens"], theirs["model"]
        assert model.row_bytes(theirs["block_tokens"]) == row_aligned(theirs["block_bytes"]), theirs["model"]
        is_latent = any(each.kind is Kind.LATENT for each in model.layers)
        for ranks, heads in theirs["rank_heads"].items():
            with suppress(ConfigError):  # such ranks cannot share the heads
                layers = [each for each in read_model(path, ranks=int(ranks)).layers if each.elements]
                kept = {each.token_bytes("fp8", int(ranks)) // each.elements for each in layers}
                assert kept == {heads if is_latent else heads * int(ranks)}, (theirs["model"], ranks)
        compared += 1
    assert compared == len(FACTS)
