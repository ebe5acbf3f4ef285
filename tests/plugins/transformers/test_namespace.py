"""Models that differ in what shapes a block share nothing, and what does not shape it changes nothing.

The cases are those of `namespaces.toml`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
torch = pytest.importorskip("torch", reason="the extra 'transformers'")
transformers = pytest.importorskip("transformers", reason="the extra 'transformers'")

from tests.support.namespaces import FIRST, all_cases, cases  # noqa: E402 - after what it needs
from tests.support.tiny_llama import llama_sizes  # noqa: E402
from tiered_kv.errors import ConfigError  # noqa: E402
from tiered_kv_transformers import PrefixCache  # noqa: E402

pytestmark = pytest.mark.slow

SIZES = {
    **llama_sizes(vocab=32, hidden=32, intermediate=32, layers=2, heads=4, kv_heads=2),
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", autouse=True)
def _first_run(temporary_directory: Path) -> None:
    """Let torch make the directory that it keeps, before the tests look for what they leave behind."""
    assert temporary_directory.exists()
    digest(FIRST)


def llama(change: Callable[[Any], object] = lambda _: None, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).eval()
    change(model)
    return model


def one_weight(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1


def merged(model: Any) -> None:
    """What a low-rank adapter leaves when it has been merged."""
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


def of_another_class() -> Any:
    class Llama(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]  # of an extra
        pass

    torch.manual_seed(0)
    return Llama(transformers.LlamaConfig(**SIZES)).eval()


def set_entry(name: str, value: object) -> Callable[[Any], None]:
    return lambda model: setattr(model.config, name, value)


def rope(**entries: object) -> dict[str, Any]:
    """Return rotary embeddings as both generations of Transformers take them."""
    if int(transformers.__version__.partition(".")[0]) >= 5:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **entries}}
    theta = entries.pop("rope_theta", 10000.0)
    return {"rope_theta": theta, **({"rope_scaling": entries} if entries else {})}


def saved_and_loaded(**options: object) -> Any:
    transformers.utils.logging.disable_progress_bar()  # whose thread stays
    with TemporaryDirectory() as directory:
        llama().save_pretrained(directory)
        return transformers.LlamaForCausalLM.from_pretrained(directory, **options).eval()


def with_own_attention() -> Any:
    transformers.AttentionInterface.register("approximate", transformers.AttentionInterface()["sdpa"])
    return llama(attn_implementation="approximate")


MODELS: dict[str, Callable[[], Any]] = {
    "first, rope": lambda: llama(**rope()),
    "first, half": lambda: llama().half(),
    "first, half and named": lambda: llama().half(),
    "first, loaded in half": lambda: saved_and_loaded(dtype=torch.float16),
    "rope theta": lambda: llama(**rope(rope_theta=5e5)),
    "rope scaling": lambda: llama(**rope(rope_type="linear", factor=2.0)),
    "unknown entry": lambda: llama(set_entry("unheard_of", 1)),
    "quantization": lambda: llama(set_entry("quantization_config", {"bits": 4})),
    "class": of_another_class,
    "weights": lambda: llama(one_weight),
    "sampled weights": lambda: llama(merged),
    "merged adapter": lambda: llama(merged),
    "dtype": lambda: llama().bfloat16(),
    "cast once it was loaded": lambda: llama().half(),  # with the frequencies of its rotary embedding
    "dtype with a revision": lambda: llama().bfloat16(),
    "another attention": with_own_attention,
    "precision": llama,
    "refused: adapter": lambda: llama(lambda model: setattr(model, "peft_config", {"default": object()})),
    "refused: dynamic rope": lambda: llama(**rope(rope_type="dynamic", factor=2.0)),
    "refused: training": lambda: llama().train(),
    "saved and loaded": saved_and_loaded,
    "origin": lambda: llama(set_entry("_name_or_path", "/models/a")),
}
"""Models that data does not describe, by the name of a case in `namespaces.toml`."""
CASES = all_cases("transformers", MODELS)
COUNTS, SAME = cases("transformers", "counts"), cases("transformers", "same")
REFUSED = {name for name, case in COUNTS.items() if "refused" in case}


def digest(name: str) -> str:
    """Return the digest of the namespace that a case has."""
    case = CASES[name]
    entries: dict[str, Any] = dict(case.get("hf", {}))
    model = MODELS[name]() if name in MODELS else llama(**entries)
    stack: dict[str, Any] = {"primary": {"capacity": "1MiB"}, "namespace": dict(case.get("namespace", {}))}
    options: dict[str, Any] = {"block_tokens": 4, **case.get("options", {})}
    torch.set_float32_matmul_precision("high" if name == "precision" else "highest")
    try:
        with mock.patch.dict(os.environ, case.get("variables", {})), PrefixCache.open(model, stack, **options) as found:
            return found.stack.config.identity.digest.hex()
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", sorted(COUNTS.keys() - REFUSED))
def test_models_that_differ_in_it_share_nothing(name: str) -> None:
    assert digest(name) != digest(COUNTS[name].get("beside", FIRST))


@pytest.mark.parametrize("name", ["sampled weights", "revision", "dtype"])
def test_it_is_the_same_at_every_start(name: str) -> None:
    assert digest(name) == digest(name)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_told_apart_is_refused(name: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=re.escape(COUNTS[name]["refused"])):
        digest(name)


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_shape_a_block_changes_nothing(name: str) -> None:
    assert digest(name) == digest(FIRST)
