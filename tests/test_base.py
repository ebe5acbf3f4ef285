"""The engine's contract: names, signatures, derived sizes, and hints."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stacks import stack_of
from tiered_kv import abstract, base, mediums
from tiered_kv.backend import Backend
from tiered_kv.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from tiered_kv.config.stack_config import load_config
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError
from tiered_kv.hints import HINTS_KEY, SECONDS_MAX, HintReader, Hints


@given(block_hash=st.binary(max_size=100), group_idx=st.integers(0, 2**32 - 1))
def test_a_key_holds_its_hash_and_its_group(block_hash: bytes, group_idx: int) -> None:
    key = make_offload_key(block_hash, group_idx)
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group_idx
    assert key == block_hash + group_idx.to_bytes(4, "big")


def test_the_manager_has_the_twelve_methods_of_the_interface() -> None:
    methods = {name for name, _ in inspect.getmembers(OffloadingManager, inspect.isfunction)}
    assert methods == {
        "complete_load",
        "complete_store",
        "lookup",
        "on_new_request",
        "on_request_finished",
        "on_schedule_end",
        "prepare_load",
        "prepare_store",
        "reset_cache",
        "shutdown",
        "take_events",
        "touch",
    }
    assert OffloadingManager.__abstractmethods__ == {"lookup", "prepare_load", "prepare_store", "on_new_request"}


def test_a_manager_of_hash_lists_needs_only_lookups_and_transfers() -> None:
    class Manager(abstract.OffloadingManager):
        def lookup(self, block_hashes: Iterable[bytes]) -> int:
            return 0

        def prepare_load(self, block_hashes: Iterable[bytes]) -> abstract.LoadStoreSpec:
            return mediums.CPULoadStoreSpec([])

        def prepare_store(self, block_hashes: Iterable[bytes]) -> abstract.PrepareStoreOutput | None:
            return abstract.PrepareStoreOutput([], mediums.CPULoadStoreSpec([]), [])

    manager = Manager()
    manager.touch([b"a"])
    manager.complete_load([b"a"])
    manager.complete_store([b"a"])
    assert list(manager.take_events()) == []


def test_block_ids_are_int64() -> None:
    for spec in (mediums.CPULoadStoreSpec([3, 1]), mediums.GPULoadStoreSpec([3, 1], [2])):
        assert spec.block_ids.dtype == np.int64
        assert spec.block_ids.tolist() == [3, 1]
        assert "[3, 1]" in repr(spec)
    assert (mediums.CPULoadStoreSpec.medium(), mediums.GPULoadStoreSpec.medium()) == ("CPU", "GPU")
    assert base.GPULoadStoreSpec is mediums.GPULoadStoreSpec


def test_gpu_specs_check_that_their_groups_add_up() -> None:
    spec = mediums.GPULoadStoreSpec([1, 2, 3], group_sizes=[1, 2], block_indices=[0, 5])
    assert (spec.group_sizes, spec.block_indices) == ([1, 2], [0, 5])
    with pytest.raises(ValueError, match="sum to 2"):
        mediums.GPULoadStoreSpec([1, 2, 3], [1, 1])
    with pytest.raises(ValueError, match="1 block_indices for 2 groups"):
        mediums.GPULoadStoreSpec([1, 2, 3], [1, 2], [0])


def test_a_backend_s_blocks_are_writing_until_they_are_ready_and_have_a_row_each() -> None:
    backend: Backend = CPUBackend(region := PrimaryRegion(4, 64))
    keys = [make_offload_key(b"%d" % number, 0) for number in range(4)]
    blocks = backend.allocate_blocks(keys)
    assert {(block.ref_cnt, block.is_ready) for block in blocks} == {(-1, False)}
    spec = backend.get_load_store_spec(keys, blocks)
    assert isinstance(spec, mediums.CPULoadStoreSpec)
    assert sorted(spec.block_ids.tolist()) == [0, 1, 2, 3]
    region.close()


class Spec(OffloadingSpec):
    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[Any]:
        yield from ()


def make_spec(*block_sizes: int, context_parallel: tuple[int, int] = (1, 1), **extra: Any) -> Spec:
    decode, prefill = context_parallel
    hash_block_size = extra.pop("hash_block_size", None)
    engine = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(decode_context_parallel_size=decode, prefill_context_parallel_size=prefill),
    )
    if hash_block_size is not None:
        engine.cache_config = SimpleNamespace(hash_block_size=hash_block_size)
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in block_sizes]
    return Spec(engine, SimpleNamespace(kv_cache_groups=groups))


def test_a_spec_derives_its_block_sizes_from_the_engine() -> None:
    spec = make_spec(16, context_parallel=(2, 2), block_size=256)
    assert spec.gpu_block_size == (64,)
    assert spec.hash_block_size == 64
    assert spec.block_size_factor == 4
    assert spec.offload_prompt_only is True
    assert make_spec(16, offload_prompt_only=False).offload_prompt_only is False
    assert make_spec(16).block_size_factor == 1


def test_groups_of_several_sizes_are_hashed_at_what_divides_them_all() -> None:
    assert make_spec(16, 24).hash_block_size == 8
    assert make_spec(32, 64, hash_block_size=16).hash_block_size == 16


@pytest.mark.parametrize(
    ("sizes", "extra", "message"),
    [
        ((16,), {"block_size": 24}, "not a multiple of the GPU block of 16"),
        ((16,), {"block_size": 0}, "not a multiple"),
        ((16, 32), {"block_size": 64}, "one block size"),
        ((16, 32), {"hash_block_size": 24}, "not a multiple of the hash block of 24"),
    ],
)
def test_block_sizes_that_do_not_fit_are_an_error(sizes: tuple[int, ...], extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(*sizes, **extra)


# Hints are read strictly: a wrong one raises no error, and is counted once.


STACK = stack_of()


def test_every_hint_is_read() -> None:
    said = {"priority": 1, "ttl": 600, "expect_return": 0.5, "skip": "store"}
    assert Hints.parse(said) == Hints(1, 600, 0.5, skips_store=True)
    assert Hints.parse({"skip": ["load", "store"]}) == Hints(skips_store=True, skips_load=True)
    assert Hints.parse({"ttl": None, "skip": []}) == Hints.parse({}) == Hints()


@pytest.mark.parametrize(
    "said",
    [
        "priority",
        ["priority"],
        {"prioritty": 1},
        {1: 1},
        {"priority": 2},
        {"priority": True},
        {"priority": 1.0},
        {"priority": "high"},
        {"ttl": -1},
        {"ttl": SECONDS_MAX + 1},
        {"ttl": math.nan},
        {"ttl": math.inf},
        {"expect_return": "5s"},
        {"expect_return": 10**400},
        {"expect_return": False},
        {"skip": "everything"},
        {"skip": {"store": True}},
        {"skip": [["store"]]},
        {"skip": True},
        {"priority": 1, "ttl": "soon"},
    ],
    ids=repr,
)
def test_hints_that_cannot_be_used_are_none_and_are_counted(said: object) -> None:
    reader = HintReader()
    assert reader.read(ReqContext("", {HINTS_KEY: said})) is None
    assert (reader.hinted, reader.refused) == (0, 1)


def test_only_the_first_refusal_is_logged_and_repeats_nothing_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    reader = HintReader()
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            reader.read(ReqContext("", {HINTS_KEY: {"my secret\n": "my secret\n"}}))
    assert reader.refused == 3
    (record,) = caplog.records
    assert "secret" not in record.getMessage()


def test_other_parameters_are_ignored() -> None:
    reader = HintReader()
    no_mapping: Any = ["no mapping"]  # an engine may pass on whatever it got
    for params in (None, {}, {"do_remote_prefill": True, "ttl": "x"}, no_mapping):
        assert reader.read(ReqContext("", params)) is None
    assert (reader.hinted, reader.refused) == (0, 0)


def test_the_stack_s_file_says_which_hints_count() -> None:
    said = ReqContext("", {HINTS_KEY: {"priority": 1, "ttl": 60, "skip": "load"}})
    some, none = (load_config({**STACK, "hints": names}).hints for names in (["ttl", "skip"], []))
    assert HintReader(some).read(said) == Hints(0, 60, skips_load=True)
    assert HintReader(none).read(said) is None
    assert HintReader(load_config(STACK).hints).read(said) == Hints(1, 60, skips_load=True)
    with pytest.raises(ConfigError, match=r"hints\.0"):
        load_config({**STACK, "hints": ["lifetime"]})
