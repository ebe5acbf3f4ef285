"""A model whose keys depend on later tokens is refused by what it computes, whatever its settings are called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_llama import DEPENDENT_WEIGHTS, llama_sizes

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
torch = pytest.importorskip("torch", reason="the extra 'transformers'")
transformers = pytest.importorskip("transformers", reason="the extra 'transformers'")

from tiered_kv_transformers import PrefixCache  # noqa: E402 - after what it needs

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    **llama_sizes(vocab=60, hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2),
    "max_position_embeddings": 64,
}
OTHER_SIZES: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}


@pytest.fixture(scope="module", autouse=True)
def _first_run(temporary_directory: Path) -> None:
    """Let torch make the directory that it keeps, before the tests look for what they leave behind."""
    assert temporary_directory.exists()
    with torch.no_grad():
        llama()(torch.arange(4)[None])


def llama(model_class: Any = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "initializer_range": DEPENDENT_WEIGHTS, **changes})
    return (model_class or transformers.LlamaForCausalLM)(config).eval()


def model_of(config: str, model: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


def hrm_text(**changes: Any) -> Any:
    return model_of("HrmTextConfig", "HrmTextForCausalLM", **OTHER_SIZES, head_dim=8, **changes)


def opens(model: Any, **options: Any) -> None:
    PrefixCache.open(model, {"primary": {"capacity": "4MiB"}}, **options).close()


class Blockwise(transformers.LlamaForCausalLM):  # type: ignore[name-defined, misc]  # of an untyped module
    """Attends in both directions within blocks of `config.block` tokens; no setting of Transformers says so."""

    def forward(self, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        blocks = torch.arange(input_ids.shape[1]) // self.config.block
        hidden = torch.finfo(self.dtype).min * (blocks[None] > blocks[:, None])
        return super().forward(input_ids, attention_mask=hidden.to(self.dtype)[None, None], **options)


class Rounded(transformers.LlamaForCausalLM):  # type: ignore[name-defined, misc]
    """Multiplies what a token is embedded to by a factor that depends on the last token."""

    def forward(self, input_ids: Any, **options: Any) -> Any:
        factor = 1 + self.config.relative * torch.rand(
            SIZES["hidden_size"], generator=torch.Generator().manual_seed(int(input_ids[0, -1]))
        )
        return super().forward(inputs_embeds=self.model.embed_tokens(input_ids) * factor, **options)


class Failing(transformers.LlamaForCausalLM):  # type: ignore[name-defined, misc]
    def forward(self, input_ids: Any, **options: Any) -> Any:
        raise NotImplementedError("it needs an image\nand more")


class TestRefused:
    @pytest.mark.parametrize("block", [2, 4, 8, 32])
    def test_attention_in_both_directions_within_a_block(self, block: int) -> None:
        with pytest.raises(ValueError, match="Blockwise: its attention is not causal: keys of layer 1 depend on"):
            opens(llama(Blockwise, block=block))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_an_encoder_that_has_a_head_for_words(self, dtype: str) -> None:
        model = model_of("BertConfig", "BertLMHeadModel", **OTHER_SIZES, initializer_range=DEPENDENT_WEIGHTS)
        with pytest.raises(ValueError, match="BertLMHeadModel: its attention is not causal"):
            opens(model.to(getattr(torch, dtype)))

    def test_small_weights_hide_nothing(self) -> None:
        with pytest.raises(ValueError, match="not causal"):
            opens(model_of("ElectraConfig", "ElectraForCausalLM", **OTHER_SIZES))

    def test_a_prompt_that_token_types_mark(self) -> None:
        with pytest.raises(ValueError, match="with token_type_ids=1, as a tokenizer may give them, its attention is"):
            opens(hrm_text())

    def test_tokens_that_the_model_adds_to_a_prompt(self) -> None:
        sizes = {name: OTHER_SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        model = model_of("CpmAntConfig", "CpmAntForCausalLM", **sizes, num_attention_heads=4, dim_head=8, dim_ff=48)
        with pytest.raises(ValueError, match="after a prompt of 8 tokens its cache has 40"):
            opens(model)

    def test_a_model_that_generates_without_a_cache(self) -> None:
        for model in (
            llama(use_cache=False),
            model_of("MptConfig", "MptForCausalLM", d_model=32, n_heads=4, n_layers=2),
        ):
            with pytest.raises(ValueError, match=r"set model\.generation_config\.use_cache = True"):
                opens(model)
            model.generation_config.use_cache = True
            opens(model)

    def test_a_model_that_cannot_be_run(self) -> None:
        message = r"Failing: it fails on a prompt of 8 tokens, .* \(NotImplementedError: it needs an image\)$"
        with pytest.raises(ValueError, match=message):
            opens(llama(Failing))

    def test_a_model_without_weights(self) -> None:
        with torch.device("meta"):
            model = llama()
        with pytest.raises(ValueError, match=r"it has no weights \(device 'meta'\)"):
            opens(model, weights="full")

    def test_numbers_that_are_none(self) -> None:
        model = llama()
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="not causal"):
            opens(model)

    def test_a_configuration_that_raises(self) -> None:
        class Config(transformers.LlamaConfig):  # type: ignore[name-defined, misc]
            @property
            def use_bidirectional_attention(self) -> bool:
                raise LookupError("it differs by layer")

        model = llama()
        model.config.__class__ = Config
        with pytest.raises(ValueError, match=r"its configuration cannot be read \(LookupError: it differs by layer\)"):
            opens(model)

    def test_latent_attention_of_some_layers(self) -> None:
        config = transformers.Dots3NoteTextConfig(
            **{**SIZES, "num_key_value_heads": 4},
            moe_intermediate_size=16,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        )
        with torch.device("meta"):
            model = transformers.Dots3NoteForCausalLM(config).eval()
        with pytest.raises(ValueError, match="latent"):
            opens(model)


class TestServed:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        ("config", "model", "settings"),
        [
            ("BertConfig", "BertLMHeadModel", {"is_decoder": True}),
            ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
            ("MixtralConfig", "MixtralForCausalLM", {"sliding_window": None, "num_local_experts": 4}),
        ],
    )
    def test_causal_attention_with_token_types_and_experts(
        self, config: str, model: str, settings: dict[str, Any], dtype: str
    ) -> None:
        sizes = {"GPT2Config": {}, "BertConfig": OTHER_SIZES}.get(config, SIZES)
        opens(model_of(config, model, **{**sizes, "vocab_size": 60, **settings}).to(getattr(torch, dtype)))

    def test_a_prefix_model_without_prefixes(self) -> None:
        opens(hrm_text(prefix_lm=False))

    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_a_vocabulary_smaller_than_a_prompt(self, size: int) -> None:
        opens(llama(vocab_size=size, bos_token_id=0, eos_token_id=None))

    def test_a_difference_in_the_last_bits(self) -> None:
        opens(llama(Rounded, relative=1e-6))
        with pytest.raises(ValueError, match="not causal: keys of layer 0"):
            opens(llama(Rounded, relative=1e-2))


def test_the_model_is_as_before() -> None:
    """BigBird, which for good goes over to another attention at a prompt so short, is refused, and stays as it was."""
    model = model_of("BigBirdConfig", "BigBirdForCausalLM", **OTHER_SIZES, attention_type="block_sparse")
    calls: list[bool] = []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    modules = {name: type(module) for name, module in model.named_modules()}
    random = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="not causal"):
        opens(model)
    assert calls
    assert not any(calls), "nothing is kept for gradients"
    assert torch.is_grad_enabled()
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.bert.attention_type == "block_sparse"
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert not model.training
    assert all(each.grad is None for each in model.parameters())
