"""Fuzzing of everything that reads bytes from outside: targets, and mutations of valid inputs.

A target takes bytes and returns; it raises where a promise is broken. `tests/trust/test_fuzz.py` runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from hypothesis import strategies as st

_MODULES = {
    "record": "records",
    "segment": "segments",
    "replies": "replies",
    "answers": "answers",
}
NAMES = tuple(_MODULES)
_MUTATIONS_MAX = 6
_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)
_KINDS = ("flip", "set", "insert", "overwrite", "delete", "repeat", "cut", "splice")


@dataclass(frozen=True, slots=True)
class Target:
    """A reader of bytes from outside."""

    proof: str  # the row of `tests.support.figures` that counts its inputs
    seeds: tuple[bytes, ...]  # valid inputs
    run: Callable[[bytes], None]  # reads an input; raises where a promise is broken
    words: tuple[bytes, ...] = (b"\0",)  # pieces of the format, to be put in anywhere


def target(name: str) -> Target:
    """Return the target of that name; an ImportError says that a library is missing."""
    made: Target = import_module(f"tests.support.fuzzing.{_MODULES[name]}").make()
    return made


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Return a strategy for inputs: mostly seeds with a few mutations, sometimes unchanged seeds or noise."""
    mutated = _mutated(target)
    return st.one_of(mutated, mutated, mutated, mutated, st.binary(max_size=200))


@st.composite
def _mutated(draw: st.DrawFn, target: Target) -> bytes:
    data = draw(st.sampled_from(target.seeds))
    for kind in draw(st.lists(st.sampled_from(_KINDS), max_size=_MUTATIONS_MAX)):
        # Bytes near the beginning, where headers are, and those anywhere, are as likely as each other.
        at = min(draw(st.integers(0, 160) | st.integers(0, len(data))), len(data))
        length = draw(st.integers(1, 64))
        before, after = data[:at], data[at:]
        match kind:
            case "flip":
                data = before + bytes(byte ^ 1 << length % 8 for byte in after[:1]) + after[1:]
            case "set":
                data = before + bytes([draw(st.sampled_from(_INTERESTING))]) + after[1:]
            case "insert":
                data = before + draw(_pieces(target)) + after
            case "overwrite":
                piece = draw(_pieces(target))
                data = before + piece + after[len(piece) :]
            case "delete":
                data = before + after[length:]
            case "repeat":
                data = before + after[:length] * draw(st.integers(1, 40)) + after
            case "cut":
                data = before
            case "splice":
                other = draw(st.sampled_from(target.seeds))
                data = before + other[draw(st.integers(0, len(other))) :]
    return data


def _pieces(target: Target) -> st.SearchStrategy[bytes]:
    numbers = st.builds(
        lambda value, size: (value % (1 << 8 * size)).to_bytes(size, "little"),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.sampled_from((1, 2, 4, 8)),
    )
    return st.one_of(st.binary(min_size=1, max_size=40), st.sampled_from(target.words), numbers)
