"""A traced child ends with the process that traces it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.support.children import Child
from tests.support.syscalls import _TracedChild
from tiered_kv.testing.control import wait_until


def wait_for_no_tracer() -> None:
    """Fork a child that waits for a tracer, print its id, and never trace it."""
    child = _TracedChild(lambda: None, wanted="main", log=Path(sys.argv[1]))
    assert child.wait_for_thread() == child._pid
    print(child._pid, flush=True)
    time.sleep(600.0)


def test_a_child_that_waits_for_a_tracer_ends_with_its_parent(tmp_path: Path) -> None:
    with Child(wait_for_no_tracer, str(tmp_path / "log")) as parent:
        process_id = int(parent.line())
        assert runs(process_id)
    wait_until(lambda: not runs(process_id), 20.0, what="its end")


def runs(process_id: int) -> bool:
    """Return whether a process exists and has not ended yet."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except OSError:  # it may end between the two system calls
        return False
