"""What a purge leaves of processes that were killed: nothing in the namespace's own, everything in the others'."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tiered_kv.testing.disk_use import occupied_bytes
from tiered_kv.testing.entries import rig_of
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.layout import LEDGER_NAME, OWNERS_NAME
from tiered_kv_fs.ledger import Ledger, LedgerState
from tiered_kv_fs.owner import Owner
from tiered_kv_fs.settings import FsSettings

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 16 << 20
GRANT_BYTES = 15 * CAPACITY_BYTES // 256
"""What is asked of the ledger at once, and a little less."""
BLOCKS = 1
PURGED, OTHER = bytes(range(16)), bytes(range(16, 32))

PROGRAM = """
import os, signal, sys
from tiered_kv.testing.entries import rig_of
from tiered_kv.testing.rig import make_keys

path, namespace, capacity = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
rig = rig_of({"type": "fs", "path": path, "capacity": capacity}, block_bytes=65536, namespace=namespace)
assert rig.store(make_keys(1)).success
os.kill(os.getpid(), signal.SIGKILL)
"""


def be_killed(path: Path, namespace: bytes) -> None:
    """Have a process store blocks and be killed."""
    command = [sys.executable, "-c", PROGRAM, str(path), namespace.hex(), str(CAPACITY_BYTES)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def purge(path: Path) -> int:
    """Purge the namespace; return how many blocks were removed."""
    settings = FsSettings(path=str(path), capacity=CAPACITY_BYTES)
    removed = FsAdministration(settings).purge(PURGED.hex(), time.monotonic() + 60)
    assert removed.left == ()
    return removed.blocks or 0


def notes(path: Path, namespace: bytes) -> list[Path]:
    """Return the owners' files of a namespace."""
    return [each for each in (path / OWNERS_NAME).iterdir() if namespace.hex().encode() in each.read_bytes()]


def ledger_of(path: Path) -> LedgerState:
    with Ledger(f"{path}/{LEDGER_NAME}", 60.0).locked() as state:
        return state


def test_what_a_killed_process_has_noted_of_itself_is_purged_too(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    be_killed(path, PURGED)
    assert len(notes(path, PURGED)) == 1
    assert purge(path) == BLOCKS
    assert os.listdir(path / OWNERS_NAME) == []
    assert [each for each in path.rglob("*") if each.is_file() and PURGED.hex().encode() in each.read_bytes()] == []
    assert ledger_of(path).grants == {}


def test_the_grant_of_a_killed_process_does_not_stay_in_the_total(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    entry = {"type": "fs", "path": str(path), "capacity": CAPACITY_BYTES}
    other = rig_of(entry, block_bytes=BLOCK_BYTES, namespace=OTHER)
    try:
        assert other.store(make_keys(4, "first")).success
        be_killed(path, PURGED)
        assert purge(path) == BLOCKS
        for number in range(3):  # more than one grant
            assert other.store(make_keys(8, f"batch-{number}")).success

        def surplus_bytes() -> int:
            state = ledger_of(path)
            assert state.total_bytes is not None
            return state.total_bytes - occupied_bytes(path) - other.tier.stats()["granted_bytes"]

        # It gives back what it has not used for a while, perhaps between two of these looks.
        wait_until(lambda: 0 <= surplus_bytes() < GRANT_BYTES // 4)
        assert len(notes(path, OTHER)) == 1, "who is alive is left alone"
    finally:
        other.close()


def test_who_uses_the_namespace_and_who_ended_in_another_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    be_killed(path, OTHER)
    (of_other,) = notes(path, OTHER)
    text = of_other.read_bytes()
    be_killed(path, PURGED)  # its opening has forgotten the other
    (of_killed,) = notes(path, PURGED)
    of_other.write_bytes(text)
    user = Owner(str(path / OWNERS_NAME), PURGED.hex())
    try:
        user.note_epoch("0" * 16, 0)
        assert purge(path) == BLOCKS
        assert {each.name for each in (path / OWNERS_NAME).iterdir()} == {of_other.name, user.name}
        assert of_killed.name != user.name
    finally:
        user.close(remove_file=True)
