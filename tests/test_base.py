"""The engine's contract: names, signatures and derived sizes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv import base, mediums
from tiered_kv.backend import Backend
from tiered_kv.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion


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
