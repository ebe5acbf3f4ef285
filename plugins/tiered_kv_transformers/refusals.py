"""The refusals of models and caches: which of them have a layout, and why all others are refused.

`PrefixCache` calls it, on the program's threads. A block is restored for any prompt that begins with the block's
tokens. So this must stay true of every model and cache that is not refused: a token's keys and values depend only on
the tokens up to it, and the cache keeps the keys and values of every token, unchanged. `causality.py` measures the
first condition, where a configuration does not show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered_kv.engines.facts import rope_types
from tiered_kv.engines.model.architectures import head_shape
from tiered_kv_transformers.layout import CacheLayout, States

if TYPE_CHECKING:
    import torch

_DTYPES = ("bfloat16", "float16", "float32")

_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Rotary embeddings whose angles depend on a token's position alone. The angles of "dynamic" and "longrope" change with
the length of the whole prompt, and so do the keys of its first tokens."""


def layout_of(model: Any, block_tokens: int) -> CacheLayout:  # Any: a PreTrainedModel
    """Return the layout of a model's blocks, from its configuration, or raise TypeError or ValueError."""
    from transformers import PreTrainedModel

    if getattr(model, "peft_config", None):
        raise refusal(model, "its adapter can be switched without a trace in its weights; merge it (merge_and_unload)")
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise TypeError(f"expected a causal language model of Transformers, found {type(model).__name__}")
    try:
        reason = next(_refusals(model), "")
        if not reason:
            kv_heads, head_dim = _head_shape(model.config) or (0, 0)
            return CacheLayout(model.config.num_hidden_layers, kv_heads, head_dim, block_tokens, model.dtype)
    except Exception as error:  # a configuration raises it for attributes that differ by layer, or are missing
        raise refusal(model, "its configuration cannot be read", error) from error
    raise refusal(model, reason)


def refusal(model: Any, reason: str, error: Exception | None = None) -> ValueError:
    """Return the error that says why a model is not served, with the first line of another error."""
    if error is not None:
        first = next(iter(str(error).strip().splitlines()), "")
        reason += f" ({type(error).__name__}: {first})" if first else f" ({type(error).__name__})"
    return ValueError(f"a prefix cache cannot serve this {type(model).__name__}: {reason}")


def states_of(cache: Any, layout: CacheLayout) -> States:  # Any: the caller's argument
    """Return the tensors of a cache as they are at this moment, or raise TypeError or ValueError.

    A `DynamicCache` replaces its tensors when it grows, and changes none. So the returned tensors do not change while
    a model goes on, in this thread or another.
    """
    _check_kind(cache)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    if all(keys is None or keys.numel() == 0 for keys, _ in pairs):
        return []
    if len(pairs) != layout.layers or any(keys is None for keys, _ in pairs):
        raise ValueError(
            f"the cache has keys of {len(pairs)} layers or fewer, and the model has {layout.layers} layers"
        )
    for pair in pairs:
        for tensor in pair:
            _check_states(tensor, layout)
    if not pairs[0][0][:, :, : layout.block_tokens].any():
        raise ValueError(
            "the first tokens of the cache have zeroes for keys: it was reset (Transformers 4 keeps its length), "
            "or they are padding; give each prompt a new cache"
        )
    return pairs


def _refusals(model: Any) -> Iterator[str]:
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    config = model.config
    if config.is_encoder_decoder:
        yield "it is an encoder and a decoder, and a decoder's keys depend on what was encoded"
    if config.get_text_config(decoder=True) is not config:
        yield "it takes more than text, and token ids do not identify an image or a sound"
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", True) is False:
        yield "its attention is not causal, so a token's keys depend on the tokens after it"
    if model.training:
        yield "it is in training mode; call model.eval()"
    if not _generates_with_cache(model):
        yield (
            "`generate` would compute the whole prompt behind a restored cache, since it uses none: set "
            "model.generation_config.use_cache = True"
        )
    if len({each.device for each in model.parameters()} - {torch.device("meta")}) > 1:  # "meta": moved when it is used
        yield "it is spread over several devices, and a cache is restored on one"
    unknown = rope_types(config.to_dict()) - _FIXED_ROPE_TYPES
    if unknown:
        names = ", ".join(sorted(unknown))
        yield f"with rotary embeddings of type {names} a token's keys may depend on the prompt's length"
    if any(getattr(layer, "kv_lora_rank", None) is not None for layer in _layer_configs(config)):
        yield "its keys and values are latent and differ in shape (multi-head latent attention)"
    layers = DynamicCache(config=config).layers
    kinds = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if kinds:
        names = ", ".join(kinds)
        yield f"not all of its layers keep every token ({names}): sliding windows, recurrent or shared states"
    elif not _has_default_cache(model):
        yield "it keeps a cache of another kind: recurrent states, most likely"
    elif _head_shape(config) is None:
        yield "its configuration does not give one number and size of key and value heads for all layers"
    elif str(model.dtype).removeprefix("torch.") not in _DTYPES:
        yield f"keys and values must be of one of {', '.join(_DTYPES)}; this model's are {model.dtype}"


def _generates_with_cache(model: Any) -> bool:
    of_generation = getattr(getattr(model, "generation_config", None), "use_cache", None)
    return bool(getattr(model.config, "use_cache", True) if of_generation is None else of_generation)


def _has_default_cache(model: Any) -> bool:
    # `generate` calls this method before it makes a DynamicCache. In Transformers 4, only this method shows that a
    # model is recurrent.
    ask = getattr(model, "_supports_default_dynamic_cache", None)
    return ask is None or bool(ask())


def _head_shape(config: Any) -> tuple[int, int] | None:
    """Return the number and size of a layer's key and value heads; None if layers differ."""
    # Falcon's new architecture caches the keys of a group for each of its heads, and has no `num_key_value_heads`.
    shapes = [head_shape(partial(_setting, layer)) for layer in _layer_configs(config)]
    kv_heads, head_dim = shapes[0]
    if any(shape != shapes[0] for shape in shapes) or not (isinstance(kv_heads, int) and isinstance(head_dim, int)):
        return None
    return kv_heads, head_dim


def _layer_configs(config: Any) -> Sequence[Any]:
    """Return a configuration for each layer, if attributes differ by layer; else the model's configuration."""
    return getattr(config, "per_layer_config", None) or [config]


def _setting(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _check_kind(cache: Any) -> None:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if type(cache) is not DynamicCache:
        raise TypeError(
            f"a {type(cache).__name__} cannot be saved: only a DynamicCache keeps keys and values as they were computed"
        )
    if getattr(cache, "offloading", False):
        raise TypeError("a DynamicCache that moves its layers to the CPU cannot be saved: they may be on their way")
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise TypeError(f"layer {number} of the cache is a {type(layer).__name__}, which does not keep every token")


def _check_states(tensor: torch.Tensor, layout: CacheLayout) -> None:
    if tensor.dim() != 4 or tensor.shape[0] != 1:
        raise ValueError(f"one sequence can be saved at a time; the cache's tensors are of shape {tuple(tensor.shape)}")
    found = (tensor.shape[1], tensor.shape[3], tensor.dtype)
    wanted = (layout.kv_heads, layout.head_dim, layout.dtype)
    if found != wanted:
        raise ValueError(
            "the cache is not of this model: expected {} heads of {} elements of {}, ".format(*wanted)
            + "found {} heads of {} elements of {}".format(*found)
        )
