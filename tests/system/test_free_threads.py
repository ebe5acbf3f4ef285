"""Python without its interpreter lock: the package warns there, and threads still tear no index.

`TIERED_KV_FREE_THREADED_PYTHON` names the interpreter of an environment with this package and its extra `test`. Without
it, the tests' own interpreter is taken if it is a free-threaded build, or `python3.15t` or `python3.14t`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.stacks import stack_of

IMPORT = """
import sys, warnings
sys._is_gil_enabled = lambda: {has_lock}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import tiered_kv
print([(each.category.__name__, str(each.message)) for each in told])
"""
RACE = """
import json, sys
from tests.support.races import Prompts, phantoms, problems_at_rest, race_facade
from tests.support.stacks import manager_of
from tiered_kv.stack.open import open_stack

prompts = Prompts(4096)
with open_stack(json.loads(sys.argv[1])) as stack:
    race = race_facade(stack, prompts, seed=0, threads=8, seconds=float(sys.argv[2]))
    assert stack.flush(60.0)
    problems = [*race.problems, *problems_at_rest(manager_of(stack)), *phantoms(manager_of(stack))]
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(json.dumps([has_lock, race.verified_blocks, problems]))
"""
_SECONDS = 5.0


@pytest.mark.parametrize("has_lock", [True, False])
def test_the_package_warns_where_python_has_no_interpreter_lock(has_lock: bool) -> None:
    command = [sys.executable, "-c", IMPORT.format(has_lock=has_lock)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    assert (told == "[]") == has_lock
    assert ("RuntimeWarning" in told and "PYTHON_GIL=1" in told) != has_lock


def raced(python: str, directory: Path, seconds: float, *, has_lock: bool) -> tuple[bool, int, list[str]]:
    """Let threads race in another process; return whether it had the lock, verified blocks and problems."""
    folders = ({"type": kind, "path": str(directory / kind), "capacity": 2 << 20} for kind in ("nvme", "fs"))
    config = stack_of({"type": "memory", "capacity": 1 << 20}, *folders, blocks=32)
    command = [python, "-W", "ignore", "-c", RACE, json.dumps(config), str(seconds)]
    environ = {**os.environ, "PYTHON_GIL": "1" if has_lock else "0"}  # a build with the lock takes 1, too
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr
    had_lock, verified_blocks, problems = json.loads(done.stdout)
    return had_lock, verified_blocks, problems


@pytest.mark.slow
@pytest.mark.parametrize("without_lock", [True, False])
def test_threads_tear_no_index(tmp_path: Path, without_lock: bool) -> None:
    python = free_threaded_python() if without_lock else sys.executable
    had_lock, verified_blocks, problems = raced(python, tmp_path, _SECONDS, has_lock=not without_lock)
    assert had_lock != without_lock
    assert verified_blocks
    assert not problems


def free_threaded_python() -> str:
    own = sys.executable if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    for name in (os.environ.get("TIERED_KV_FREE_THREADED_PYTHON", ""), own, "python3.15t", "python3.14t"):
        if name and shutil.which(name):
            check = "import pytest, tiered_kv_nvme, tiered_kv_fs"
            if not subprocess.run((name, "-W", "ignore", "-c", check), capture_output=True, timeout=60).returncode:
                return name
    pytest.skip("there is no free-threaded Python with this package here; see TIERED_KV_FREE_THREADED_PYTHON")
