"""A fuzz target, and the mutations of its seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

_MUTATIONS_MAX = 6
_PIECE_BYTES_MAX = 40
_POSITIONS = 1 << 16
_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)


@dataclass(frozen=True, slots=True)
class Target:
    """Something that reads what others wrote.

    Args:
        name: What it is called on the command line.
        proof: The row of `tests.support.figures` that counts its inputs.
        seeds: Valid inputs to begin with.
        run: Reads an input; raises where a promise is broken, and returns else. One thread.
        words: Pieces of the format, to be put in anywhere.
    """

    name: str
    proof: str
    seeds: tuple[bytes, ...]
    run: Callable[[bytes], None]
    words: tuple[bytes, ...] = ()


_Mutation = Callable[[bytes], bytes]
_guided = False


def guide() -> None:
    """Say that whoever makes the inputs sees what they are compared with: then no checksum stands in the way."""
    global _guided
    _guided = True


def is_guided() -> bool:
    """Return whether inputs may have right checksums that nobody has asked for."""
    return _guided


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Return a strategy for inputs: seeds with a few mutations, now and then none, and now and then noise."""
    mutated = st.builds(_mutate, st.sampled_from(target.seeds), st.lists(_mutations(target), max_size=_MUTATIONS_MAX))
    return st.one_of(mutated, mutated, mutated, mutated, st.binary(max_size=200))


def _mutate(seed: bytes, mutations: Sequence[_Mutation]) -> bytes:
    for mutation in mutations:
        seed = mutation(seed)
    return seed


def _mutations(target: Target) -> st.SearchStrategy[_Mutation]:
    position = st.integers(0, _POSITIONS - 1)
    # Bytes near the beginning, where headers are, and those anywhere, are as likely as each other.
    place = st.one_of(st.builds(_absolute, st.integers(0, 160)), st.builds(_relative, position))
    piece = st.one_of(
        st.binary(min_size=1, max_size=_PIECE_BYTES_MAX),
        st.sampled_from(target.words or (b"\0",)),
        st.builds(_number, st.integers(-(1 << 63), (1 << 64) - 1), st.sampled_from((1, 2, 4, 8))),
    )
    length = st.integers(1, 64)
    return st.one_of(
        st.builds(_flip, place, st.integers(0, 7)),
        st.builds(_set, place, st.sampled_from(_INTERESTING)),
        st.builds(_insert, place, piece),
        st.builds(_overwrite, place, piece),
        st.builds(_delete, place, length),
        st.builds(_repeat, place, length, st.integers(1, 40)),
        st.builds(_cut, place),
        st.builds(_splice, place, place, st.sampled_from(target.seeds)),
    )


_Place = Callable[[bytes], int]
"""Where something happens, from 0 to the length."""


def _absolute(at: int) -> _Place:
    return lambda data: min(at, len(data))


def _relative(position: int) -> _Place:
    return lambda data: len(data) * position // _POSITIONS


def _number(value: int, size: int) -> bytes:
    return (value % (1 << 8 * size)).to_bytes(size, "little")


def _flip(place: _Place, bit: int) -> _Mutation:
    return lambda data: _at(data, place, lambda old: bytes([old ^ 1 << bit]))


def _set(place: _Place, value: int) -> _Mutation:
    return lambda data: _at(data, place, lambda _: bytes([value]))


def _at(data: bytes, place: _Place, change: Callable[[int], bytes]) -> bytes:
    at = place(data)
    return data[:at] + change(data[at]) + data[at + 1 :] if at < len(data) else data


def _insert(place: _Place, piece: bytes) -> _Mutation:
    return lambda data: data[: place(data)] + piece + data[place(data) :]


def _overwrite(place: _Place, piece: bytes) -> _Mutation:
    return lambda data: data[: place(data)] + piece + data[place(data) + len(piece) :]


def _delete(place: _Place, length: int) -> _Mutation:
    return lambda data: data[: place(data)] + data[place(data) + length :]


def _repeat(place: _Place, length: int, times: int) -> _Mutation:
    def apply(data: bytes) -> bytes:
        at = place(data)
        return data[:at] + data[at : at + length] * times + data[at:]

    return apply


def _cut(place: _Place) -> _Mutation:
    return lambda data: data[: place(data)]


def _splice(place: _Place, other_place: _Place, other: bytes) -> _Mutation:
    return lambda data: data[: place(data)] + other[other_place(other) :]
