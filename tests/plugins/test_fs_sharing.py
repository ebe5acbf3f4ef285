"""Processes that share a directory: they find each other's blocks, keep one capacity, and survive each other's end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.disk_use import fs_blocks, fs_ledger, occupied_bytes
from tests.support.entries import rig_of
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv_fs.files import locked
from tiered_kv_fs.layout import TEMPORARY_BLOCK

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 8 << 20

PROGRAM = """
import sys
from tests.support.entries import rig_of
from tiered_kv.testing.rig import make_keys

path, namespace, capacity = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
entry = {"type": "fs", "path": path, "capacity": capacity, "threads": 4}
rig = rig_of(entry, block_bytes=65536, namespace=namespace)
for line in sys.stdin:
    verb, label, count = line.split()
    keys = make_keys(int(count), label)
    if verb == "store":
        answer = len(rig.succeeded(rig.wait([rig.submit_store(keys)])[0]))
    elif verb == "store_for_ever":
        print("begun", flush=True)
        for number in range(10**9):
            rig.store(make_keys(8, f"{label}-{number}"))
    print(answer, flush=True)
rig.close()
"""


class Process:
    """A process with a tier of its own on the directory, told line by line what to do."""

    def __init__(self, path: Path, namespace: bytes = bytes(range(16))) -> None:
        command = [sys.executable, "-c", PROGRAM, str(path), namespace.hex(), str(CAPACITY_BYTES)]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, verb: str, label: str, count: int) -> str:
        """Have something done, and return the answer."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(f"{verb} {label} {count}\n")
        self._popen.stdin.flush()
        return self._popen.stdout.readline().strip()

    def count(self, verb: str, label: str, count: int) -> int:
        """Have something done with blocks, and return with how many it was."""
        return int(self.ask(verb, label, count))

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def end(self) -> int:
        """Let the process end by itself, or wait for it if it has been killed."""
        with self._popen:
            if self._popen.stdin is not None:
                try:
                    self._popen.stdin.close()
                except BrokenPipeError:
                    pass
            return self._popen.wait(120)


Start = Callable[..., Process]


@pytest.fixture
def start(path: Path, closing: ExitStack) -> Start:
    """Start processes on the directory; what still runs at the end of the test is killed."""

    def start_one(namespace: bytes = bytes(range(16))) -> Process:
        process = Process(path, namespace)
        closing.callback(process.end)
        closing.callback(process.signal, signal.SIGKILL)
        return process

    return start_one


@pytest.fixture
def rig(path: Path, patient_fs_shutdown: None) -> Iterator[TierRig]:
    """A tier in this process."""
    entry = {"type": "fs", "path": str(path), "capacity": CAPACITY_BYTES, "threads": 4}
    rig = rig_of(entry, block_bytes=BLOCK_BYTES)
    yield rig
    rig.close()


def lapse(path: Path) -> None:
    """Have the ledger say that everybody was there last an hour ago, and temporary files be as old."""
    with locked(str(path / "lock"), 60.0):
        ledger = json.loads((path / "ledger").read_bytes())
        for holder in ledger["holders"].values():
            holder["seen_s"] -= 3600
        (path / "ledger").write_text(json.dumps(ledger))
    for entry in path.rglob("*.tmp"):
        with suppress(FileNotFoundError):
            os.utime(entry, (1, 1))


@pytest.mark.slow
def test_processes_that_store_more_than_fits_keep_the_capacity_together(start: Start, path: Path) -> None:
    writers = [start() for _ in range(2)]
    others = start(bytes(16))  # another namespace in the same capacity
    for number, writer in enumerate([*writers, others]):
        assert writer.ask("store_for_ever", f"writer-{number}", 0) == "begun"
    most = 0
    begin = time.monotonic()
    while time.monotonic() - begin < 6.0 or most <= CAPACITY_BYTES // 2:
        most = max(most, occupied_bytes(path))
        assert most <= CAPACITY_BYTES
        assert time.monotonic() - begin < 120.0, "they have not filled it"


@pytest.mark.slow
def test_what_a_killed_writer_left_is_swept_and_its_grant_is_free_again(start: Start, path: Path, rig: TierRig) -> None:
    for attempt in range(3):
        writer = start()
        assert writer.ask("store_for_ever", f"attempt-{attempt}", 0) == "begun"
        wait_until(lambda: len(fs_blocks(path)) > 20)
        writer.signal(signal.SIGKILL)
        writer.end()
    planted = fs_blocks(path)[0].parent / f".{'0' * 32}.{'a' * 16}.0.tmp"
    planted.write_bytes(bytes(1000))
    rig.tier.shutdown()
    lapse(path)
    rig.reopen()
    assert rig.store(make_keys(8, "reopened")).success
    wait_until(lambda: rig.tier.stats()["surveys_total"])
    assert [entry for entry in path.rglob("*") if TEMPORARY_BLOCK.fullmatch(entry.name)] == []
    assert len(fs_ledger(path)["holders"]) == 1, "those of the killed are gone"
    for number in range(40):
        assert rig.store(make_keys(8, f"after-{number}")).success
    assert occupied_bytes(path) <= CAPACITY_BYTES


@pytest.mark.slow
def test_a_process_that_lapsed_and_goes_on_stores_within_a_new_grant(start: Start, path: Path) -> None:
    stopped, other = start(), start()
    assert stopped.count("store", "before", 8) == 8
    assert other.count("store", "other", 8) == 8
    stopped.signal(signal.SIGSTOP)
    lapse(path)
    for number in range(20):  # more than fits: surveys and evicts
        other.count("store", f"other-{number}", 8)
        assert occupied_bytes(path) <= CAPACITY_BYTES
    stopped.signal(signal.SIGCONT)
    assert stopped.count("store", "after", 8) >= 0  # what it may lose is a store
    wait_until(lambda: stopped.count("store", "later", 8) == 8)
    assert occupied_bytes(path) <= CAPACITY_BYTES
    assert [stopped.end(), other.end()] == [0, 0]
    assert fs_ledger(path)["holders"] == {}


@pytest.mark.slow
def test_a_process_that_stands_still_with_the_ledger_keeps_stores_waiting_for_a_bounded_time_and_no_loads(
    path: Path, rig: TierRig
) -> None:
    keys = make_keys(4)
    assert rig.store(keys).success
    with locked(str(path / "lock"), 60.0):
        begin = time.monotonic()
        far = begin + 3600.0
        stores = rig.wait([rig.submit_store(make_keys(8, f"batch-{number}"), deadline=far) for number in range(20)])
        assert time.monotonic() - begin < 40.0, "each waited for itself, five seconds"
        assert not all(result.success for result in stores)
        assert {result.reason for result in stores if not result.success} <= {"timeout", "no_space"}
        assert rig.load(keys) == set(keys)
    wait_until(lambda: rig.store(make_keys(8, "afterwards")).success)
