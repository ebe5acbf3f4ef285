"""From a model's configuration to its layers: which of them keep every token, a window, a latent vector or a state.

`tiered-kv size` calls `read_model`, on the main thread; the plugin of Transformers uses `head_shape`, too. What must
stay true: an architecture that `_PATTERNS` does not name is refused by its name, and never counted as another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from tiered_kv.config.validation import suggestion
from tiered_kv.engines.model.layers import DTYPE_BYTES, Kind, KVModel, Layers
from tiered_kv.engines.model.settings import ModelSettings
from tiered_kv.engines.model.states import state_bytes
from tiered_kv.errors import ConfigError

LAYERS_MAX: Final = 10_000
_NUMBERS: Final = "give its numbers instead: --layers, --kv-heads and --head-size, or --latent-size"

_FULL, _WINDOW, _CHUNK, _LATENT, _STATE, _NONE = "full", "window", "chunk", "latent", "state", "none"
"""What a layer keeps."""
Pattern = Callable[[ModelSettings, int], Iterable[str]]
"""Returns a word for each of so many layers."""

_LAYER_TYPES: Final[Mapping[str, str]] = {
    "full_attention": _FULL,
    "attention": _FULL,
    "sliding_attention": _WINDOW,
    "chunked_attention": _CHUNK,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "mlp": _NONE,
    "moe": _NONE,
}
"""The words of the lists `layer_types` and `layers_block_type`."""
_NEMOTRON: Final[Mapping[str, str]] = {"M": _STATE, "*": _FULL, "-": _NONE, "E": _NONE}
_RECURRENT: Final[Mapping[str, str]] = {
    "jamba": "Mamba",
    **dict.fromkeys(("nemotron_h", "granitemoehybrid"), "Mamba 2"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "gated delta net"),
}
"""Which recurrent layers an architecture has, by their names in `states`."""


def read_model(path: Path, *, kv_dtype: str | None = None, ranks: int = 1) -> KVModel:
    """Return what a model keeps, by the `config.json` at `path`, or in the folder there.

    Args:
        kv_dtype: The type of keys and values; by default that of the model.
        ranks: Tensor parallel ranks.

    Raises:
        ConfigError: The file cannot be used, or its model is not known.
    """
    settings = ModelSettings.read(path)
    layers, dtype = _layers_of(settings, ranks), _dtype_of(settings)
    return KVModel(_name_of(settings, path), layers, kv_dtype or dtype, ranks)


def head_shape(read: Callable[[str], object]) -> tuple[object, object]:
    """Return the number of a layer's KV heads and their size, as a configuration has them; None if it does not say.

    `read` returns a setting by its name, or None.
    """
    heads, hidden = read("num_attention_heads"), read("hidden_size")
    # Falcon has one head for all, unless it is of the new architecture.
    is_multi_query = bool(read("multi_query")) and not read("new_decoder_architecture")
    size = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
    return 1 if is_multi_query else read("num_key_value_heads") or heads, read("head_dim") or size


def check_ranks(heads: int, ranks: int, location: str) -> None:
    """Raise ConfigError if tensor parallel ranks cannot divide, or copy, the KV heads evenly."""
    if heads % ranks and ranks % heads:
        raise ConfigError(
            f"{ranks} ranks cannot share {heads} KV heads evenly: expected a divisor or a multiple of {heads}",
            location=location,
        )


# Patterns: which layers are of which kind.


def _all(word: str) -> Pattern:
    return lambda settings, layers: [word] * layers


def _full_or_window(settings: ModelSettings, layers: int) -> list[str]:
    return [_FULL if settings.get("sliding_window") is None else _WINDOW] * layers


def _window_if_used(settings: ModelSettings, layers: int) -> list[str]:
    if not settings.get("use_sliding_window"):
        return [_FULL] * layers
    full = min(layers, settings.whole("max_window_layers", layers, least=0))
    return [_FULL] * full + [_WINDOW] * (layers - full)


def _full_every(interval: int, other: str, setting: str = "") -> Pattern:
    """Return the pattern in which each n-th layer has full attention: `interval`, unless a `setting` has another."""

    def words(settings: ModelSettings, layers: int) -> list[str]:
        every = settings.whole(setting, interval) if setting else interval
        return [_FULL if number % every == 0 else other for number in range(1, layers + 1)]

    return words


def _llama_4(settings: ModelSettings, layers: int) -> Iterable[str]:
    """Layers without rotary embeddings see all tokens. The list has a 1 for the others."""
    rotary = settings.get("no_rope_layers")
    if not isinstance(rotary, list) or not rotary:
        return _full_every(4, _CHUNK, "no_rope_layer_interval")(settings, layers)
    return [_CHUNK if each else _FULL for each in rotary]


def _jamba(settings: ModelSettings, layers: int) -> list[str]:
    period, offset = settings.whole("attn_layer_period", 8), settings.whole("attn_layer_offset", 4, least=0)
    return [_FULL if number % period == offset else _STATE for number in range(layers)]


def _nemotron_h(settings: ModelSettings, layers: int) -> list[str]:
    pattern = settings.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= _NEMOTRON.keys():
        raise settings.wrong("hybrid_override_pattern", "a text of " + " ".join(_NEMOTRON))
    return [_NEMOTRON[each] for each in pattern]


_PATTERNS: Final[Mapping[str, Pattern]] = {
    **dict.fromkeys(
        (
            *("llama", "gemma", "granite", "granitemoe", "olmo2", "olmoe", "glm4", "glm4_moe", "cohere", "falcon"),
            *("gpt2", "gpt_neox", "opt", "stablelm", "smollm3", "seed_oss", "nemotron", "minimax_m2", "ernie4_5"),
            *("ernie4_5_moe", "qwen3_vl_text", "qwen3_vl_moe_text"),
        ),
        _all(_FULL),
    ),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "starcoder2"), _full_or_window),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text"), _window_if_used
    ),
    **dict.fromkeys(("gemma2", "gpt_oss"), _full_every(2, _WINDOW)),
    "gemma3_text": _full_every(6, _WINDOW, "sliding_window_pattern"),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), _full_every(4, _WINDOW, "sliding_window_pattern")),
    "llama4_text": _llama_4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _all(_LATENT)),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _full_every(4, _STATE, "full_attention_interval")
    ),
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _all(_FULL),  # its `layer_types` say which layers are of Mamba 2
}
"""For each architecture (`model_type`), how its layers follow each other where no list in the configuration says it."""


def _words_of(settings: ModelSettings) -> list[str]:
    """Return a word for each layer."""
    layers, known = settings.whole("num_hidden_layers"), settings.model_type
    if layers > LAYERS_MAX:
        raise settings.wrong("num_hidden_layers", f"at most {LAYERS_MAX:,} layers")
    if known not in _PATTERNS:
        raise ConfigError(
            f"the architecture {known!r} is not known{suggestion(known, [*_PATTERNS])}; {_NUMBERS}",
            location=settings.where,
        )
    name = next((name for name in ("layer_types", "layers_block_type") if settings.get(name) is not None), "")
    types = settings.texts(name) if name else None
    if types is None:
        words = list(_PATTERNS[known](settings, layers))
    else:
        unknown = sorted({each for each in types if _is_unknown(each, known)})
        if unknown:
            raise ConfigError(f"{name}: layers of {unknown[0]!r} are not known; {_NUMBERS}", location=settings.where)
        words = [_LAYER_TYPES[each] for each in types]
    if len(words) != layers:
        raise ConfigError(
            f"num_hidden_layers is {layers}, and {name or 'its pattern'} has {len(words)} layers; one of both is wrong",
            location=settings.where,
        )
    return words


def _is_unknown(layer_type: str, architecture: str) -> bool:
    word = _LAYER_TYPES.get(layer_type)
    return word is None or (word == _STATE and architecture not in _RECURRENT)


def _layers_of(settings: ModelSettings, ranks: int) -> tuple[Layers, ...]:
    numbers = Counter(_words_of(settings))
    numbers.pop(_NONE, None)
    return tuple(_alike(settings, word, number, ranks) for word, number in numbers.items())


def _alike(settings: ModelSettings, word: str, number: int, ranks: int) -> Layers:
    """Return the layers of one word."""
    if word == _LATENT:
        elements = settings.whole("kv_lora_rank") + settings.whole("qk_rope_head_dim", least=0)
        return Layers(Kind.LATENT, number, elements=elements)
    if word == _STATE:
        name = _RECURRENT[settings.model_type]
        size_bytes = state_bytes(settings, name, _dtype_of(settings), ranks)
        return Layers(Kind.STATE, number, state_bytes=size_bytes, name=name)
    heads, size = _checked_heads(settings, ranks)
    if word == _FULL:
        return Layers(Kind.FULL, number, heads, 2 * size)
    kind, name = (Kind.WINDOW, "sliding_window") if word == _WINDOW else (Kind.CHUNK, "attention_chunk_size")
    return Layers(kind, number, heads, 2 * size, settings.whole(name))


def _checked_heads(settings: ModelSettings, ranks: int) -> tuple[int, int]:
    """Return the KV heads of a layer and their size; raise ConfigError if numbers are missing, or do not agree."""
    queries = settings.whole("num_attention_heads")
    if settings.get("head_dim") is None:
        hidden = settings.whole("hidden_size")
        if hidden % queries:
            raise ConfigError(
                f"hidden_size {hidden} is no multiple of num_attention_heads {queries}, and head_dim is missing",
                location=settings.where,
            )
    else:
        settings.whole("head_dim")
    if settings.get("num_key_value_heads") is not None:
        settings.whole("num_key_value_heads")
    heads, size = head_shape(settings.get)
    assert isinstance(heads, int)
    assert isinstance(size, int)
    if queries % heads:
        raise ConfigError(
            f"num_attention_heads {queries} is no multiple of num_key_value_heads {heads}; one of both is wrong",
            location=settings.where,
        )
    check_ranks(heads, ranks, "--tensor-parallel")
    return heads, size


def _dtype_of(settings: ModelSettings) -> str:
    """Return the type in which an engine computes, by default, with the model."""
    found = settings.get("dtype")
    name = "bfloat16" if found in (None, "auto") else str(found).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise settings.wrong("dtype", ", ".join(DTYPE_BYTES))
    return "bfloat16" if name == "float32" else name  # engines load such weights in 16 bits


def _name_of(settings: ModelSettings, path: Path) -> str:
    """Return the name of the model's folder; of a copy in the cache of Hugging Face's hub, the name there."""
    folder = Path(settings.where).absolute().parent
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name or path.name
