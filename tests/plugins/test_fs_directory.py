"""An fs directory: its namespace, its least capacity, and foreign entries in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disk_use import fs_blocks, occupied_bytes
from tests.support.entries import OpenRig
from tiered_kv.errors import ConfigError, FormatError
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

BLOCK_BYTES = 4096
CAPACITY_BYTES = 4 << 20


def test_one_namespace_has_one_block_size(open_rig: OpenRig, path: Path) -> None:
    open_rig().close()
    with pytest.raises(FormatError, match="holds blocks of 4096 bytes, and these have 8192"):
        open_rig(block_bytes=8192)


def test_a_capacity_that_is_too_small_is_an_error_that_names_the_least(open_rig: OpenRig) -> None:
    with pytest.raises(ConfigError, match="capacity: 65536 bytes are too few for blocks of 4096; give at least 729088"):
        open_rig(capacity=65536)


def test_foreign_files_are_left_alone_and_count_against_the_capacity(open_rig: OpenRig, path: Path) -> None:
    rig = open_rig()
    rig.store(make_keys(2))
    shard = fs_blocks(path)[0].parent
    foreign = [path / "core.1234", path / "backup" / "old.kv", shard / "notes.txt", shard.parent / "zz" / "deep"]
    for entry in foreign:
        entry.parent.mkdir(exist_ok=True)
        entry.write_bytes(bytes(512 << 10))
    rig.reopen()
    for number in range(60):  # a store that comes before the sweep has made room may be refused
        keys = make_keys(16, f"batch-{number}")
        wait_until(lambda keys=keys: rig.store(keys).success)  # type: ignore[misc]
    stats = rig.tier.stats()
    assert stats["evicted_blocks_total"] > 0
    assert all(entry.stat().st_size == 512 << 10 for entry in foreign)
    assert occupied_bytes(path) <= CAPACITY_BYTES


def test_a_symbolic_link_in_the_place_of_a_block_is_not_followed(open_rig: OpenRig, path: Path, tmp_path: Path) -> None:
    rig = open_rig()
    keys = make_keys(8)
    rig.store(keys)
    victim = tmp_path / "victim"
    planted = fs_blocks(path)[0]
    content = planted.read_bytes()
    planted.rename(victim)
    planted.symlink_to(victim)
    (lost,) = [key for key in keys if not rig.lookup(key)]
    assert rig.load(keys) == set(keys) - {lost}
    assert rig.tier.stats()["failed_calls_total"]["not_a_file"] == 1
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)
    assert not planted.is_symlink(), "a block takes the place of a link"
    assert victim.read_bytes() == content


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_directory_in_the_place_of_a_block_is_a_miss(
    open_rig: OpenRig, path: Path, plant: Callable[[Path], None]
) -> None:
    rig = open_rig()
    keys = make_keys(1)
    rig.store(keys)
    (planted,) = fs_blocks(path)
    planted.unlink()
    plant(planted)
    assert rig.load(keys) == set()
    assert not rig.lookup(keys[0])
