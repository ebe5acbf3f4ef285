"""The bytes of a caller's buffer, without a copy: bytes, memory, numpy arrays and torch tensors of any type.

`put`, `get` and `DirectTiers` call it on the caller's thread. A buffer that cannot be used as it is raises an error; it
is never copied in silence.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    AnyBuffer: TypeAlias = Buffer | np.ndarray[Any, Any] | torch.Tensor

Blocks = np.ndarray[Any, np.dtype[np.uint8]]


def rows_in(buffer: AnyBuffer, count: int, block_bytes: int, name: str, *, writable: bool = False) -> Blocks:
    """Return the bytes of `buffer` as rows, of shape (count, block_bytes).

    A uint8 array of this shape may also be a part of a larger one, with gaps between its rows.

    Args:
        name: The name of the buffer in errors.

    Raises:
        TypeError, ValueError: See `bytes_in`; or the buffer has another size.
    """
    wanted = (count, block_bytes)
    has_mask = hasattr(buffer, "mask")  # rows of a masked array may not take a write
    if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.shape == wanted and not has_mask:
        if buffer.size and buffer.strides[1] != 1:
            raise ValueError(f"{name} must have contiguous rows; pass numpy.ascontiguousarray({name})")
        if writable and count > 1 and abs(buffer.strides[0]) < block_bytes:
            raise ValueError(f"{name} must have rows that do not overlap")
        rows = buffer
    else:
        flat = bytes_in(buffer, name)
        if flat.size != count * block_bytes:
            raise ValueError(f"{name} must be {count} blocks of {block_bytes} bytes, found {flat.size} bytes")
        rows = flat.reshape(wanted)
    if writable and not rows.flags.writeable:
        raise ValueError(f"{name} is read-only")
    return rows


def bytes_in(buffer: AnyBuffer, name: str) -> Blocks:
    """Return the bytes of `buffer`, of shape (bytes,). The array keeps the buffer alive.

    Raises:
        TypeError: It is no buffer, its elements are Python objects, or it is not in the CPU's memory.
        ValueError: It is not contiguous, in C order, or it is a lazy conjugate or negative of torch.
    """
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise TypeError(f"{name} must be in the CPU's memory, found a tensor on {buffer.device}; pass its .cpu()")
        if buffer.layout != torch.strided or not buffer.is_contiguous():
            raise ValueError(f"{name} must be contiguous, in C order; pass its .contiguous()")
        if buffer.is_conj() or buffer.is_neg():  # torch conjugates or negates the numbers only when they are read
            raise ValueError(f"{name} must have its own bytes; pass its .resolve_conj().resolve_neg()")
        flat: Blocks = buffer.detach().reshape(-1).view(torch.uint8).numpy()  # numpy has no bfloat16
        return flat
    if isinstance(buffer, np.ndarray):  # some types have no memoryview, such as ml_dtypes' bfloat16
        has_objects, is_contiguous = buffer.dtype.hasobject, buffer.flags.c_contiguous
    else:
        try:
            buffer = memoryview(buffer)
        except TypeError:
            wanted = "bytes, a memoryview, a numpy array or a tensor of torch"
            raise TypeError(f"{name} must be a buffer ({wanted}), found {type(buffer).__name__}") from None
        has_objects, is_contiguous = "O" in buffer.format, buffer.c_contiguous
    if has_objects:
        raise TypeError(f"{name} must be a buffer of numbers, found one of Python objects")
    if not is_contiguous:
        raise ValueError(f"{name} must be contiguous, in C order; pass numpy.ascontiguousarray({name})")
    if isinstance(buffer, np.ndarray):
        return np.asarray(buffer).reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8)
