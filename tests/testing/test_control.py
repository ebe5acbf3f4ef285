"""A footprint finds the resources that a test leaves behind, and no others; the page about testing works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.faulty import Gate
from tests.support.footprint import Footprint, left_behind
from tests.support.pages import write_shown


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


def descriptor() -> tuple[str, Callable[[], None]]:
    number = os.open(os.devnull, os.O_RDONLY)
    return f"file descriptor {number} of {os.devnull}", lambda: os.close(number)


def test_what_a_gpu_s_driver_keeps_open_is_no_leak(
    temporary_directory: Path, monkeypatch: pytest.MonkeyPatch, closing: ExitStack
) -> None:
    before = Footprint.take(temporary_directory)
    line, close = descriptor()
    closing.callback(close)
    own = f"/proc/self/fd/{line.split()[2]}"
    follow = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidiactl" if path == own else follow(path))
    assert left_behind(before, temporary_directory, grace_s=0) == []


def temporary_file() -> tuple[str, Callable[[], None]]:
    number, path = tempfile.mkstemp()
    os.close(number)
    return f"temporary file {Path(path).name}", Path(path).unlink


def shared_memory() -> tuple[str, Callable[[], None]]:
    path = Path("/dev/shm", f"tiered-kv-test-{os.getpid()}")
    path.touch()
    return f"shared memory {path}", path.unlink


@pytest.mark.parametrize("leave", [descriptor, temporary_file, shared_memory])
def test_a_resource_that_is_left_is_named(
    temporary_directory: Path, leave: Callable[[], tuple[str, Callable[[], None]]]
) -> None:
    before = Footprint.take(temporary_directory)
    name, remove = leave()
    left = left_behind(before, temporary_directory, grace_s=0)
    remove()
    assert name in left


# The code in docs/how-to/testing.md works.


@pytest.mark.slow
@pytest.mark.full
def test_the_tests_on_the_page_pass(tmp_path: Path) -> None:
    names = write_shown("how-to/testing.md", tmp_path)
    assert names == ["test_my_tier.py", "test_my_network_tier.py", "test_my_stack.py"]
    # Without configurations of parent directories, and without a cache.
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "--basetemp", "temporary"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d\d passed", run.stdout), run.stdout
