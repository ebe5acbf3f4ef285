"""Runs in an environment with SGLang: the namespaces of engines that differ from one another in one thing.

    python sglang_namespace_program.py DIRECTORY

Prints a line of JSON for each engine: its name, the name of the one beside it, and its namespace or why it was refused.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# The parts have set the variables that SGLang reads.
from sglang.srt.runtime_context import get_context, get_parallel

from tests.integrations.sglang_engine_program import save_model
from tests.integrations.sglang_program_parts import (
    extra_config,
    mamba_pool,
    mha_pool,
    mla_pool,
    publish_engine,
    storage_config,
)
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.sglang import engine as engine_module
from tiered_kv.integrations.sglang.engine import namespace_of
from tiered_kv.integrations.sglang.pools import PagePool
from tiered_kv.integrations.sglang.settings import read_settings

DIRECTORY = Path(sys.argv[1])
MODEL = DIRECTORY / "model"
BASE = "base"
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Engine:
    """What is different about an engine.

    Attributes:
        beside: The engine that differs from it in this alone.
        files: Changes a copy of the model's directory.
        arguments: Of SGLang's command line.
        settings: What is in effect by SGLang's own account, by the path of a section.
        said: The user's part of the namespace.
        place: The rank, as HiCache is told it.
    """

    beside: str = BASE
    files: Change | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, object] = field(default_factory=dict)
    pool: Callable[[], Any] = lambda: mha_pool("page_first")
    pool_name: str = "kv"
    place: Mapping[str, object] = field(default_factory=dict)
    patches: Mapping[str, object] = field(default_factory=dict)


def config(**changes: object) -> Change:
    """Return a change of the model's configuration."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def file(name: str, content: str) -> Change:
    return lambda directory: (directory / name).write_text(content)


def flip_weights(directory: Path) -> None:
    (path,) = directory.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content), 64):
        content[at] ^= 1
    path.write_bytes(content)


