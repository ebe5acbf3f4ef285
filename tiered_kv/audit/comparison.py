"""How far two copies of a block differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

STRETCH_VALUES: Final = 256
"""Values in a stretch: about one token of one head."""
SCALE_SHARE: Final = 0.1
"""A stretch whose magnitude is below this share of the block's average is measured against this share."""
_PIECE_BYTES: Final = 1 << 18

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Values = np.ndarray[Any, np.dtype[np.float32]]


def difference_of(stored: Bytes, computed: Bytes, dtype: str) -> float:
    """Return the largest difference of a stretch: 0 if all values agree, about 1 if they are unrelated.

    The difference of a stretch of 256 values is the sum of |stored - computed| over the sum of the larger magnitudes.
    A value that is not finite agrees only with the same bits. Both copies are contiguous, and equally long. `dtype` is
    that of a namespace. Bytes of an unknown type agree or differ infinitely.
    """
    if np.array_equal(stored, computed):
        return 0.0
    known = _type_of(dtype)
    if known is None or len(stored) % known.bytes:
        return float("inf")
    sums = [
        _sums_of_stretches(stored[first : first + _PIECE_BYTES], computed[first : first + _PIECE_BYTES], known)
        for first in range(0, len(stored), _PIECE_BYTES)
    ]
    differences, magnitudes = (np.concatenate(parts) for parts in zip(*sums, strict=True))
    if not np.isfinite(differences).all():
        return float("inf")
    if not magnitudes.any():  # zeros that differ in their sign
        return 0.0
    return float((differences / np.maximum(magnitudes, SCALE_SHARE * magnitudes.mean())).max())


def is_known(dtype: str) -> bool:
    """Return whether values of this type can be compared as numbers."""
    return _type_of(dtype) is not None


class _Type(NamedTuple):
    bytes: int
    decode: Callable[[Bytes], Values]


def _type_of(dtype: str) -> _Type | None:
    return _TYPES.get(dtype.lower().removeprefix("torch."))


def _sums_of_stretches(stored: Bytes, computed: Bytes, known: _Type) -> tuple[Values, Values]:
    """Return the sum of the differences, and of the larger magnitudes, of each stretch."""
    with np.errstate(invalid="ignore", over="ignore"):
        before, after = known.decode(stored), known.decode(computed)
        differences = np.abs(before - after)
        magnitudes = np.maximum(np.abs(before), np.abs(after))
    same = (stored.reshape(-1, known.bytes) == computed.reshape(-1, known.bytes)).all(axis=1)
    differences[same] = 0.0
    differences[~np.isfinite(differences)] = np.inf
    magnitudes[~np.isfinite(magnitudes)] = 0.0
    return _add_up(differences), _add_up(magnitudes)


def _add_up(values: Values) -> Values:
    sums: Values = np.add.reduceat(values, np.arange(0, len(values), STRETCH_VALUES), dtype=np.float64)
    return sums


def _e4m3_table() -> Values:
    """Return the value of each byte: a sign, 4 bits of exponent (bias 7), 3 of fraction, no infinity (OCP OFP8)."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    values = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    values[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -values, values).astype(np.float32)


_E4M3 = _e4m3_table()
_BFLOAT16 = _Type(2, lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32))
_FLOAT16 = _Type(2, lambda raw: raw.view("<f2").astype(np.float32))
_FLOAT32 = _Type(4, lambda raw: raw.view("<f4").astype(np.float32))
_FP8_E4M3 = _Type(1, lambda raw: _E4M3[raw])
_FP8_E5M2 = _Type(1, lambda raw: (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32))  # half a float16

_TYPES: Mapping[str, _Type] = {
    **dict.fromkeys(("bfloat16", "bf16"), _BFLOAT16),
    **dict.fromkeys(("float16", "fp16", "half"), _FLOAT16),
    **dict.fromkeys(("float32", "fp32", "float"), _FLOAT32),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn"), _FP8_E4M3),
    **dict.fromkeys(("fp8_e5m2", "float8_e5m2"), _FP8_E5M2),
}
"""By the names in vLLM and PyTorch, and common ones; `fp8` is e4m3, as in vLLM."""
