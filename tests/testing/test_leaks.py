"""What a test leaves behind is found, and what it does not is not."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from tiered_kv.testing.gate import Gate
from tiered_kv.testing.leaks import Footprint, left_behind


def test_nothing_is_found_where_nothing_is_left(temporary_directory: Path) -> None:
    before = Footprint.take(temporary_directory)
    with tempfile.TemporaryFile():
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    assert left_behind(before, temporary_directory, grace_s=0) == []


def test_a_thread_that_is_left_is_named(temporary_directory: Path, gate: Gate) -> None:
    before = Footprint.take(temporary_directory)
    gate.close()
    threading.Thread(target=gate.pass_through, name="left alone", daemon=True).start()
    assert left_behind(before, temporary_directory, grace_s=0) == ["thread 'left alone'"]


def test_a_thread_that_is_about_to_end_is_waited_for(temporary_directory: Path, gate: Gate) -> None:
    before = Footprint.take(temporary_directory)
    gate.close()
    threading.Thread(target=gate.pass_through).start()
    gate.open()
    assert left_behind(before, temporary_directory, grace_s=60) == []


def test_a_descriptor_that_is_left_is_named(temporary_directory: Path) -> None:
    before = Footprint.take(temporary_directory)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    left = left_behind(before, temporary_directory, grace_s=0)
    os.close(descriptor)
    assert left == [f"file descriptor {descriptor} of {os.devnull}"]


def test_a_temporary_file_that_is_left_is_named(temporary_directory: Path) -> None:
    before = Footprint.take(temporary_directory)
    descriptor, path = tempfile.mkstemp()
    os.close(descriptor)
    left = left_behind(before, temporary_directory, grace_s=0)
    os.unlink(path)
    assert left == [f"temporary file {Path(path).name}"]


def test_shared_memory_that_is_left_is_named(temporary_directory: Path) -> None:
    before = Footprint.take(temporary_directory)
    path = Path("/dev/shm", f"tiered-kv-test-{os.getpid()}")
    path.touch()
    left = left_behind(before, temporary_directory, grace_s=0)
    path.unlink()
    assert f"shared memory {path}" in left
