"""A purge of a shared directory beside processes that were killed or go on."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack, closing
from pathlib import Path

from tests.support.disk_use import fs_ledger, occupied_bytes
from tests.support.entries import rig_of
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.settings import FsSettings

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 16 << 20
PURGED, OTHER = bytes(range(16)), bytes(range(16, 32))


def test_a_purge_removes_a_killed_process_from_the_ledger_with_its_grant(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    entry = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": CAPACITY_BYTES}
    with ExitStack() as running:
        for namespace in (PURGED, OTHER):
            rig = running.enter_context(closing(rig_of(entry, block_bytes=BLOCK_BYTES, namespace=namespace)))
            assert rig.store(make_keys(1)).success
        shutil.copytree(tmp_path / "kv", path)  # as killed processes leave it
    assert len(fs_ledger(path)["holders"]) == 2

    administration = FsAdministration(FsSettings(path=str(path), capacity=CAPACITY_BYTES))
    purged = administration.purge(PURGED.hex(), time.monotonic() + 60)
    assert (purged.blocks, purged.left) == (1, ())
    assert [each for each in path.rglob("*") if each.is_file() and PURGED.hex().encode() in each.read_bytes()] == []
    (other,) = fs_ledger(path)["holders"].values()
    assert other["namespace"] == OTHER.hex()

    entry["path"] = str(path)
    with closing(rig_of(entry, block_bytes=BLOCK_BYTES, namespace=OTHER)) as rig:
        assert not rig.lookup(make_keys(2)[1])
        wait_until(lambda: rig.tier.stats()["surveys_total"])
        granted = sum(holder["granted_bytes"] for holder in fs_ledger(path)["holders"].values())
        assert occupied_bytes(path) <= fs_ledger(path)["total_bytes"] <= occupied_bytes(path) + granted + (128 << 10)
