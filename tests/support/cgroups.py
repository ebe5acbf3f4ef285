"""Cgroups with a limit, for tests that are root: of memory, or of reserved huge pages; of version 1 or 2."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
_numbers = itertools.count()


@contextmanager
def cgroup(controller: Literal["memory", "hugetlb"], limits: dict[str, int]) -> Iterator[Path]:
    """Make a cgroup with limits, and remove it; skip the test if that fails.

    The limits have their names of version 2, without the controller's. A controller that this turns on stays on.
    """
    root, names = _root_of(controller)
    group = root / f"tiered-kv-test-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
        for name, amount in limits.items():
            (group / f"{controller}.{names(name)}").write_text(str(amount))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup with a limit of {controller} can be made here: {error}")
    try:
        yield group
    finally:
        for _ in range(100):  # the kernel may still count a process that has ended
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def run_in(group: Path, program: str, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a Python program as a process of a cgroup."""
    enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    command = [sys.executable, "-c", enter + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _root_of(controller: str):  # type: ignore[no-untyped-def]  # a folder, and how its files are named
    if os.geteuid():
        pytest.skip("making a cgroup takes root")
    if (folder := Path("/sys/fs/cgroup", controller)).is_dir():
        return folder, lambda name: name.replace("max", "limit_in_bytes")
    for root in map(Path, _ROOTS):
        with suppress(OSError):
            if controller in (root / "cgroup.controllers").read_text().split():
                (root / "cgroup.subtree_control").write_text(f"+{controller}")
                return root, lambda name: name
    pytest.skip(f"there is no cgroup with {controller} here")
