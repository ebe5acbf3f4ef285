"""How far two copies of a block differ, by the type of their values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tiered_kv.tiering.audit.comparison import difference_of

VALUES = np.random.default_rng(0).normal(size=4096).astype(np.float32)
Raw = np.ndarray[Any, np.dtype[np.uint8]]


NAMES = {
    "bfloat16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "half": "float16",
    "float16": "float16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""What torch calls each type."""


def encoded(values: np.ndarray[Any, Any], dtype: str) -> Raw:
    torch = pytest.importorskip("torch", reason="the extra 'transformers'")
    raw: Raw = torch.from_numpy(values).to(getattr(torch, NAMES[dtype])).view(torch.uint8).numpy()
    return raw


def as_float32(values: np.ndarray[Any, Any]) -> Raw:
    return values.view(np.uint8)


@pytest.mark.parametrize("dtype", NAMES)
def test_a_small_change_is_small_and_other_values_are_far(dtype: str) -> None:
    stored = encoded(VALUES, dtype)
    assert difference_of(stored, stored.copy(), dtype) == 0.0
    assert 0.0 < difference_of(stored, encoded(VALUES * 1.02, dtype), dtype) < 0.05
    assert 1.0 < difference_of(stored, encoded(VALUES[::-1].copy(), dtype), dtype) < 1.4


@pytest.mark.parametrize("dtype", NAMES)
def test_numbers_are_decoded_as_torch_encodes_them(dtype: str) -> None:
    values = np.linspace(-100.0, 100.0, 256, dtype=np.float32)
    found = difference_of(encoded(values, dtype), encoded(2 * values, dtype), dtype)
    assert found == pytest.approx(0.5, rel=1e-5)


def test_one_wrong_stretch_of_a_large_block_is_seen() -> None:
    values = np.random.default_rng(1).normal(size=1 << 20).astype(np.float32)
    changed = values.copy()
    changed[-256:] *= -1
    found = difference_of(as_float32(values), as_float32(changed), "float32")
    assert found == pytest.approx(2.0)


def test_noise_on_values_near_zero_is_measured_against_the_whole_block() -> None:
    values = VALUES.copy()
    values[:256] *= 1e-6
    noisy = values.copy()
    noisy[:256] *= -1
    found = difference_of(as_float32(values), as_float32(noisy), "float32")
    assert found < 1e-4


def test_the_same_bits_agree_and_anything_else_that_is_not_finite_does_not() -> None:
    values = VALUES.copy()
    values[7] = np.nan
    near = values.copy()
    near[100] *= 1.01
    assert difference_of(as_float32(values), as_float32(near), "float32") < 0.01
    near[100] = np.inf
    assert difference_of(as_float32(values), as_float32(near), "float32") == math.inf


@pytest.mark.parametrize("dtype", ["auto", "int4", "fp8_ds_mla"])
def test_bytes_of_an_unknown_type_are_the_same_or_not(dtype: str) -> None:
    stored = as_float32(VALUES)
    assert difference_of(stored, stored.copy(), dtype) == 0.0
    assert difference_of(stored, as_float32(VALUES * 1.001), dtype) == math.inf
    odd = np.arange(7, dtype=np.uint8)
    assert difference_of(odd, odd[::-1].copy(), "bfloat16") == math.inf


@pytest.mark.parametrize("dtype", NAMES)
def test_zeros_of_another_sign_are_zeros(dtype: str) -> None:
    value_bytes = len(encoded(VALUES, dtype)) // len(VALUES)
    zeros = np.zeros(4096, dtype=np.uint8)
    negative = zeros.copy()
    negative[value_bytes - 1 :: value_bytes] = 0x80
    assert difference_of(zeros, negative, dtype) == 0.0
