"""Runs in an environment with SGLang: the namespaces of engines that differ from one another in one thing.

    python sglang_namespace_program.py DIRECTORY

Prints a line of JSON for each case of `namespaces.toml`: its name, and its namespace or why it was refused.
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

from tests.plugins.sglang.sglang_engine_program import save_model
from tests.plugins.sglang.sglang_program_parts import (
    extra_config,
    mamba_pool,
    mha_pool,
    mla_pool,
    publish_engine,
    storage_config,
)
from tests.support.namespaces import Case, all_cases
from tiered_kv.errors import ConfigError
from tiered_kv_sglang import engine as engine_module
from tiered_kv_sglang.engine import namespace_of, read_settings
from tiered_kv_sglang.pools import PagePool

DIRECTORY = Path(sys.argv[1])
MODEL = DIRECTORY / "model"
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Engine:
    """What data does not say of an engine.

    Attributes:
        files: Changes a copy of the model's directory.
        settings: What is in effect by SGLang's own account, by the path of a section.
    """

    files: Change | None = None
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    pool: Callable[[], Any] = lambda: mha_pool("page_first")
    pool_name: str = "kv"
    patches: Mapping[str, object] = field(default_factory=dict)


def config(**changes: object) -> Change:
    """Return a change of the model's configuration."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def flip_weights(directory: Path) -> None:
    (path,) = directory.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content), 64):
        content[at] ^= 1
    path.write_bytes(content)


def without_weights(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        path.unlink()


def write_scales(_: Path) -> None:
    (DIRECTORY / "scales.json").write_text('{"scale": 1.0}')


def rewrite_scales(_: Path) -> None:
    (DIRECTORY / "scales.json").write_text('{"scale": 2.0}')


def write_pack(_: Path) -> None:
    (DIRECTORY / "pack").write_bytes(bytes(100))


def rewrite_pack(_: Path) -> None:
    (DIRECTORY / "pack").write_bytes(bytes([1] * 100))


SCALES = {"model": {"quantization_param_path": str(DIRECTORY / "scales.json")}}
PACK = {"SGLANG_EXPERT_PACK_PATH": str(DIRECTORY / "pack")}
DRAFT = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(MODEL)}
STATES = Engine(pool=lambda: mamba_pool("page_first"), pool_name="mamba")
LATENT = Engine(pool=lambda: mla_pool("page_first"))

BY_HAND: dict[str, Engine] = {
    "longrope": Engine(files=config(rope_parameters=LONGROPE)),
    "context length with longrope": Engine(files=config(rope_parameters=LONGROPE)),
    "experts in a file": Engine(variables=PACK, files=write_pack),
    "other experts in the same file": Engine(variables=PACK, files=rewrite_pack),
    "scales of the kv cache": Engine(files=write_scales, settings=SCALES),
    "other scales in the same file": Engine(files=rewrite_scales, settings=SCALES),
    "weights replaced": Engine(files=flip_weights),
    "refused: weights without a file": Engine(files=without_weights),
    "weights without a file, said": Engine(files=without_weights),
    "layers": Engine(pool=lambda: mha_pool("page_first", layers=2)),
    "heads": Engine(pool=lambda: mha_pool("page_first", heads=1, width=128)),
    "layout": Engine(pool=lambda: mha_pool("page_first_direct")),
    "layer-first": Engine(pool=lambda: mha_pool("layer_first")),
    "latent attention": LATENT,
    "latent attention, two ranks": LATENT,
    "states": STATES,
    "states with latent attention": STATES,
    "draft pool": Engine(pool_name="draft"),
    "kernel libraries": Engine(patches={"computing_packages": lambda *_: "sgl-kernel 99"}),
    "platform": Engine(patches={"_platform": lambda: "cuda 9.0"}),
    "instruction set": Engine(patches={"instruction_sets": lambda: "x86_64 other"}),
    "sglang version": Engine(patches={"sglang": SimpleNamespace(__version__="0.5.24")}),
    "context parallel strategy": Engine(patches={"_PARALLEL_VALUE": "zigzag"}),
    "draft model": Engine(settings={"spec": DRAFT}, patches={"model_path": lambda: "the target"}),
    "revision of a draft model beside the target": Engine(
        settings={"spec": {**DRAFT, "speculative_draft_model_revision": "another"}}
    ),
    "a copy of the files": Engine(files=lambda _: None),
}


def describe(name: str, case: Case, engine: Engine) -> dict[str, str]:
    model = MODEL
    said: dict[str, object] = {"extra": {}, **case.get("namespace", {})}
    if engine.files is not None or case.keys() & {"hf", "files"}:
        model = DIRECTORY / name.replace(" ", "-") / "model"
        shutil.copytree(MODEL, model)
        config(**case.get("hf", {}))(model)
        for file, content in case.get("files", {}).items():
            (model / file).write_text(content)
        if engine.files is not None:
            engine.files(model)
        said.setdefault("model", str(MODEL))  # the path is another thing
    arguments = {"load_format": "auto", **case.get("options", {})}
    with ExitStack() as undo:
        undo.enter_context(mock.patch.dict(os.environ, {**engine.variables, **case.get("variables", {})}))
        publish_engine(model, **arguments)
        for path, values in {**engine.settings, **case.get("settings", {})}.items():
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
            namespace = namespace_of(pool, storage_config({}, **case.get("place", {})), settings, facts)
        except ConfigError as error:
            return {"engine": name, "refusal": str(error)}
        identity = namespace.identify(block_bytes=pool.parts[0].part_bytes, block_tokens=64)
        return {"engine": name, "namespace": identity.digest.hex()}


def main() -> None:
    save_model(MODEL)
    for name, case in all_cases("sglang", BY_HAND).items():
        print(json.dumps(describe(name, case, BY_HAND.get(name, Engine()))), flush=True)


if __name__ == "__main__":
    main()
