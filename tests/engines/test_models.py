"""A model's configuration: the bytes of its layers, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.model_facts import FACTS, PAGE, with_table, write_model
from tiered_kv.config.stack_config import load_config
from tiered_kv.engines.model.architectures import read_model
from tiered_kv.engines.model.layers import Kind, KVModel, Layers
from tiered_kv.engines.model.sizing import Load, Machine, Plan, plan
from tiered_kv.engines.prefill_meter import TokenCost
from tiered_kv.errors import ConfigError
from tiered_kv_nvme.segment import segment_bytes_min
from tiered_kv_nvme.sizing import Sizing

LLAMA = FACTS["Llama 3.1 8B"]
MIB, GIB = 1 << 20, 1 << 30
KEY_BYTES = 36
NOT_FOR_BLOCKS = 3
"""Segments of nvme: one that is written, and two that are free."""


def model_of(tmp_path: Path, config: object, **options: Any) -> KVModel:  # Any: of `read_model`
    return read_model(write_model(tmp_path / "model", config), **options)


# Bytes.


@pytest.mark.parametrize(
    ("name", "token", "window", "state"),
    [
        ("Llama 2 7B", 2 * 32 * 32 * 128 * 2, 0, 0),
        ("Llama 3.1 8B", 2 * 32 * 8 * 128 * 2, 0, 0),
        ("Falcon 7B", 2 * 32 * 1 * 64 * 2, 0, 0),
        ("DeepSeek-V3", 61 * (512 + 64) * 2, 0, 0),
        ("Mistral 7B v0.1", 0, 2 * 32 * 8 * 128 * 2, 0),
        ("gpt-oss-120b", 2 * 18 * 8 * 64 * 2, 2 * 18 * 8 * 64 * 2, 0),
        ("Gemma 3 27B", 2 * 10 * 16 * 128 * 2, 2 * 52 * 16 * 128 * 2, 0),
        ("Llama 4 Scout 17B-16E", 2 * 12 * 8 * 128 * 2, 2 * 36 * 8 * 128 * 2, 0),
        ("Qwen3-Next 80B-A3B", 2 * 12 * 2 * 256 * 2, 0, 36 * (8192 * 3 + 4096 * 128) * 2),
        ("Jamba v0.1", 2 * 4 * 8 * 128 * 2, 0, 28 * 8192 * (3 + 16) * 2),
    ],
)
def test_a_token_has_the_bytes_of_its_layers(name: str, token: int, window: int, state: int, tmp_path: Path) -> None:
    model = model_of(tmp_path, FACTS[name])
    assert (model.token_bytes, model.window_token_bytes, model.state_bytes) == (token, window, state)


def test_the_page_has_the_table_that_the_command_makes() -> None:
    text = PAGE.read_text()
    assert text == with_table(text), "python -m tests.support.model_facts"
    assert len(FACTS) == 20


def test_ranks_divide_heads_or_copy_them_and_share_what_is_latent(tmp_path: Path) -> None:
    path = write_model(tmp_path / "llama", LLAMA)
    one, eight, sixteen = (read_model(path, ranks=ranks) for ranks in (1, 8, 16))
    assert one.token_bytes == eight.token_bytes == 8 * eight.rank_token_bytes
    assert sixteen.token_bytes == 2 * one.token_bytes
    assert sixteen.rank_token_bytes == eight.rank_token_bytes
    with pytest.raises(ConfigError, match="3 ranks cannot share 8 KV heads evenly"):
        read_model(path, ranks=3)
    latent = model_of(tmp_path, FACTS["DeepSeek-V3"], ranks=8)
    assert latent.token_bytes == latent.rank_token_bytes == 61 * 576 * 2


def test_a_type_of_keys_and_values_changes_them_and_no_state(tmp_path: Path) -> None:
    path = write_model(tmp_path / "hybrid", FACTS["Qwen3-Next 80B-A3B"])
    model, small = read_model(path), read_model(path, kv_dtype="fp8")
    assert (model.dtype, small.dtype) == ("bfloat16", "fp8")
    assert (small.token_bytes, small.state_bytes) == (model.token_bytes // 2, model.state_bytes)
    assert read_model(path, kv_dtype="float32").token_bytes == 2 * model.token_bytes


def test_weights_of_32_bits_are_loaded_in_16(tmp_path: Path) -> None:
    assert model_of(tmp_path, {**LLAMA, "dtype": "float32"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "tokens", "rows"),
    [
        ("Llama 3.1 8B", 100, 6),  # whole blocks only
        ("gpt-oss-120b", 4096, 256 + 9),  # and the last 127 tokens, which may begin within a block
        ("gpt-oss-120b", 64, 4 + 4),
        ("Gemma 3 27B", 4096, 256 + 6 * 65),  # 52 layers with windows are six groups of at most 10
        ("Qwen3-Next 80B-A3B", 5440, 10 + 3),  # blocks of 544 tokens, and a state in each of three groups
    ],
)
def test_a_prompt_takes_the_rows_of_its_groups(name: str, tokens: int, rows: int, tmp_path: Path) -> None:
    model = model_of(tmp_path, FACTS[name])
    assert model.prompt_rows(tokens, model.block_tokens(16)) == rows


def test_lists_of_layers_count_before_the_pattern_of_an_architecture(tmp_path: Path) -> None:
    kinds = ["mamba", "attention"] * 2
    settings = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4}
    config = {**LLAMA, "model_type": "granitemoehybrid", "num_hidden_layers": 4, "layer_types": kinds, **settings}
    model = model_of(tmp_path, {**config, "mamba_expand": 2})
    state = (8192 + 2 * 128) * 3 * 2 + 8192 * 128 * 2
    assert [(each.kind, each.number, each.state_bytes) for each in model.layers] == [
        (Kind.STATE, 2, state),
        (Kind.FULL, 2, 0),
    ]
    pattern = {**LLAMA, "model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*E"}
    sizes = {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    hybrid = read_model(write_model(tmp_path / "nemotron", {**pattern, **sizes}))
    assert [(each.kind, each.number) for each in hybrid.layers] == [(Kind.STATE, 1), (Kind.FULL, 1)]
    assert hybrid.state_bytes == (8192 + 2 * 8 * 128) * 3 * 2 + 8192 * 128 * 4  # its states have 32 bits


# Where it comes from.


def test_a_folder_its_file_and_a_copy_of_the_hub_are_the_same_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", LLAMA)
    assert read_model(folder) == read_model(folder / "config.json")
    snapshots = tmp_path / "models--meta-llama--Llama" / "snapshots"
    snapshots.mkdir(parents=True)
    write_model(snapshots / "0123abcd", LLAMA)
    assert read_model(snapshots / "0123abcd").name == "meta-llama/Llama"
    with pytest.raises(ConfigError, match=r"no config\.json; give .*snapshots/0123abcd"):
        read_model(snapshots.parent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llamma"}, "'llamma' is not known.*llama.*--layers"),
        ({"model_type": None}, "names no model_type; give the numbers: --layers"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers; give the numbers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers: expected a whole number from 1, found '32'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 100_000}, "at most 10,000 layers"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a whole number from 1"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of num_key_value_heads 5"),
        ({"num_key_value_heads": 64}, "is no multiple of num_key_value_heads 64"),
        ({"num_attention_heads": 24}, "hidden_size 4096 is no multiple of num_attention_heads 24"),
        ({"head_dim": -1}, "head_dim: expected a whole number"),
        ({"layer_types": ["full_attention"] * 3}, "num_hidden_layers is 32, and layer_types has 3 layers"),
        ({"layer_types": ["new_attention"] * 32}, "layers of 'new_attention' are not known"),
        ({"layer_types": ["mamba"] * 32}, "layers of 'mamba' are not known"),
        ({"layer_types": "full_attention"}, "layer_types: expected a list of texts"),
        ({"layer_types": ["sliding_attention"] * 32}, "has no sliding_window"),
        ({"dtype": "int3"}, "dtype: expected bfloat16, float16"),
        ({"model_type": "deepseek_v3"}, "has no kv_lora_rank"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern: expected a text"),
    ],
)
def test_numbers_that_are_missing_wrong_or_contradictory_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        model_of(tmp_path, {**LLAMA, **changes})
    assert "\n" not in str(refused.value)
    assert "config.json" in str(refused.value)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in (
        (tmp_path / "missing", "there is no such folder or file; give a model's folder"),
        (empty, "this folder has no config.json; give a folder that has one"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_model(path)
    for content, message in (
        (b"", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[]", "expected an object"),
        (b" " * ((8 << 20) + 1), "more than 8 MiB"),
    ):
        (empty / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_model(empty)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", LLAMA)


@given(
    name=st.sampled_from(
        ["num_hidden_layers", "num_key_value_heads", "head_dim", "hidden_size", "layer_types", "dtype", "text_config"]
    ),
    value=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner)),
)
def test_no_value_of_a_setting_is_another_error(name: str, value: object, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, name: value}))
    with suppress(ConfigError):
        assert read_model(folder).token_bytes > 0


# Plans.


@example(heads=8, layers=42, users=421, blocks=1, memory=None, disk_rate=None, hit_rate=0.0)
@example(heads=64, layers=127, users=3504, blocks=1, memory=None, disk_rate=None, hit_rate=0.0)
@given(
    heads=st.sampled_from([1, 8, 64]),
    layers=st.integers(1, 128),
    users=st.integers(1, 5000),
    blocks=st.integers(1, 8000),
    memory=st.none() | st.integers(64 * MIB, 2000 * GIB),
    disk_rate=st.none() | st.integers(10**8, 10**11),
    hit_rate=st.floats(0, 1),
)
def test_a_plan_can_be_read_and_its_disk_holds_every_prompt(
    heads: int,
    layers: int,
    users: int,
    blocks: int,
    memory: int | None,
    disk_rate: int | None,
    hit_rate: float,
) -> None:
    model = KVModel("m", (Layers(Kind.FULL, layers, heads, 256),), "bfloat16")
    found = plan(model, 16, Load(users, 16 * blocks, 60.0, hit_rate), Machine(memory, None, disk_rate))
    whole = {"namespace": {"model": "m"}, "block": {"bytes": found.block_bytes, "tokens": 16}}
    if memory is not None and memory < 2 * found.block_bytes:
        return  # `tiered-kv size` says that so little memory holds no two blocks
    config = load_config({**found.stack, **whole})
    assert config.primary.capacity == found.memory.capacity_bytes
    if found.disk is None:
        assert found.memory.prompts >= users
        return
    assert found.disk.prompts >= users
    sizing = Sizing.of(found.disk.capacity_bytes, found.block_bytes)
    assert (sizing.segments_wanted - NOT_FOR_BLOCKS) * blocks_in(sizing, found) * found.block_bytes >= found.all_bytes


def blocks_in(sizing: Sizing, found: Plan) -> int:
    """Return how many blocks a segment holds at least: each alone in its batch, with a page for its header."""
    page = 4096
    count = sizing.segment_bytes // (found.block_bytes + page)
    while segment_bytes_min(found.block_bytes + page, KEY_BYTES, count) > sizing.segment_bytes:
        count -= 1
    return count


def test_at_the_break_even_a_load_takes_as_long_as_computing() -> None:
    model = KVModel("m", (Layers(Kind.FULL, 32, 8, 256),), "bfloat16")
    cost = TokenCost(40e-6, 1e-9)
    rates = plan(model, 16, Load(100, 32768, 300.0, 0.75), Machine(cost=cost)).rates
    assert rates.break_even_bytes_per_s is not None
    compute_s = 32768 * (40e-6 + 1e-9 * 32768 / 2)
    assert 4 * GIB / rates.break_even_bytes_per_s == pytest.approx(compute_s)
    assert rates.prefill_tokens_per_s == pytest.approx(32768 / compute_s)
    assert rates.engine_share == pytest.approx(100 / 300 * compute_s)
    rest_s = 8192 * (40e-6 + 1e-9 * (24576 + 8192 / 2))  # the last tokens cost most
    assert rates.engine_share_with_hits == pytest.approx(100 / 300 * rest_s)


def test_what_does_not_suffice_is_named() -> None:
    model = KVModel("m", (Layers(Kind.FULL, 32, 8, 256),), "bfloat16")
    load = Load(200, 32768, 300.0, 0.9)
    enough = Machine(64 * GIB, 2000 * GIB, 5 * 10**9, TokenCost(1 / 20_000, 0.0))
    assert plan(model, 16, load, enough).problems == ()
    poor = Machine(6 * GIB, 100 * GIB, 10**9, TokenCost(1 / 1000, 0.0))
    found = " / ".join(plan(model, 16, load, poor).problems)
    for each in ("memory is too small", "hold 22 prompts", "too slow for so many users", "the engine is too slow"):
        assert each in found
    assert "break-even" not in found, "an engine so slow is slower than the disk"
    slow = Machine(64 * GIB, None, 10**9, TokenCost(1 / 20_000, 0.0))
    assert "the break-even is 2.62 GB/s" in plan(model, 16, load, slow).problems[0]
