"""Calls of an attached program with many keys, and of many threads: as those of a stack."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiered_kv
from tests.support.host_server import BLOCK_BYTES, WAIT_S, serving, stack_of
from tiered_kv.server import connect, protocol
from tiered_kv.stack import facade
from tiered_kv.tiering.many_lookups import ManyLookups


def test_a_call_has_no_limit_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of the protocol has one: a call goes on as another one."""
    monkeypatch.setattr(connect, "_REQUEST_KEYS_MAX", 300)
    monkeypatch.setattr(protocol, "REQUEST_KEYS_MAX", 300)
    hashes = [b"%d" % number for number in range(1000)]
    blocks = np.arange(1000, dtype=np.uint32).repeat(BLOCK_BYTES // 4).reshape(1000, -1)
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    for stack, ahead in ((stack_of(1100), 550), (stack_of(256, secondary=[nvme]), 128)):
        with serving(tmp_path, stack) as served, tiered_kv.connect(served.address) as cache:
            for first in range(0, 1000, 50):
                assert cache.put(hashes[first : first + 50], blocks[first : first + 50], timeout=WAIT_S) == 50
                assert cache.flush(WAIT_S)
            assert cache.contains(hashes, WAIT_S) == 1000
            out = np.zeros_like(blocks)
            assert cache.get(hashes, out, WAIT_S) == 1000
            assert (out == blocks).all()
            assert cache.prefetch(hashes, WAIT_S) == ahead
            assert len(cache.get([*hashes[:700], b"unknown", *hashes[701:]], timeout=WAIT_S)) == 700


def test_a_put_names_each_block_to_the_server_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, stack_of(1024)) as served, tiered_kv.connect(served.address) as cache:
        named: list[int] = []
        prepare = connect.ProgramManager.prepare_store

        def counted(self: Any, keys: Any, context: Any) -> Any:  # Any: as `prepare_store`
            output = prepare(self, keys, context)
            named.append(0 if output is None else len(keys))
            return output

        monkeypatch.setattr(connect.ProgramManager, "prepare_store", counted)
        hashes = [b"%d" % number for number in range(900)]
        assert cache.put(hashes, np.zeros((900, BLOCK_BYTES), np.uint8), timeout=WAIT_S) == 900
        assert sum(named) == 900


def test_a_put_counts_what_is_then_found(tmp_path: Path) -> None:
    hashes = [b"%d" % number for number in range(64)]
    with serving(tmp_path, stack_of(64)) as served, tiered_kv.connect(served.address) as cache:
        put = cache.put(hashes, np.zeros((64, BLOCK_BYTES), np.uint8), timeout=WAIT_S)
        assert put == cache.contains(hashes, WAIT_S) == len(cache.get(hashes, timeout=WAIT_S))
        assert put >= 64 - 16  # rows that were granted in advance have no block


def test_a_server_finds_the_blocks_that_a_put_has_stored_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, look_up = list[int](), ManyLookups.contains_many

    def looking_up(self: Any, keys: Any, context: Any) -> Any:  # Any: as `contains_many`
        looked_up.append(len(keys))
        return look_up(self, keys, context)

    monkeypatch.setattr(ManyLookups, "contains_many", looking_up)
    hashes = [b"%d" % number for number in range(1000, 1600)]
    with serving(tmp_path, stack_of(1024)) as served, tiered_kv.connect(served.address) as cache:
        assert cache.put(hashes, np.zeros((600, BLOCK_BYTES), np.uint8), timeout=WAIT_S) == 600
        assert not looked_up
        assert cache.contains([*hashes[:3], b"9999"], WAIT_S) == 3
        assert looked_up == [4]


def test_a_put_whose_time_is_over_counts_what_it_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask the server takes time, too: without it, a put of many blocks would have stored all, and count none."""
    follow = facade.BlockFacade._follow

    def follow_late(self: Any, keys: Any, context: Any, _end_s: float, *rest: Any, **others: Any) -> int:
        return follow(self, keys, context, 0.0, *rest, **others)

    hashes = [b"%d" % number for number in range(600)]
    with serving(tmp_path, stack_of(1024)) as served, tiered_kv.connect(served.address) as cache:
        monkeypatch.setattr(facade, "_COUNT_STALL_S", WAIT_S)
        monkeypatch.setattr(facade.BlockFacade, "_follow", follow_late)
        assert cache.put(hashes, np.zeros((600, BLOCK_BYTES), np.uint8), timeout=WAIT_S) == 600


@pytest.mark.one_quick(2)
@pytest.mark.parametrize("programs", [1, 2])
def test_threads_of_programs_get_all_that_is_stored(tmp_path: Path, programs: int) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    hashes = [[b"%d %d" % (value, number) for number in range(20)] for value in range(3)]
    with (
        serving(tmp_path, stack_of(16, secondary=[nvme])) as served,
        ExitStack() as opened,
        ThreadPoolExecutor(8) as pool,
    ):
        caches = [opened.enter_context(tiered_kv.connect(served.address)) for _ in range(programs)]
        for value, keys in enumerate(hashes):
            for first in range(0, 20, 4):
                content = np.full((4, BLOCK_BYTES), value, np.uint8)
                assert caches[0].put(keys[first : first + 4], content, timeout=WAIT_S) == 4
                assert caches[0].flush(WAIT_S)

        def use(number: int) -> list[int]:
            cache, counts = caches[number % programs], []
            for turn in range(3):
                value = (number + turn) % 3
                found = cache.get(hashes[value], timeout=WAIT_S)
                assert (found == value).all()
                counts += [len(found), cache.prefetch(hashes[value], WAIT_S)]
            return counts

        assert list(pool.map(use, range(8))) == [[20, 8] * 3] * 8
