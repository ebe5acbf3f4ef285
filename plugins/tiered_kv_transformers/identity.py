"""Digests of a model's configuration and weights, for the namespace.

`PrefixCache.open` calls it, on the caller's thread. If the definition of a digest changes, no stored block is found.
How the model is run (a known attention implementation, versions of torch and Transformers, kernels, threads) does not
count: it changes only the last bits of keys, values and logits.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import xxhash

from tiered_kv.engines.facts import counting_variables
from tiered_kv_transformers import layout as block_layout
from tiered_kv_transformers.block_keys import ALGORITHM
from tiered_kv_transformers.layout import CacheLayout

if TYPE_CHECKING:
    import torch

_DIGEST_BYTES = 16
_CONFIG_PERSON = b"tiered-kv-cfg-v1"
_WEIGHTS_PERSON = b"tiered-kv-wts-v1"

_SAMPLES = 16
_SAMPLE_BYTES = 4096

_REMEDY = "name the model and its revision in the stack's namespace, and pass weights='revision'"

# The model's origin; data types, which the weights' digest has; the results of a call; names of classes.
_NOT_OF_THE_MODEL = frozenset(
    (
        "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "output_attentions",
        "output_hidden_states", "return_dict", "return_dict_in_generate", "use_cache", "id2label", "label2id",
        "problem_type",
    )
)  # fmt: skip
"""Entries of a configuration that no key or value depends on. All others count, in future versions too."""

_EXACT_ATTENTION = frozenset(
    ["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"]
)
"""Implementations of attention that compute the same but for the last bits. Other implementations may approximate."""

_FLOAT32_VARIABLES = re.compile(
    "^(NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|(DNNL|ONEDNN)_DEFAULT_FPMATH_MODE)$"
)
"""Variables that make libraries compute products of float32 in fewer bits."""


class Weights(StrEnum):
    """What identifies a model's weights."""

    FULL = "full"
    """A hash of every byte."""
    SAMPLED = "sampled"
    """A hash of 16 pages of each tensor: quick, but it does not show a change of a few values."""
    REVISION = "revision"
    """The `model` and `revision` of the stack's namespace, for which you vouch; no weight is read."""


def namespace_fields(model: Any, layout: CacheLayout, weights: Weights) -> dict[str, object]:
    """Return the model's fields of the namespace; `model` is a PreTrainedModel."""
    extra = {
        "config": config_digest(model.config.to_dict()),
        "code": f"{type(model).__module__}.{type(model).__qualname__}",  # of a model's repository, with its revision
        "byte_order": sys.byteorder,
        "weights": str(weights),
        **_approximations(model, layout),
    }
    if weights is not Weights.REVISION:
        extra["weights"] = f"{weights}:{weights_digest(model.state_dict(), sampled=weights is Weights.SAMPLED)}"
    return {
        "dtype": str(layout.dtype).removeprefix("torch."),
        "layout": block_layout.NAME,
        "hash_algorithm": ALGORITHM,
        "layers": layout.layers,
        "groups": (f"full attention, {layout.kv_heads} heads of {layout.head_dim}",),
        "extra": extra,
    }


def _approximations(model: Any, layout: CacheLayout) -> dict[str, str]:
    """Return the settings of the run that change more than the last bits of a key or value; as a rule none."""
    import torch

    found = {}
    attention = getattr(model.config, "_attn_implementation", None) or "eager"
    if attention not in _EXACT_ATTENTION:
        found["attention"] = str(attention)
    # A model that was cast after it was made has the frequencies of its rotary embedding in 16 bits, too. A model that
    # was loaded in that type has not. The frequencies are not among the weights.
    rounded = {
        f"{name} {str(each.dtype).removeprefix('torch.')}"
        for module in model.modules()
        for name, each in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set and each.is_floating_point() and each.element_size() < 4
    }
    if rounded:
        found["buffers"] = ", ".join(sorted(rounded))
    if layout.dtype == torch.float32:
        reduced = [*_float32_precisions(), *map("=".join, counting_variables(_FLOAT32_VARIABLES, frozenset()).items())]
        if reduced:
            found["float32"] = ", ".join(reduced)
    return found


def _float32_precisions() -> list[str]:
    """Return the precisions other than float32 in which PyTorch computes products of float32."""
    import torch

    products = [getattr(getattr(torch.backends, name), "matmul", None) for name in ("cuda", "mkldnn")]
    precisions = [getattr(each, "fp32_precision", None) for each in products]
    if precisions[0] is None:  # PyTorch before 2.9 has no such attribute
        precisions = [torch.get_float32_matmul_precision()]
    return sorted({str(each) for each in precisions} & {"tf32", "bf16", "high", "medium"})


def config_digest(config: Mapping[str, object]) -> str:
    """Return 32 hexadecimal digits for a model's configuration, as its `to_dict` gives it.

    The digits are a personalized BLAKE2b of the counting entries as JSON: keys sorted, no white space, UTF-8. A value
    of a type that JSON lacks is written as its `str`; a set, as the sorted list of its values' `str`.
    """
    counting = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    return _digest(_with_text_keys(counting), _CONFIG_PERSON)


def weights_digest(state: Mapping[str, torch.Tensor], *, sampled: bool = False) -> str:
    """Return 32 hexadecimal digits for a model's weights, as its `state_dict` gives them, on any device.

    They are computed as in `config_digest`, over `[name, dtype, shape, content]` of each tensor, sorted by name.
    `content` is the XXH3-128 of the tensor's bytes in C order, in hexadecimal. If `sampled`, 16 pages of 4 KiB stand
    for a larger tensor; the first and the last page are among them.
    """
    entries = []
    for name, tensor in sorted(state.items()):
        if not hasattr(tensor, "is_meta") or tensor.is_meta:
            raise ValueError(f"the weight '{name}' cannot be read: it is offloaded, or not a tensor; {_REMEDY}")
        try:
            content = _content_digest(tensor, sampled)
        except (RuntimeError, NotImplementedError, TypeError) as error:  # tensors of a class that hides its bytes
            raise ValueError(f"the weight '{name}' cannot be read ({type(error).__name__}); {_REMEDY}") from error
        entries.append([name, str(tensor.dtype), list(tensor.shape), content])
    return _digest(entries, _WEIGHTS_PERSON)


def _content_digest(tensor: torch.Tensor, sampled: bool) -> str:
    import torch

    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if sampled and content.numel() > _SAMPLES * _SAMPLE_BYTES:
        last = content.numel() - _SAMPLE_BYTES
        starts = [last * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
        content = torch.cat([content[start : start + _SAMPLE_BYTES] for start in starts])
    return xxhash.xxh3_128_hexdigest(content.cpu().numpy().data)


def _with_text_keys(value: object) -> object:
    """Return `value` with keys that JSON can sort, and with text for types that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_text_keys(item) for item in value]
    if isinstance(value, (set, frozenset)):  # a set's order differs from start to start
        return sorted(map(str, value))
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _digest(value: object, person: bytes) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=person).hexdigest()
