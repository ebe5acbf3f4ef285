"""A stack belongs to the process that opened it; a forked child disturbs nobody, and keeps no lock.

A descriptor that is duplicated stands for the one that a forked child has: both refer to one open file, whose lock is
not gone before both are closed (flock(2)). One test forks in earnest, in a program of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.errors import ShutdownError
from tiered_kv.stack import open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.claimed import Identity
from tiered_kv_fs.files import locked
from tiered_kv_nvme.directory import Directory

BLOCK_BYTES = 4096


@contextmanager
def inherited(fd: int) -> Iterator[None]:
    """Have the open file referred to as by a child, too."""
    copy = os.dup(fd)
    try:
        yield
    finally:
        os.close(copy)


def test_in_another_process_a_stack_refuses_and_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"namespace": {"model": "m"}, "block": {"bytes": BLOCK_BYTES}, "primary": {"capacity": 8 * BLOCK_BYTES}}
    keys, blocks = make_keys(2), np.ones((2, BLOCK_BYTES), dtype=np.uint8)
    with open_stack(config) as stack:
        stack.put(keys, blocks)
        parent = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(ShutdownError, match=f"belongs to process {parent}; open another"):
                stack.get(keys, blocks)
            with pytest.raises(ShutdownError):
                stack.put(keys, blocks)
            with pytest.raises(ShutdownError):
                stack.flush()
            with pytest.raises(ShutdownError):
                stack.counters()
            stack.close()
        assert stack.get(keys, blocks) == 2


FORKS = """
import json, os, signal, sys, threading
from tests.support.races import Prompts, phantoms, problems_at_rest, race_facade
from tiered_kv.errors import ShutdownError
from tiered_kv.stack import open_stack

config, prompts = json.loads(sys.argv[1]), Prompts(4096)
keys = prompts.prompts[0]
problems = []
with open_stack(config) as stack:
    race_facade(stack, prompts, seed=0, threads=2, seconds=0.3)  # imports all; a fork amid an import is lost in Python
    racer = threading.Thread(
        target=lambda: problems.extend(race_facade(stack, prompts, seed=1, threads=2, seconds=0.6).problems)
    )
    racer.start()
    child = os.fork()
    if not child:
        signal.alarm(120)
        for call in (lambda: stack.put(keys, prompts.contents(keys)), stack.flush, stack.counters):
            try:
                call()
                os._exit(1)
            except ShutdownError:
                pass
        stack.close()
        with open_stack(config) as own:
            own.put(keys, prompts.contents(keys))
            out = prompts.contents(keys)
            out[:] = 0
            loaded = own.get(keys, out)
            os._exit(0 if loaded and not prompts.differences(keys[:loaded], out[:loaded], 0, "get") else 2)
    racer.join()
    problems += [*problems_at_rest(stack.manager), *phantoms(stack.manager)]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(problems, status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tier", [{"type": "memory"}, {"type": "fs", "path": "kv"}], ids=["memory", "fs"])
def test_a_fork_amid_transfers_disturbs_nobody_and_the_child_may_open_its_own(
    tier: dict[str, object], tmp_path: Path
) -> None:
    config = {
        "namespace": {"model": "m"},
        "block": {"bytes": BLOCK_BYTES},
        "primary": {"capacity": 32 * BLOCK_BYTES},
        "secondary": [{**tier, "capacity": 2 << 20}],
    }
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS, json.dumps(config)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("[] 0\n", 0), done.stderr


def test_an_nvme_directory_is_free_once_it_is_closed_though_a_child_lives(tmp_path: Path) -> None:
    identity = Identity(bytes(16), {}, BLOCK_BYTES)
    directory = Directory(str(tmp_path / "kv"), identity)
    with inherited(directory._lock_fd):
        directory.close()
        with closing(Directory(str(tmp_path / "kv"), identity)):
            pass


def test_a_lock_of_fs_is_given_back_though_a_child_was_forked_while_it_was_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with ExitStack() as child:
        with locked(str(path), 1.0):
            held = next(fd for fd in os.listdir("/proc/self/fd") if _names(fd, path))
            child.enter_context(inherited(int(held)))
        with locked(str(path), 0.0):
            pass


def _names(fd: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except FileNotFoundError:
        return False
