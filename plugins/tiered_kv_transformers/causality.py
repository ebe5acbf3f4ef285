"""Measures whether a model's keys and values depend on later tokens. Such a model is refused.

`PrefixCache.open` calls it, on the caller's thread. The model's configuration does not say it: each architecture has a
setting of its own, and some have none. So the model runs on two short prompts that differ in their last token. The keys
and values of all tokens before must be the same. Afterwards the model must be as before: the attributes of its modules
and of its configuration, and the state of random numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tiered_kv_transformers.layout import CacheLayout, States, token_count
from tiered_kv_transformers.refusals import refusal, states_of

if TYPE_CHECKING:
    import torch

TOKENS: Final = 8
"""Tokens of a prompt. The last one also ends a block, for models that attend in both directions within small blocks."""
_PAIRS: Final = 2
"""Pairs of prompts that must all differ to refuse a model. Rounding may change the expert in one pair, hardly in
all."""

_TOLERANCES: Final = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.02}
"""The largest difference of a token's keys or values, relative to their norm, that counts as rounding. Most kernels
give equal bits for prompts of one shape. Kernels of experts may not: the last token changes which rows they compute
together. Such errors begin in the type's last bit, and grow with the layers."""
_QUANTIZED_TOLERANCE: Final = 0.1
"""The tolerance for models with quantized weights: some scale the activations by the largest value of all tokens."""

_TOKEN_TYPES: Final = ("token_type_ids", "mm_token_type_ids", "segment_ids")
"""Arguments that tokenizers give, by which some models let a prompt's tokens attend in both directions."""
_SPECIAL_TOKENS: Final = ("pad", "bos", "eos", "unk", "mask", "sep", "cls")


def check_causal(model: Any, layout: CacheLayout) -> None:  # Any: a PreTrainedModel
    """Raise ValueError if a model's keys depend on later tokens, it cannot be run, or its cache has another layout.

    The model computes at most `_PAIRS` pairs of prompts; for each kind of token types that it takes, the same number
    again.
    """
    device = _device_of(model)
    if device.type == "meta":
        raise refusal(
            model, "it has no weights (device 'meta'), and so its attention cannot be measured; load it first"
        )
    with _unchanged(model, device):
        try:
            reason = _reason(model, layout, device)
        except _OtherCacheError as error:
            raise refusal(model, f"after a prompt of {TOKENS} tokens {error}") from error.__cause__
        except Exception as error:  # whatever a model's own code raises
            what = f"it fails on a prompt of {TOKENS} tokens, so its attention cannot be measured"
            raise refusal(model, what, error) from error
    if reason is not None:
        raise refusal(model, reason)


class _OtherCacheError(Exception):
    """The model's cache is not as its configuration says."""


def _reason(model: Any, layout: CacheLayout, device: torch.device) -> str | None:
    taken = inspect.signature(model.forward).parameters
    for types in (None, *(each for each in _TOKEN_TYPES if each in taken)):
        for number in range(_PAIRS):
            first, second = (_states(model, layout, ids, types) for ids in _prompts(model, device, number))
            layer = _differing_layer(first, second, _tolerance(model, layout))
            if layer is None:
                break
        else:
            given = f"with {types}=1, as a tokenizer may give them, " if types else ""
            return f"{given}its attention is not causal: keys of layer {layer} depend on the tokens after theirs"
    return None


def _prompts(model: Any, device: torch.device, number: int) -> list[torch.Tensor]:
    """Return two prompts, of shape (1, TOKENS), that differ in their last token."""
    import torch

    size = getattr(model.config, "vocab_size", None) or len(model.get_input_embeddings().weight)
    special: set[object] = set()
    for name in _SPECIAL_TOKENS:
        found = getattr(model.config, f"{name}_token_id", None)
        special.update(found if isinstance(found, (list, tuple)) else [found])
    *ids, last = (_ordinary((number + step) * size // (TOKENS + _PAIRS), size, special) for step in range(TOKENS))
    other = _ordinary(last + size // 2, size, special | {last})
    prompts = [[*ids, last], [*ids, other]]
    return [torch.tensor([prompt], dtype=torch.long, device=device) for prompt in prompts]


def _ordinary(first: int, size: int, special: Collection[object]) -> int:
    """Return the first token from `first` on that is not special, if there is one."""
    return next((each % size for each in range(first, first + size) if each % size not in special), first % size)


def _cache_argument(model: Any) -> str:
    """Return the name by which a model takes a cache: `cache` since Transformers 5.24, `past_key_values` before.

    The `forward` of a subclass may name neither, and hand both on.
    """
    for each in type(model).__mro__:
        forward = vars(each).get("forward")
        taken = {} if forward is None else inspect.signature(forward).parameters
        for name in ("cache", "past_key_values"):
            if name in taken:
                return name
    return "past_key_values"


def _states(model: Any, layout: CacheLayout, ids: torch.Tensor, types: str | None) -> States:
    """Return the keys and values of all tokens but the last one."""
    import torch
    from transformers import DynamicCache

    taken = inspect.signature(model.forward).parameters
    cache, ones = DynamicCache(config=model.config), torch.ones_like(ids)
    given = {_cache_argument(model): cache}
    if types is not None:
        given[types] = ones
    if "attention_mask" in taken:
        given["attention_mask"] = ones  # `generate` gives this mask, too
    with torch.no_grad():
        model(ids, use_cache=True, **given)
    try:
        states = states_of(cache, layout)
    except (TypeError, ValueError) as error:
        raise _OtherCacheError(str(error)) from error
    if token_count(states) != TOKENS:
        raise _OtherCacheError(f"its cache has {token_count(states)}")
    return [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in states]


def _differing_layer(first: States, second: States, tolerance: float) -> int | None:
    """Return the first layer in which keys or values of a token differ by more than rounding."""
    import torch

    for layer, (pair, other_pair) in enumerate(zip(first, second, strict=True)):
        for part, other in zip(pair, other_pair, strict=True):
            if not torch.equal(part, other):
                one, two = (each.float().transpose(1, 2).flatten(2) for each in (part, other))
                if not bool(((one - two).norm(dim=2) <= tolerance * one.norm(dim=2)).all()):  # NaN differs, too
                    return layer
    return None


def _tolerance(model: Any, layout: CacheLayout) -> float:
    is_quantized = getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None)
    return _QUANTIZED_TOLERANCE if is_quantized else _TOLERANCES[str(layout.dtype).removeprefix("torch.")]


def _device_of(model: Any) -> torch.device:
    """Return the device for a prompt. Weights on "meta" with a hook of Accelerate are loaded when they are used."""
    import torch

    hooked = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    if hooked is not None:
        return torch.device(hooked)
    devices = [each.device for each in model.parameters()]
    return next((each for each in devices if each.type != "meta"), torch.device("meta"))


@contextmanager
def _unchanged(model: Any, device: torch.device) -> Iterator[None]:
    """Restore attributes that a forward pass sets, such as the kind of attention, and the state of random numbers."""
    import torch

    found = [vars(each) for each in (model.config, *model.modules())]
    found += [value for attributes in found for value in attributes.values() if isinstance(value, dict)]
    before = [(attributes, attributes.copy()) for attributes in found]
    has_own = device.type not in ("cpu", "mps")
    try:
        with torch.random.fork_rng([device] if has_own else [], device_type=device.type if has_own else "cuda"):
            yield
    finally:
        for attributes, content in before:
            if attributes.keys() != content.keys() or any(attributes[name] is not content[name] for name in content):
                attributes.clear()
                attributes.update(content)
