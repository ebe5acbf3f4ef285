"""Runs in an environment with vLLM: what vLLM says that the layers of models keep, without their weights.

    python vllm_sizes_program.py DIRECTORY NAME...

Each name is a model of `tests/engines/models.json`. vLLM makes its configuration and its layers, as it does before it
loads weights, but on the device "meta", where tensors have no bytes. Prints a line of JSON for each: its layers, the
bytes and tokens of a block of its largest group, and the KV heads of each of so many tensor parallel ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import _get_kv_cache_bytes_per_block, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

MODELS: Mapping[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "engines/models.json").read_text())
TOKENS = 2048
RANKS = (1, 2, 4, 8, 16)
LAYOUTS = ["LBNHC", "BLNHC"]
TEXT_ALONE = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}
"""The language models of models that also see: their libraries for images are not needed here."""


def here(answer: Callable[[], Any]) -> Any:
    """Ask a model's class for its facts in this process: vLLM starts another, so that CUDA is not touched in this."""
    return answer()


def config_of(name: str, directory: Path) -> Any:
    """Return vLLM's configuration for a model, made as `vllm serve` makes it."""
    facts = MODELS[name]
    text = {**facts, **facts.get("text_config", {})}
    text.pop("text_config", None)
    text["architectures"] = [TEXT_ALONE.get(each, each) for each in facts["architectures"]]
    folder = directory / name.replace(" ", "-")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": TOKENS, **text}))
    return EngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=TOKENS, enforce_eager=True
    ).create_engine_config()


def specs_of(config: Any, directory: Path) -> dict[str, KVCacheSpec]:
    """Return what vLLM keeps for each layer of a model."""
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{directory.absolute()}/ranks", 0, "gloo")
        destroy_model_parallel()  # of the model before, which may have had no experts
        initialize_model_parallel(1, 1)
        with torch.device("meta"):
            initialize_model(config)
    current_platform.update_block_size_for_backend(config)
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def layer_of(spec: Any) -> tuple[str, int, int | None]:
    """Return the class of a layer's spec, the bytes of a token, or of a state, and the tokens that it looks back."""
    span = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    is_state = isinstance(spec, MambaSpec)
    return type(spec).__name__, spec.real_page_size_bytes // (1 if is_state else spec.block_size), span


def main() -> None:
    registry._run_in_subprocess = here
    directory, *names = Path(sys.argv[1]), *sys.argv[2:]
    for name in names:
        config = config_of(name, directory)
        specs = specs_of(config, directory)
        layout = resolve_kv_cache_layout(config, [LAYOUTS], list(specs.values()))
        groups = get_kv_cache_groups(config, specs)
        tokens = [each.kv_cache_spec.block_size for each in groups if not isinstance(each.kv_cache_spec, MambaSpec)]
        found = {
            "model": name,
            "layers": sorted([*layer, number] for layer, number in Counter(map(layer_of, specs.values())).items()),
            "groups": len(groups),
            "block_tokens": max(tokens),
            "block_bytes": _get_kv_cache_bytes_per_block(groups, layout),
            "rank_heads": {
                ranks: config.model_config.get_num_kv_heads(SimpleNamespace(tensor_parallel_size=ranks))
                for ranks in RANKS
            },
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
