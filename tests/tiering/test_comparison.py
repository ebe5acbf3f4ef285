"""How far two copies of a block differ, by the type of their values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tiered_kv.tiering.comparison import difference_of

VALUES = np.random.default_rng(0).normal(size=4096).astype(np.float32)
Raw = np.ndarray[Any, np.dtype[np.uint8]]


def as_bfloat16(values: np.ndarray[Any, Any]) -> Raw:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)


def as_float16(values: np.ndarray[Any, Any]) -> Raw:
    return values.astype("<f2").view(np.uint8)


def as_float32(values: np.ndarray[Any, Any]) -> Raw:
    return values.astype("<f4").view(np.uint8)


def as_e5m2(values: np.ndarray[Any, Any]) -> Raw:
    return (values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)


def as_e4m3(values: np.ndarray[Any, Any]) -> Raw:
    """Round down to sign, 4 bits of exponent with bias 7, and 3 bits of fraction."""
    fraction, exponent = np.frexp(np.abs(values))  # in [0.5, 1)
    code = np.where(exponent > -6, ((exponent + 6) << 3) + (fraction * 16).astype(int) - 8, 0)
    return np.where(np.signbit(values), code | 0x80, code).astype(np.uint8)


ENCODERS = {
    "bfloat16": as_bfloat16,
    "torch.bfloat16": as_bfloat16,
    "half": as_float16,
    "float16": as_float16,
    "float32": as_float32,
    "fp8": as_e4m3,
    "fp8_e4m3": as_e4m3,
    "fp8_e5m2": as_e5m2,
}


@pytest.mark.parametrize("dtype", ENCODERS)
def test_a_small_change_is_small_and_other_values_are_far(dtype: str) -> None:
    encode = ENCODERS[dtype]
    stored = encode(VALUES)
    assert difference_of(stored, stored.copy(), dtype) == 0.0
    near = difference_of(stored, encode(VALUES * 1.02), dtype)
    assert 0.0 < near < 0.05
    assert 1.0 < difference_of(stored, encode(VALUES[::-1].copy()), dtype) < 1.4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"])
def test_numbers_are_decoded_as_torch_decodes_them(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="the extra 'transformers'")
    kind = getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype))
    tensor = torch.linspace(-100.0, 100.0, 256).to(kind)
    stored = tensor.view(torch.uint8).numpy()
    doubled = (tensor.to(torch.float32) * 2).to(kind)
    expected = (doubled.to(torch.float32) - tensor.to(torch.float32)).abs().sum() / doubled.to(
        torch.float32
    ).abs().sum()
    found = difference_of(stored, doubled.view(torch.uint8).numpy(), dtype)
    assert found == pytest.approx(float(expected), rel=1e-5)
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


@pytest.mark.parametrize("dtype", ENCODERS)
def test_zeros_of_another_sign_are_zeros(dtype: str) -> None:
    value_bytes = len(ENCODERS[dtype](VALUES)) // len(VALUES)
    zeros = np.zeros(4096, dtype=np.uint8)
    negative = zeros.copy()
    negative[value_bytes - 1 :: value_bytes] = 0x80
    assert difference_of(zeros, negative, dtype) == 0.0