def without_weights(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        path.unlink()


def in_effect(section: str, **values: object) -> dict[str, dict[str, object]]:
    return {section: values}


def write_scales(_: Path) -> None:
    (DIRECTORY / "scales.json").write_text('{"scale": 1.0}')


def rewrite_scales(_: Path) -> None:
    (DIRECTORY / "scales.json").write_text('{"scale": 2.0}')


def write_pack(_: Path) -> None:
    (DIRECTORY / "pack").write_bytes(bytes(100))


def rewrite_pack(_: Path) -> None:
    (DIRECTORY / "pack").write_bytes(bytes([1] * 100))


SCALES = in_effect("model", quantization_param_path=str(DIRECTORY / "scales.json"))
PUSHED = in_effect("model", checkpoint_engine_wait_weights_before_ready=True)

COUNTS: dict[str, Engine] = {
    "model": Engine(said={"model": "another"}),
    "rope theta": Engine(files=config(rope_parameters={"rope_type": "default", "rope_theta": 12345.0})),
    "rope scaling": Engine(files=config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})),
    "model override": Engine(arguments={"json_model_override_args": '{"rms_norm_eps": 0.5}'}),
    "sliding window": Engine(files=config(sliding_window=128)),
    "longrope": Engine(files=config(rope_parameters=LONGROPE)),
    "context length with longrope": Engine(
        "longrope", files=config(rope_parameters=LONGROPE), arguments={"context_length": 4096}
    ),
    "remote code": Engine(arguments={"trust_remote_code": True}),
    "context length with remote code": Engine(
        "remote code", arguments={"trust_remote_code": True, "context_length": 4096}
    ),
    "model implementation": Engine(settings=in_effect("model", model_impl="transformers")),
    "quantization": Engine(settings=in_effect("model", quantization="w8a8_int8")),
    "another package of models": Engine(variables={"SGLANG_EXTERNAL_MODEL_PACKAGE": "models"}),
    "hooks": Engine(settings=in_effect("observability", forward_hooks=[{"hook_factory": "steering:hook"}])),
    "quantized backend": Engine(settings=in_effect("exec.kernel", fp8_gemm_runner_backend="triton")),
    "experts": Engine(settings=in_effect("exec.moe", moe_runner_backend="triton")),
    "DeepGEMM": Engine(variables={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}),
    "simulated experts": Engine(variables={"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}),
    "variable of a later release": Engine(variables={"SGLANG_OF_A_LATER_RELEASE": "1"}),
    "variables of libraries": Engine(variables={"NVIDIA_TF32_OVERRIDE": "0"}),
    "experts in a file": Engine(variables={"SGLANG_EXPERT_PACK_PATH": str(DIRECTORY / "pack")}, files=write_pack),
    "other experts in the same file": Engine(
        "experts in a file", variables={"SGLANG_EXPERT_PACK_PATH": str(DIRECTORY / "pack")}, files=rewrite_pack
    ),
    "variables of quantization": Engine(variables={"SGLANG_INT4_WEIGHT": "1"}),
    "model dtype": Engine(arguments={"dtype": "bfloat16"}),
    "kv cache dtype": Engine(settings=in_effect("model", kv_cache_dtype="fp8_e5m2")),
    "scales of the kv cache": Engine(files=write_scales, settings=SCALES),
    "other scales in the same file": Engine("scales of the kv cache", files=rewrite_scales, settings=SCALES),
    "weights of experts on the CPU": Engine(settings=in_effect("exec.moe", kt_weight_path="/experts")),
    "state of a quantizer": Engine(settings=in_effect("model", modelopt_checkpoint_restore_path="/state.pt")),
    "weights replaced": Engine(files=flip_weights),
    "scales in a file": Engine(files=file("quantization.json", "{}")),
    "code beside the weights": Engine(files=file("modeling.py", "")),
    "load format": Engine(settings=in_effect("model", load_format="pt")),
    "dummy weights": Engine(arguments={"load_format": "dummy"}),
    "dummy weights, another seed": Engine("dummy weights", arguments={"load_format": "dummy", "random_seed": 1}),
    "refused: weights without a file": Engine(files=without_weights),
    "weights without a file, said": Engine(files=without_weights, said={"revision": "1"}),
    "refused: weights from elsewhere": Engine(settings=in_effect("model", load_format="remote")),
    "refused: weights that come later": Engine(settings=PUSHED),
    "refused: weights that come later, dummy until then": Engine(arguments={"load_format": "dummy"}, settings=PUSHED),
    "version of the weights": Engine(settings=in_effect("serving", weight_version="2")),
    "revision said": Engine(said={"revision": "1"}),
    "tenant": Engine(said={"tenant": "another"}),
    "extra": Engine(said={"extra": {"name": "value"}}),
    "refused: a name that is taken": Engine(said={"extra": {"weights": "value"}}),
    "refused: adapters": Engine(settings=in_effect("lora", enable_lora=True)),
    "adapters": Engine(settings=in_effect("lora", enable_lora=True), said={"extra": {"adapters": "1"}}),
    "layers": Engine(pool=lambda: mha_pool("page_first", layers=2)),
    "heads": Engine(pool=lambda: mha_pool("page_first", heads=1, width=128)),
    "layout": Engine(pool=lambda: mha_pool("page_first_direct")),
    "layer-first": Engine(pool=lambda: mha_pool("layer_first")),
    "latent attention": Engine(pool=lambda: mla_pool("page_first")),
    "states": Engine(pool=lambda: mamba_pool("page_first"), pool_name="mamba"),
    "draft pool": Engine(pool_name="draft"),
    "attention backend": Engine(settings=in_effect("exec.kernel", attention_backend="triton")),
    "variables of attention": Engine(variables={"SGLANG_AITER_KV_CACHE_LAYOUT": "hnd"}),
    "mamba types": Engine(settings=in_effect("exec.mamba", mamba_ssm_dtype="bfloat16")),
    "order of heads and tokens": Engine(variables={"SGLANG_USE_HND_KVCACHE": "1"}),
    "sparse attention": Engine(settings=in_effect("memory", enable_hisparse=True)),
    "approximate attention": Engine(variables={"SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR": "8"}),
    "kernel libraries": Engine(patches={"computing_packages": lambda *_: "sgl-kernel 99"}),
    "platform": Engine(patches={"_platform": lambda: "cuda 9.0"}),
    "instruction set": Engine(patches={"instruction_sets": lambda: "x86_64 other"}),
    "sglang version": Engine(patches={"sglang": SimpleNamespace(__version__="0.5.24")}),
    "tensor parallel": Engine(place={"tp_size": 2}),
    "tensor parallel rank": Engine("tensor parallel", place={"tp_size": 2, "tp_rank": 1}),
    "pipeline stages": Engine(place={"pp_size": 2}),
    "pipeline stage": Engine("pipeline stages", place={"pp_size": 2, "pp_rank": 1}),
    "context parallel": Engine(place={"attn_cp_size": 2}),
    "context parallel rank": Engine("context parallel", place={"attn_cp_size": 2, "attn_cp_rank": 1}),
    "context parallel strategy": Engine(patches={"_PARALLEL_VALUE": "zigzag"}),
    "states with latent attention": Engine(
        "states", pool=lambda: mamba_pool("page_first"), pool_name="mamba", place={"is_mla_model": True, "tp_size": 2}
    ),
    "speculation": Engine(settings=in_effect("spec", speculative_algorithm="EAGLE")),
    "draft model": Engine(
        "speculation",
        settings=in_effect("spec", speculative_algorithm="EAGLE", speculative_draft_model_path=str(MODEL)),
        patches={"model_path": lambda: "the target"},
    ),
    "revision of a draft model beside the target": Engine(
        "speculation",
        settings=in_effect(
            "spec",
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(MODEL),
            speculative_draft_model_revision="another",
        ),
    ),
    "multimodal processing": Engine(settings=in_effect("mm", disable_fast_image_processor=True)),
}

SAME: dict[str, Engine] = {
    "memory": Engine(arguments={"mem_fraction_static": 0.3}),
    "scheduling": Engine(arguments={"chunked_prefill_size": 512, "max_running_requests": 3}),
    "context length": Engine(arguments={"context_length": 4096}),
    "served name": Engine(arguments={"served_model_name": "a name"}),
    "port": Engine(arguments={"port": 31234}),
    "ranks and addresses": Engine(
        variables={"SGLANG_HOST_IP": "10.0.0.7", "SGLANG_PORT": "7000", "SGLANG_DP_RANK": "1", "SGLANG_RUN_ID": "r"}
    ),
    "Kubernetes": Engine(variables={"SGLANG_SERVICE_HOST": "10.0.0.7", "SGLANG_PORT_30000_TCP_ADDR": "10.0.0.7"}),
    "caches": Engine(variables={"SGLANG_CACHE_DIR": "/c", "TRITON_CACHE_DIR": "/c"}),
    "logging": Engine(arguments={"log_level": "error"}),
    "graphs": Engine(settings=in_effect("exec.graph", disable_cuda_graph=False, enable_torch_compile=True)),
    "sampling": Engine(settings=in_effect("exec.kernel", sampling_backend="flashinfer")),
    "host memory": Engine(arguments={"hicache_ratio": 3.0}),
    "a copy of the files": Engine("a name", files=lambda _: None, said={"model": "a name"}),
    "a name": Engine("a copy of the files", said={"model": "a name"}),
    "ngram": Engine(settings=in_effect("spec", speculative_algorithm="NGRAM")),
    "replicas": Engine(place={"dp_rank": 1}),
    "latent attention, two ranks": Engine(
        "latent attention",
        pool=lambda: mla_pool("page_first"),
        place={"is_mla_model": True, "tp_size": 2, "tp_rank": 1},
    ),
}


def describe(name: str, engine: Engine) -> dict[str, str]:
    model = MODEL
    if engine.files is not None:
        model = DIRECTORY / name.replace(" ", "-") / "model"
        shutil.copytree(MODEL, model)
        engine.files(model)
    said: dict[str, object] = {"extra": {}, **engine.said}
    if engine.files is not None and "model" not in said:
        said["model"] = str(MODEL)  # the path is another thing
    arguments = {"load_format": "auto", **engine.arguments}
    with ExitStack() as undo:
        undo.enter_context(mock.patch.dict(os.environ, engine.variables))
        publish_engine(model, **arguments)
        for path, values in engine.settings.items():
            top, *inner = path.split(".")
            bag = get_context().config_bag(top)
            for each in inner:
                bag = getattr(bag, each)
            undo.enter_context(bag.override(**values))
        for patched, value in engine.patches.items():
            if patched == "_PARALLEL_VALUE":
                undo.enter_context(get_parallel().override(cp_strategy=value))
            else:
                undo.enter_context(mock.patch.object(engine_module, patched, value))
        settings = read_settings(extra_config([{"type": "memory", "capacity": "1MiB"}], namespace=said), {}, {})
        try:
            facts = engine_module.engine_facts(settings.namespace)
            pool = PagePool(engine.pool_name, engine.pool())
            namespace = namespace_of(pool, storage_config({}, **engine.place), settings, facts)
        except ConfigError as error:
            return {"engine": name, "beside": engine.beside, "refusal": str(error)}
        identity = namespace.identify(block_bytes=pool.parts[0].part_bytes, block_tokens=64)
        return {"engine": name, "beside": engine.beside, "namespace": identity.digest.hex()}


def main() -> None:
    save_model(MODEL)
    for name, engine in {BASE: Engine(), **COUNTS, **SAME}.items():
        print(json.dumps(describe(name, engine)), flush=True)


if __name__ == "__main__":
    main()
