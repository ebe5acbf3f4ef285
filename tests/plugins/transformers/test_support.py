"""What the prefix cache for Transformers cannot keep right, it refuses; and the thread that stores prompts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.cache_names import cache_in
from tests.support.interrupt_cases import BLOCKS, CONTENT, WAIT_S, new_keys
from tests.support.interrupts import interrupts
from tests.support.stacks import stack_of
from tests.support.tiny_llama import llama_sizes
from tiered_kv.stack.buffers import Blocks
from tiered_kv.stack.open import open_stack

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
torch = pytest.importorskip("torch", reason="the extra 'transformers'")
transformers = pytest.importorskip("transformers", reason="the extra 'transformers'")

from tiered_kv_transformers.layout import CacheLayout, token_count  # noqa: E402
from tiered_kv_transformers.prefix_cache import PrefixCache  # noqa: E402
from tiered_kv_transformers.refusals import layout_of, states_of  # noqa: E402
from tiered_kv_transformers.saver import Saver  # noqa: E402

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    **llama_sizes(vocab=50, hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2),
    "max_position_embeddings": 64,
}


def model_of(name: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="module", autouse=True)
def llama(temporary_directory: Path) -> Any:
    """Also lets torch make the directory that it keeps, before the tests look for what they leave behind."""
    assert temporary_directory.exists()
    model = model_of("Llama")
    with torch.no_grad():
        model(torch.arange(4)[None])
    return model


@pytest.fixture
def layout(llama: Any) -> CacheLayout:
    return layout_of(llama, 4)


class TestModels:
    @pytest.mark.parametrize(
        ("name", "changes", "sizes"),
        [
            ("Llama", {}, (2, 2, 8)),
            ("Llama", {"num_key_value_heads": 4, "num_hidden_layers": 3}, (3, 4, 8)),
            ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, (2, 2, 8)),
            ("Qwen2", {}, (2, 2, 8)),
            ("Qwen3", {"head_dim": 16}, (2, 2, 16)),
            ("Mistral", {"sliding_window": None}, (2, 2, 8)),
            ("GPTNeoX", {"num_key_value_heads": None}, (2, 4, 8)),
            ("Falcon", {"num_key_value_heads": None, "multi_query": True}, (2, 1, 8)),
            ("Falcon", {"num_key_value_heads": None, "multi_query": False}, (2, 4, 8)),
            ("Falcon", {"num_key_value_heads": None, "new_decoder_architecture": True, "num_kv_heads": 2}, (2, 4, 8)),
        ],
    )
    def test_a_block_is_as_large_as_the_model_s_cache_says(
        self, name: str, changes: dict[str, Any], sizes: tuple[int, int, int]
    ) -> None:
        model = model_of(name, **changes)
        found = layout_of(model, 4)
        assert (found.layers, found.kv_heads, found.head_dim) == sizes
        with torch.no_grad():
            cache = cache_in(model, model(torch.arange(12)[None], use_cache=True))
        states = states_of(cache, found)
        assert token_count(states) == 12
        row_bytes = sum(part[:, :, :4].numel() * part.element_size() for pair in states for part in pair)
        assert found.gather(states, 0, 3).shape == (3, found.block_bytes) == (3, row_bytes)

    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            ("Mistral", {"sliding_window": 16}, "MistralForCausalLM: not all .*DynamicSlidingWindowLayer"),
            ("Gemma2", {"head_dim": 8, "sliding_window": 16}, "not all of its layers keep every token"),
            ("Gemma", {"head_dim": 8, "use_bidirectional_attention": True}, "not causal"),
            ("Mamba", {"state_size": 4}, "not all of its layers keep every token|a cache of another kind"),
        ],
    )
    def test_models_whose_keys_cannot_be_kept_by_token_are_refused(
        self, name: str, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            layout_of(model_of(name, **changes), 4)

    def test_a_hybrid_model_and_its_states_by_number_are_refused(self, layout: CacheLayout) -> None:
        if not hasattr(transformers, "Qwen3NextConfig"):
            pytest.skip("this version has no Qwen3-Next")
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        config = {**heads, **experts, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16, "head_dim": 8}
        model = model_of("Qwen3Next", layer_types=["linear_attention", "full_attention"], **config)
        with pytest.raises(ValueError, match=r"not all of its layers keep every token|a cache of another kind"):
            layout_of(model, 4)
        with torch.no_grad():
            cache = cache_in(model, model(torch.arange(12)[None], use_cache=True))
        with pytest.raises(TypeError, match=r"layer 0 of the cache is a |cannot be saved"):
            states_of(cache, layout)

    def test_an_encoder_and_decoder_is_refused(self) -> None:
        config = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
        with pytest.raises(ValueError, match="an encoder and a decoder"):
            layout_of(transformers.T5ForConditionalGeneration(config).eval(), 4)

    def test_images_are_refused_since_token_ids_do_not_name_them(self) -> None:
        text = {**SIZES, "model_type": "llama"}
        vision = {
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        }
        config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=1)
        with pytest.raises(ValueError, match="more than text"):
            layout_of(transformers.LlavaForConditionalGeneration(config).eval(), 4)

    @pytest.mark.parametrize("change", [{"num_key_value_heads": [2, 1]}, {"num_attention_heads": None}])
    def test_a_configuration_that_does_not_tell_the_heads_is_refused(self, change: dict[str, Any]) -> None:
        model = model_of("Llama")
        vars(model.config).update({"head_dim": 8, **change})
        if "num_attention_heads" in change:
            vars(model.config)["num_key_value_heads"] = None
        with pytest.raises(ValueError, match="does not give one number and size"):
            layout_of(model, 4)

    def test_what_is_no_model_is_refused(self, llama: Any) -> None:
        for other in (torch.nn.Linear(2, 2), "meta-llama/Llama-3.1-8B", llama.model):
            with pytest.raises(TypeError, match="expected a causal language model of Transformers, found"):
                layout_of(other, 4)

    def test_an_unknown_data_type_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"this model's are torch\.float64"):
            layout_of(model_of("Llama").double(), 4)


class TestCaches:
    def filled(self, cache: Any, batch: int = 1, layers: int = 2, heads: int = 2, dtype: Any = None) -> Any:
        for layer in range(layers):
            part = torch.ones(batch, heads, 8, 8, dtype=dtype)
            cache.update(part, part, layer)
        return cache

    def test_only_a_dynamic_cache_can_be_saved(self, llama: Any, layout: CacheLayout) -> None:
        dynamic = transformers.DynamicCache
        sliding, offloaded = model_of("Mistral", sliding_window=16).config, dynamic()
        offloaded.offloading = True
        for cache, message in [
            (transformers.StaticCache(config=llama.config, max_cache_len=16), "a StaticCache cannot be saved"),
            (transformers.EncoderDecoderCache(dynamic(), dynamic()), "an? EncoderDecoderCache cannot be saved"),
            (((torch.zeros(1),),), "a tuple cannot be saved"),
            (None, "a NoneType cannot be saved"),
            (dynamic(config=sliding), "layer 0 of the cache is a DynamicSlidingWindowLayer"),
            (offloaded, "moves its layers to the CPU"),
            (type("QuantizedCache", (dynamic,), {})(), "a QuantizedCache cannot be saved"),
        ]:
            with pytest.raises(TypeError, match=message):
                states_of(cache, layout)

    def test_a_cache_of_several_sequences_is_refused(self, layout: CacheLayout) -> None:
        with pytest.raises(ValueError, match=r"one sequence can be saved at a time; .* \(3, 2, 8, 8\)"):
            states_of(self.filled(transformers.DynamicCache(), batch=3), layout)

    @pytest.mark.parametrize(
        ("made", "message"),
        [
            ({"layers": 1}, "keys of 1 layers or fewer, and the model has 2"),
            ({"layers": 3}, "keys of 3 layers"),
            ({"heads": 1}, r"expected 2 heads of 8 elements of torch\.float32, found 1 heads"),
            ({"dtype": torch.bfloat16}, r"found 2 heads of 8 elements of torch\.bfloat16"),
        ],
    )
    def test_a_cache_of_another_model_is_refused(self, layout: CacheLayout, made: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            states_of(self.filled(transformers.DynamicCache(), **made), layout)

    def test_zeroes_in_place_of_keys_are_refused(self, layout: CacheLayout) -> None:
        cache = self.filled(transformers.DynamicCache())
        for layer in cache.layers:  # what `reset` does in Transformers 4
            layer.keys.zero_()
            layer.values.zero_()
        self.filled(cache)  # the model goes on with it
        with pytest.raises(ValueError, match="it was reset"):
            states_of(cache, layout)


class TestPrompts:
    @pytest.mark.parametrize(
        ("input_ids", "error", "message"),
        [
            ([1, 2, 3], TypeError, "must be a tensor of token ids, not list"),
            (torch.zeros(1, 9), TypeError, r"must be integers, not torch\.float32"),
            (torch.zeros(1, 9, dtype=torch.bool), TypeError, r"must be integers, not torch\.bool"),
            (torch.zeros(2, 9, dtype=torch.long), ValueError, r"found \(2, 9\); a batch of several prompts"),
            (torch.zeros(1, 1, 9, dtype=torch.long), ValueError, "must be of shape"),
            (torch.tensor(3), ValueError, "must be of shape"),
        ],
    )
    def test_what_is_not_one_prompt_is_refused(
        self, llama: Any, input_ids: Any, error: type[Exception], message: str
    ) -> None:
        with PrefixCache.open(llama, {"primary": {"capacity": "1MiB"}}) as prefixes:
            with pytest.raises(error, match=message):
                prefixes.restore(input_ids)
            with pytest.raises(error, match=message):
                prefixes.save(input_ids, transformers.DynamicCache())


# The thread that stores prompts: an interrupted call takes no room for good, and holds no lock.


def copied(blocks: int) -> Blocks:
    return CONTENT[:blocks].copy()


def test_an_interrupted_save_takes_no_room_for_good_and_holds_no_lock() -> None:
    lost: list[bool] = []
    with open_stack(stack_of(blocks=BLOCKS)) as stack, ThreadPoolExecutor(1) as other:
        saver = Saver(stack, BLOCKS, WAIT_S)

        def save(blocks: int) -> int:
            return saver.save(new_keys(blocks), copied, lambda: lost.append(True), stack.epoch)

        def check() -> None:
            assert saver.wait(WAIT_S)
            before = saver.counts()
            assert save(BLOCKS) == BLOCKS, "room is taken"
            assert saver.wait(WAIT_S)
            assert saver.counts() == (before[0] + BLOCKS, before[1], 0)

        count = 0
        for _ in interrupts(lambda: lambda: save(2), where_handlers_run=True):
            other.submit(check).result(2 * WAIT_S)
            count += 1
        other.submit(check).result(2 * WAIT_S)
        assert count >= 10
        assert lost
        saver.stop(WAIT_S)
