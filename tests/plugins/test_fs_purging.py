"""What a purge does beside others: it leaves nothing of processes that were killed, and disturbs nobody who goes on."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack, closing
from pathlib import Path

from tests.support.disk_use import fs_ledger, occupied_bytes
from tests.support.entries import rig_of
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv.tiering.administration import Purged
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.settings import FsSettings

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 16 << 20
PURGED, OTHER = bytes(range(16)), bytes(range(16, 32))


def as_killed(path: Path, *namespaces: bytes) -> Path:
    """Return a directory as processes that were killed leave it, each with a block of a namespace."""
    entry = {"type": "fs", "path": str(path), "capacity": CAPACITY_BYTES}
    with ExitStack() as running:
        for namespace in namespaces:
            rig = running.enter_context(closing(rig_of(entry, block_bytes=BLOCK_BYTES, namespace=namespace)))
            assert rig.store(make_keys(1)).success
        return shutil.copytree(path, path.with_name("killed"))


def purge(path: Path) -> Purged:
    settings = FsSettings(path=str(path), capacity=CAPACITY_BYTES)
    return FsAdministration(settings).purge(PURGED.hex(), time.monotonic() + 60)


def test_what_a_killed_process_has_noted_of_itself_is_purged_too(tmp_path: Path) -> None:
    path = as_killed(tmp_path / "kv", PURGED, OTHER)
    assert len(fs_ledger(path)["holders"]) == 2
    purged = purge(path)
    assert (purged.blocks, purged.left) == (1, ())
    assert [each for each in path.rglob("*") if each.is_file() and PURGED.hex().encode() in each.read_bytes()] == []
    (other,) = fs_ledger(path)["holders"].values()
    assert other["namespace"] == OTHER.hex()


def test_the_grant_of_a_killed_process_does_not_stay_in_the_total(tmp_path: Path) -> None:
    path = as_killed(tmp_path / "kv", PURGED)
    purge(path)
    other = rig_of(
        {"type": "fs", "path": str(path), "capacity": CAPACITY_BYTES}, block_bytes=BLOCK_BYTES, namespace=OTHER
    )
    try:
        assert not other.lookup(make_keys(1)[0])
        wait_until(lambda: other.tier.stats()["surveys_total"])
        assert occupied_bytes(path) <= fs_ledger(path)["total_bytes"] <= occupied_bytes(path) + (128 << 10)
    finally:
        other.close()
