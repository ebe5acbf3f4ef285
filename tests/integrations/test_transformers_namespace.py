"""Models that differ in what shapes a block share nothing, and what does not shape it changes nothing.

The rows are those of the table in docs/how-to/transformers.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
torch = pytest.importorskip("torch", reason="the extra 'transformers'")
transformers = pytest.importorskip("transformers", reason="the extra 'transformers'")

from tiered_kv.errors import ConfigError  # noqa: E402 - after what it needs
from tiered_kv.integrations.transformers import PrefixCache  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "transformers.md"
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NAMED: dict[str, Any] = {"model": "m", "revision": "1"}


@pytest.fixture(scope="module", autouse=True)
def _first_run(temporary_directory: Path) -> None:
    """Let torch make the directory that it keeps, before the tests look for what they leave behind."""
    assert temporary_directory.exists()
    digest(llama())


def llama(change: Callable[[Any], object] = lambda _: None, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).eval()
    change(model)
    return model


def digest(model: Any, *, namespace: dict[str, Any] | None = None, block_tokens: int = 4, weights: Any = "full") -> str:
    stack: dict[str, Any] = {"primary": {"capacity": "1MiB"}, **({"namespace": namespace} if namespace else {})}
    with PrefixCache.open(model, stack, block_tokens=block_tokens, weights=weights) as prefixes:
        return prefixes.stack.config.identity.digest.hex()


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


def saved_and_loaded(directory: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()  # whose thread stays
    llama().save_pretrained(directory)
    return transformers.LlamaForCausalLM.from_pretrained(directory).eval()


def with_own_attention() -> Any:
    transformers.AttentionInterface.register("approximate", transformers.AttentionInterface()["sdpa"])
    return llama(attn_implementation="approximate")


def in_tensor_float_32(model: Any) -> str:
    torch.set_float32_matmul_precision("high")
    try:
        return digest(model)
    finally:
        torch.set_float32_matmul_precision("highest")


def with_variable(model: Any, **variables: str) -> str:
    with mock.patch.dict(os.environ, variables):
        return digest(model)


DIFFER: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "configuration": (lambda: digest(llama()), lambda: digest(llama(rms_norm_eps=1e-4))),
    "rope theta": (lambda: digest(llama(**rope())), lambda: digest(llama(**rope(rope_theta=5e5)))),
    "rope scaling": (lambda: digest(llama(**rope())), lambda: digest(llama(**rope(rope_type="linear", factor=2.0)))),
    "unknown entry": (lambda: digest(llama()), lambda: digest(llama(set_entry("unheard_of", 1)))),
    "quantization": (lambda: digest(llama()), lambda: digest(llama(set_entry("quantization_config", {"bits": 4})))),
    "class": (lambda: digest(llama()), lambda: digest(of_another_class())),
    "weights": (lambda: digest(llama()), lambda: digest(llama(one_weight))),
    "sampled weights": (lambda: digest(llama(), weights="sampled"), lambda: digest(llama(merged), weights="sampled")),
    "merged adapter": (lambda: digest(llama()), lambda: digest(llama(merged))),
    "revision": (
        lambda: digest(llama(), weights="revision", namespace=NAMED),
        lambda: digest(llama(), weights="revision", namespace={**NAMED, "revision": "2"}),
    ),
    "dtype": (lambda: digest(llama().half()), lambda: digest(llama().bfloat16())),
    "dtype with a revision": (
        lambda: digest(llama().half(), weights="revision", namespace=NAMED),
        lambda: digest(llama().bfloat16(), weights="revision", namespace=NAMED),
    ),
    "block tokens": (lambda: digest(llama()), lambda: digest(llama(), block_tokens=8)),
    "weights told otherwise": (lambda: digest(llama()), lambda: digest(llama(), weights="sampled")),
    "tenant": (lambda: digest(llama()), lambda: digest(llama(), namespace={"tenant": "b"})),
    "hash seed": (lambda: digest(llama()), lambda: digest(llama(), namespace={"hash_seed": "7"})),
    "extra": (lambda: digest(llama()), lambda: digest(llama(), namespace={"extra": {"run": "b"}})),
    "another attention": (lambda: digest(llama()), lambda: digest(with_own_attention())),
    "precision": (lambda: digest(llama()), lambda: in_tensor_float_32(llama())),
    "precision of libraries": (
        lambda: digest(llama()),
        lambda: with_variable(llama(), ONEDNN_DEFAULT_FPMATH_MODE="BF16"),
    ),
}
REFUSED: dict[str, tuple[type[Exception], Callable[[], str]]] = {
    "revision not said": (ConfigError, lambda: digest(llama(), weights="revision")),
    "adapter": (ValueError, lambda: digest(llama(lambda model: setattr(model, "peft_config", {"default": object()})))),
    "dynamic rope": (ValueError, lambda: digest(llama(**rope(rope_type="dynamic", factor=2.0)))),
    "training": (ValueError, lambda: digest(llama().train())),
}
SAME: dict[str, Callable[[Path], Any]] = {
    "attention": lambda _: llama(attn_implementation="eager"),
    "saved and loaded": saved_and_loaded,
    "origin": lambda _: llama(set_entry("_name_or_path", "/models/a")),
    "cache settings": lambda _: llama(use_cache=False),
}


def names_in_the_page() -> set[str]:
    (text,) = re.findall(r"^### What shapes the bytes\n(.*?)^What the integration", PAGE.read_text(), re.S | re.M)
    cells = [row.split("|")[-2] for row in text.splitlines() if row.startswith("| ")][2:]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} | set(re.findall("`(same: .*?)`", text))


@pytest.mark.parametrize("name", DIFFER)
def test_models_that_differ_in_it_share_nothing(name: str) -> None:
    one, other = DIFFER[name]
    assert one() != other()


@pytest.mark.parametrize("name", ["sampled weights", "revision", "dtype"])
def test_it_is_the_same_at_every_start(name: str) -> None:
    one, _ = DIFFER[name]
    assert one() == one()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_apart_is_refused(name: str) -> None:
    error, attempt = REFUSED[name]
    with pytest.raises(error):
        attempt()


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_shape_a_block_changes_nothing(name: str, tmp_path: Path) -> None:
    other = SAME[name](tmp_path / "model")
    assert digest(llama()) == digest(other)


def test_every_row_of_the_page_has_its_test() -> None:
    tested = {*DIFFER, *(f"refused: {name}" for name in REFUSED), *(f"same: {name}" for name in SAME)}
    assert names_in_the_page() == tested
