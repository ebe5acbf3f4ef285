"""Values of any length up to a block: they come back as they are or not at all, and are no blocks."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiered_kv
from tests.support.host_server import serving
from tests.support.host_server import stack_of as served_stack
from tests.support.stacks import PATIENT, forget_memory, manager_of, stack_of
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack import values
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.stack.values import GROUP, HEADER_BYTES, Values, _frame, _value
from tiered_kv.system.log_limit import LogLimit

BLOCK_BYTES = 512
LENGTH_MAX = BLOCK_BYTES - HEADER_BYTES
WAIT_S = 60.0
KEY = make_offload_key(b"key", GROUP)
CODECS = ["none", *(["zstd"] if importlib.util.find_spec("zstandard") else [])]
VALUES = st.dictionaries(st.binary(min_size=1, max_size=40), st.binary(max_size=LENGTH_MAX), max_size=9)


def opened(path: Path, tier: str = "", codec: str = "none", *, blocks: int = 16) -> Stack:
    place: dict[str, object] = {} if tier == "memory" else {"path": str(path / tier)}
    if codec != "none":
        place["codec"] = codec
    entry = {"type": tier, "capacity": "64MiB", **place, **PATIENT}
    return open_stack(stack_of(*([entry] if tier else []), block_bytes=BLOCK_BYTES, blocks=blocks))


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("tier", "codec"),
    [("", "none"), ("memory", "none"), *((tier, codec) for tier in ("nvme", "fs") for codec in CODECS)],
)
def test_values_come_back_as_they_are(tmp_path: Path, tier: str, codec: str) -> None:
    known: dict[bytes, bytes] = {}
    with opened(tmp_path, tier, codec) as stack:

        @settings(max_examples=settings().max_examples // 3, suppress_health_check=[HealthCheck.differing_executors])
        @given(VALUES, st.booleans())
        def check(values: dict[bytes, bytes], leaves_memory: bool) -> None:
            assert stack.values.put_many(values, timeout=WAIT_S) == len(values)
            for key, value in values.items():
                known.setdefault(key, value)
            if leaves_memory and tier:
                assert stack.flush(WAIT_S)
                forget_memory(manager_of(stack))
            found = stack.values.get_many([*values, b"absent", *values], WAIT_S)
            expected = [known[key] for key in values]
            assert found == [*expected, None, *expected]

        check()


def test_a_value_and_a_block_may_have_the_same_key(tmp_path: Path) -> None:
    with opened(tmp_path, "nvme") as stack:
        block = np.arange(BLOCK_BYTES, dtype=np.uint16).astype(np.uint8).reshape(1, BLOCK_BYTES)
        assert stack.values.get(b"key") is None
        assert stack.put([b"key"], block) == 1
        assert stack.values.get(b"key", WAIT_S) is None
        assert not stack.values.contains(b"key", WAIT_S)
        assert stack.values.put(b"key", b"value", timeout=WAIT_S)
        assert stack.values.contains(b"key", WAIT_S)
        assert stack.values.get(b"key", WAIT_S) == b"value"
        assert np.array_equal(stack.get([b"key"], timeout=WAIT_S), block)


def test_a_key_keeps_its_value(tmp_path: Path) -> None:
    with opened(tmp_path) as stack:
        assert stack.values.put(b"key", b"first")
        assert stack.values.put(b"key", b"second")
        assert stack.values.get(b"key") == b"first"


def test_buffers_of_any_kind_are_values(tmp_path: Path) -> None:
    with opened(tmp_path) as stack:
        numbers = np.arange(24, dtype=np.float32)
        assert stack.values.put_many({b"array": numbers, b"view": memoryview(b"ab"), b"empty": b""}) == 3
        array, view, empty = stack.values.get_many([b"array", b"view", b"empty"])
        assert array is not None
        assert np.array_equal(np.frombuffer(array, np.float32), numbers)
        assert (view, empty) == (b"ab", b"")


def test_a_value_that_is_too_long_names_the_limit(tmp_path: Path) -> None:
    with opened(tmp_path) as stack:
        assert stack.values.bytes_max == LENGTH_MAX
        assert stack.values.put(b"key", bytes(LENGTH_MAX))
        with pytest.raises(
            ValueError, match=rf"at most {LENGTH_MAX} bytes here, found {LENGTH_MAX + 1}: raise block.by"
        ):
            stack.values.put_many({b"one": b"", b"two": bytes(LENGTH_MAX + 1)})
        assert stack.values.get(b"one") is None, "nothing of the call was stored"
        for key in ("text", b""):
            with pytest.raises(TypeError, match="bytes that are not empty"):
                stack.values.get(key)  # type: ignore[arg-type]
    with open_stack(stack_of(block_bytes=HEADER_BYTES - 1)) as small:
        assert small.values.bytes_max == 0
        with pytest.raises(ValueError, match="at most 0 bytes here"):
            small.values.put(b"key", b"")


def test_a_value_that_is_away_hides_no_other(tmp_path: Path) -> None:
    keys = [b"%d" % number for number in range(40)]
    with opened(tmp_path, "nvme", blocks=8) as stack:
        assert stack.values.put_many({key: key for key in keys[::3]}, timeout=WAIT_S) == len(keys[::3])
        assert stack.flush(WAIT_S)
        before = count_of(stack.counters()["nvme"], "misses_total")
        expected = [key if number % 3 == 0 else None for number, key in enumerate(keys)]
        assert stack.values.get_many(keys, WAIT_S) == expected
        assert count_of(stack.counters()["nvme"], "misses_total") - before == expected.count(None)


def test_more_values_than_memory_holds_are_not_promised(tmp_path: Path) -> None:
    keys = [b"%d" % number for number in range(20)]
    with opened(tmp_path, blocks=8) as stack:
        stored = stack.values.put_many({key: key for key in keys}, timeout=0.0)
        assert 0 < stored <= 8
        assert stack.values.get_many(keys)[:stored] == keys[:stored]


def test_a_reset_removes_values(tmp_path: Path) -> None:
    with opened(tmp_path, "nvme") as stack:
        epoch = stack.epoch
        assert stack.values.put(b"key", b"old", timeout=WAIT_S)
        stack.reset_cache()
        assert stack.values.get(b"key", WAIT_S) is None
        assert stack.values.put_many({b"key": b"old"}, epoch=epoch) == 0
        assert stack.values.get(b"key", WAIT_S) is None


def test_values_can_be_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        async with tiered_kv.AsyncStack(opened(tmp_path, "memory")) as stack:
            assert stack.values.bytes_max == LENGTH_MAX
            assert await stack.values.put(b"one", b"1", timeout=WAIT_S)
            assert await stack.values.put_many({b"two": b"2"}, timeout=WAIT_S) == 1
            assert await stack.values.get_many([b"one", b"absent", b"two"], WAIT_S) == [b"1", None, b"2"]
            assert await stack.values.get(b"two", WAIT_S) == b"2"
            assert await stack.values.contains(b"one", WAIT_S)

    asyncio.run(main())


def test_programs_of_a_host_share_values(tmp_path: Path) -> None:
    long = b"a key of a program" * 100
    with (
        serving(tmp_path, served_stack()) as served,
        tiered_kv.connect(served.address) as first,
        tiered_kv.connect(served.address) as second,
    ):
        assert first.values.put_many({b"key": b"value", long: b"other"}, timeout=WAIT_S) == 2
        assert second.values.get_many([long, b"absent", b"key"], WAIT_S) == [b"other", None, b"value"]
        assert second.values.contains(long, WAIT_S)


# A frame that is not whole is no value.


def framed(value: bytes, key: OffloadKey = KEY) -> bytearray:
    row = np.full(BLOCK_BYTES, 255, np.uint8)
    _frame(row, key, np.frombuffer(value, np.uint8))
    return bytearray(row.tobytes())


def value_in(row: bytes | bytearray, key: OffloadKey = KEY) -> bytes | None:
    return _value(np.frombuffer(row, np.uint8), key)


@given(
    st.binary(max_size=LENGTH_MAX),
    st.lists(st.tuples(st.integers(0, BLOCK_BYTES - 1), st.integers(1, 255)), min_size=1),
)
def test_a_damaged_frame_gives_no_wrong_bytes(value: bytes, damages: list[tuple[int, int]]) -> None:
    row = framed(value)
    assert value_in(row) == value
    for at, bits in damages:
        row[at] ^= bits
    assert value_in(row) in (None, value)  # damage behind the value changes nothing
    if any(row[at] != framed(value)[at] for at in range(HEADER_BYTES + len(value))):
        assert value_in(row) is None


def test_a_block_is_zero_behind_its_value() -> None:
    assert not any(framed(b"value")[HEADER_BYTES + 5 :]), "and tells nothing of what was in memory"


@given(st.binary(max_size=9), st.integers(0, 2**64 - 1))
def test_another_length_gives_no_wrong_bytes(value: bytes, length: int) -> None:
    row = framed(value)
    row[8:16] = length.to_bytes(8, "little")
    assert value_in(row) == (value if length == len(value) else None)


@given(st.binary(min_size=1, max_size=9), st.binary(min_size=1, max_size=9))
def test_a_value_under_another_key_is_none_of_it(one: bytes, other: bytes) -> None:
    keys = make_offload_key(one, GROUP), make_offload_key(other, GROUP)
    assert (value_in(framed(b"value", keys[0]), keys[1]) is None) is (one != other)


@pytest.mark.parametrize("row", [bytes(BLOCK_BYTES), bytes(8), b"", bytes(range(256)) * 2])
def test_a_block_is_no_value(row: bytes) -> None:
    assert value_in(row) is None


def test_a_foreign_block_under_the_key_of_a_value_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "_limit", LogLimit())
    with opened(tmp_path) as stack:
        manager = manager_of(stack)
        context = tiered_kv.base.ReqContext("engine")
        manager.on_new_request(context)
        assert manager.prepare_store([KEY], context) is not None
        manager.complete_store([KEY], context, True)
        manager.on_request_finished(context)
        assert stack.values.get(b"key") is None
        assert stack.values.get_many([b"key", b"absent"]) == [None, None]
    assert caplog.text.count("is no value of it") == 1


def test_the_view_needs_no_state(tmp_path: Path) -> None:
    with opened(tmp_path) as stack:
        assert isinstance(stack.values, Values)
        assert stack.values.epoch == stack.epoch == 0
    with pytest.raises(tiered_kv.ShutdownError):
        stack.values.get(b"key")
