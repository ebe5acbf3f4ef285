"""An fs tier on real file systems: one that allocates many blocks at once, and small ones that another program fills.

`test_fs_mounts.py FOLDER KIND` is a program that runs in a new mount namespace, and prints its findings as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_use import occupied_bytes
from tests.support.entries import rig_of
from tests.support.mounts import Ext4Image, command_in_namespace, missing_for_ext4, missing_for_tmpfs, small_tmpfs
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.settings import FsSettings

pytestmark = pytest.mark.slow

BLOCK_BYTES = 64 << 10
CAPACITY_BYTES = 48 << 20
DISK_BYTES = 256 << 20
NAMESPACE = bytes(range(16))


@pytest.mark.parametrize("cluster_bytes", [64 << 10, 256 << 10])
def test_the_capacity_holds_where_a_file_takes_more_than_its_size(tmp_path: Path, cluster_bytes: int) -> None:
    if missing := missing_for_ext4():
        pytest.skip(missing)
    found = run(tmp_path, f"clusters-{cluster_bytes}")
    assert found["stored"] > 0
    assert CAPACITY_BYTES // 2 < found["used_bytes"] <= CAPACITY_BYTES


@pytest.mark.parametrize("kind", ["tmpfs", "tmpfs-inodes", "ext4", "ext4-inodes"])
def test_blocks_give_way_where_another_program_fills_the_disk(tmp_path: Path, kind: str) -> None:
    if missing := missing_for_ext4() if kind.startswith("ext4") else missing_for_tmpfs():
        pytest.skip(missing)
    found = run(tmp_path, kind)
    assert found == {"full": True, "stored": 10, "loaded": True, "later": True, "purged": True, "left": []}


def run(folder: Path, kind: str) -> dict[str, Any]:
    done = subprocess.run(
        command_in_namespace([sys.executable, __file__, str(folder), kind]),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    if kind.startswith("clusters-"):
        print(json.dumps(on_clusters(folder, int(kind.partition("-")[2]))))
        return
    with mounted(folder, kind) as point:
        print(json.dumps(on_a_full_disk(point)))


def on_clusters(folder: Path, cluster_bytes: int) -> dict[str, object]:
    options = ["-O", "bigalloc", "-C", str(cluster_bytes)]
    with Ext4Image(folder / "image", folder / "point", size_bytes=DISK_BYTES, options=options):
        path = folder / "point" / "kv"
        used, is_over = [0], threading.Event()

        def watch() -> None:
            while not is_over.wait(0.02):
                used.append(occupied_bytes(path))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with closing(rig(path)) as tier:
                stored = sum(tier.store(make_keys(16, f"job-{number}")).success for number in range(60))
        finally:
            is_over.set()
            watcher.join()
    return {"stored": stored, "used_bytes": max(used)}


@contextlib.contextmanager
def mounted(folder: Path, kind: str) -> Iterator[Path]:
    name, _, runs_out = kind.partition("-")
    if name == "tmpfs":
        with small_tmpfs(folder / "point", DISK_BYTES if runs_out else 2 * CAPACITY_BYTES) as point:
            if runs_out:
                subprocess.run(["mount", "-o", "remount,nr_inodes=1000", str(point)], check=True)
            yield point
        return
    options = ["-N", "1000"] if runs_out else []
    with Ext4Image(folder / "image", folder / "point", size_bytes=DISK_BYTES, options=options):
        yield folder / "point"


def on_a_full_disk(point: Path) -> dict[str, object]:
    path = point / "kv"
    with closing(rig(path)) as tier:
        for number in range(10):
            assert tier.store(make_keys(16, f"old-{number}")).success
    is_full = fill(point)
    with closing(rig(path)) as tier:
        new = [make_keys(4, f"new-{number}") for number in range(10)]
        stored = sum(tier.store(keys).success for keys in new)
        loaded = tier.load(new[-1]) == set(new[-1])
    with closing(rig(path)) as tier:
        later = all(map(tier.lookup, new[-1]))
    fill(point)
    administration = FsAdministration(FsSettings(path=str(path), capacity=CAPACITY_BYTES))
    purged = administration.purge(NAMESPACE.hex(), float("inf"))
    return {
        "full": is_full,
        "stored": stored,
        "loaded": loaded,
        "later": later,
        "purged": bool(purged.blocks),
        "left": purged.left,
    }


def fill(point: Path) -> bool:
    """Take every byte, and then every inode; return whether none is left of one of them."""
    others = point / "others"
    with contextlib.suppress(OSError):
        others.mkdir(exist_ok=True)
        for size_bytes in (1 << 20, 4096, 0):
            with contextlib.suppress(OSError):
                for _ in range(5000 if size_bytes else 1500):
                    with open(others / os.urandom(8).hex(), "wb", buffering=0) as file:
                        if size_bytes and file.write(bytes(size_bytes)) < size_bytes:
                            break
    try:
        (point / "one more").write_bytes(bytes(4096))
    except OSError:
        return True
    return False


def rig(path: Path) -> TierRig:
    entry = {"type": "fs", "path": str(path), "capacity": CAPACITY_BYTES, "threads": 4, "job_timeout": "60s"}
    return rig_of(entry, block_bytes=BLOCK_BYTES, num_blocks=64, namespace=NAMESPACE)


if __name__ == "__main__":
    main()
