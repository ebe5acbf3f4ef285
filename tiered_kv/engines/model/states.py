"""The bytes of recurrent states: of Mamba layers, and of gated delta nets.

`architectures` calls these functions. A state is what such a layer keeps in place of keys and values: as much after
one token as after all. It has two parts, the last inputs of a convolution, and the recurrent state itself, each with a
type of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tiered_kv.engines.model.layers import DTYPE_BYTES
from tiered_kv.engines.model.settings import ModelSettings


class State(NamedTuple):
    """The elements of a layer's state, over all ranks."""

    convolution: int
    recurrent: int


def state_bytes(settings: ModelSettings, name: str, dtype: str, ranks: int) -> int:
    """Return the bytes of one layer's state; `name` is a key of `STATES`, and `dtype` the type of the model."""
    state = STATES[name](settings, ranks)
    own = settings.get("mamba_ssm_dtype") or settings.get("mamba_ssm_cache_dtype")
    if own is None and settings.model_type == "nemotron_h":
        own = "float32"
    return state.convolution * DTYPE_BYTES[dtype] + state.recurrent * DTYPE_BYTES.get(str(own), DTYPE_BYTES[dtype])


def _mamba(settings: ModelSettings, ranks: int) -> State:
    inner = settings.whole("mamba_expand", 2) * settings.whole("hidden_size")
    return State(inner * (settings.whole("mamba_d_conv", 4) - 1), inner * settings.whole("mamba_d_state", 16))


def _mamba_2(settings: ModelSettings, ranks: int) -> State:
    heads = settings.whole("mamba_n_heads" if settings.get("mamba_n_heads") else "mamba_num_heads")
    if settings.get("mamba_expand") is not None:
        inner = settings.whole("mamba_expand") * settings.whole("hidden_size")
    else:
        inner = heads * settings.whole("mamba_head_dim")
    size = settings.whole("mamba_d_state" if settings.get("mamba_d_state") else "ssm_state_size")
    groups = settings.whole("mamba_n_groups" if settings.get("mamba_n_groups") else "n_groups")
    if groups % ranks:
        groups = ranks  # each rank needs whole groups, so it copies some
    kernel = settings.whole("mamba_d_conv" if settings.get("mamba_d_conv") else "conv_kernel")
    return State((inner + 2 * groups * size) * (kernel - 1), inner * size)


def _gated_delta_net(settings: ModelSettings, ranks: int) -> State:
    key = settings.whole("linear_num_key_heads") * settings.whole("linear_key_head_dim")
    value = settings.whole("linear_num_value_heads") * settings.whole("linear_value_head_dim")
    kernel = settings.whole("linear_conv_kernel_dim", 4)
    return State((2 * key + value) * (kernel - 1), value * settings.whole("linear_key_head_dim"))


STATES: Final[Mapping[str, Callable[[ModelSettings, int], State]]] = {
    "Mamba": _mamba,
    "Mamba 2": _mamba_2,
    "gated delta net": _gated_delta_net,
}
"""The elements of a state, by the name of the recurrent layer."""
