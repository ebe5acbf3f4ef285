"""A stack belongs to the process that opened it; a forked child changes nothing of it, and keeps no lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from tests.support.forks import fork
from tests.support.interrupts import handled, signal_main_thread
from tests.support.stacks import stack_of
from tiered_kv.config.namespace import Namespace
from tiered_kv.direct import DirectTiers
from tiered_kv.errors import ShutdownError
from tiered_kv.stack.open import open_stack
from tiered_kv.system.interrupts import CallThread
from tiered_kv.testing.rig import make_keys
from tiered_kv_fs.locks import locked

BLOCK_BYTES = 4096
KEYS = make_keys(2)
BLOCKS = np.ones((2, BLOCK_BYTES), dtype=np.uint8)


@contextmanager
def forked(work: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Have a child that does some work, and lives until the end of the block."""
    reader, writer = os.pipe()
    child = fork()
    if not child:
        status = 1
        signal.alarm(60)
        try:
            work()
            os.close(writer)
            os.read(reader, 1)
            status = 0
        finally:
            os._exit(status)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        _, status = os.waitpid(child, 0)
    assert status == 0, "the child's work failed"


def test_in_another_process_tiers_over_a_host_s_memory_refuse_and_close_nothing() -> None:
    pool, memory = np.ones(8 * BLOCK_BYTES, dtype=np.uint8), {"type": "memory", "capacity": "1 MiB"}
    namespace = Namespace(model="m")
    with DirectTiers(pool, block_bytes=BLOCK_BYTES, tiers=[memory], namespace=namespace) as tiers:
        assert tiers.wait("store", KEYS, [0, BLOCK_BYTES]) == [True] * 2
        tiers.counters()  # starts the parent's call thread
        parent = os.getpid()

        def use_and_close() -> None:
            with pytest.raises(ShutdownError, match=f"belong to process {parent}; open others"):
                tiers.wait("contains", KEYS)
            for call in (tiers.reset, tiers.counters):
                with pytest.raises(ShutdownError):
                    call()
            tiers.close()

        with forked(use_and_close):
            assert tiers.wait("contains", KEYS) == [True] * 2


def test_in_another_process_a_stack_refuses_and_closes_nothing() -> None:
    with open_stack(stack_of()) as stack:
        stack.put(KEYS, BLOCKS)
        parent = os.getpid()

        def use_and_close() -> None:
            with pytest.raises(ShutdownError, match=f"belongs to process {parent}; open another"):
                stack.get(KEYS, BLOCKS)
            for call in (lambda: stack.put(KEYS, BLOCKS), lambda: stack.explain(KEYS), stack.flush, stack.counters):
                with pytest.raises(ShutdownError):
                    call()
            stack.close()

        with forked(use_and_close):
            assert stack.get(KEYS, BLOCKS) == 2


def test_a_child_that_a_signal_handler_forks_does_not_wait_for_the_parent_s_call() -> None:
    calls, has_forked = CallThread("tiered-kv-calls"), threading.Event()
    child: int | None = None

    def fork_once(number: int, frame: FrameType | None) -> None:
        nonlocal child
        child = fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
        else:
            has_forked.set()

    def last_until_the_fork() -> None:
        signal_main_thread()
        assert has_forked.wait(60.0)

    status = 1
    try:
        with handled(fork_once):
            calls.run(last_until_the_fork)
    except ShutdownError:
        status = 0
    finally:
        if child == 0:
            os._exit(status)
    calls.stop()
    assert child is not None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_nvme_directory_is_free_once_it_is_closed_though_a_child_lives(tmp_path: Path) -> None:
    nvme: dict[str, object] = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    stack = open_stack(stack_of(nvme))
    with forked():
        stack.close()
        open_stack(stack_of(nvme)).close()


def test_a_lock_of_fs_is_given_back_though_a_child_was_forked_while_it_was_held(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with locked(path, 1.0):
        child = forked()
        child.__enter__()
    try:
        with locked(path, 0.0):
            pass
    finally:
        child.__exit__(None, None, None)


FORKS = """
import json, os, signal, sys, threading
from tests.support.races import Prompts, phantoms, problems_at_rest, race_facade
from tests.support.stacks import manager_of
from tiered_kv.errors import ShutdownError
from tiered_kv.stack.open import open_stack

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
    problems += [*problems_at_rest(manager_of(stack)), *phantoms(manager_of(stack))]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(problems, status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tier", [{"type": "memory"}, {"type": "fs", "path": "kv"}], ids=["memory", "fs"])
def test_a_fork_amid_transfers_changes_nothing_and_the_child_may_open_its_own(
    tier: dict[str, object], tmp_path: Path
) -> None:
    config = stack_of({**tier, "capacity": 2 << 20}, blocks=32)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS, json.dumps(config)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("[] 0\n", 0), done.stderr
