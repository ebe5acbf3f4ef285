"""Servers that stop answering, with their connections open: the scheduler does not notice, and gets its tiers back.

redis-server and moto's server are stopped with SIGSTOP for half a minute while a scheduler goes on with its steps over
five tiers. The kernel goes on to take what is sent to them, until its buffers are full: nothing fails, all of it hangs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.pages import shown
from tests.support.server_process import free_port
from tests.support.soak.grounds import CHATS_SETTINGS, TIERS, Grounds, chats
from tests.support.soak.soak import pace_problems, run_queue_s
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.workload.replay import replay
from tiered_kv.workload.tally import Tally

FROZEN_S = 30.0
PHASE_LIMIT_S = 240.0
"""To warm up, and to come back. It takes a breaker's cool-down and a few jobs: seconds."""
STEP_S = 0.003
"""What a step of the model takes, in which the scheduler sleeps."""


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Leave out what pytest has imported, as engines do: a full collection over it holds the scheduler for 0.1 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Watcher:
    """Freezes both servers once every tier has been hit, and thaws them; on the scheduler's thread."""

    def __init__(self, grounds: Grounds, stack: EngineStack) -> None:
        self.held_s: list[float] = []
        """Times of the steps while the servers were frozen, without what the thread stood in the run queue."""
        self.hits_while_frozen: dict[str, int] = {}
        self.is_over = False
        self._servers = (grounds.redis, grounds.s3)
        self._stack = stack
        self._phase = self._warm
        self._begun_s = time.monotonic()
        self._queued_s = run_queue_s()
        self._hits: dict[str, int] = {}
        self._stored: dict[str, int] = {}

    def after_step(self, tally: Tally) -> None:
        queued_s, self._queued_s = self._queued_s, run_queue_s()
        if self._phase == self._freeze:
            self.held_s += [max(0.0, seconds - (self._queued_s - queued_s)) for seconds in tally.step_s]
        del tally.step_s[:]
        self._phase(tally, time.monotonic() - self._begun_s)
        time.sleep(STEP_S)

    def thaw(self) -> None:
        for server in self._servers:
            server.thaw()

    def _warm(self, tally: Tally, after_s: float) -> None:
        assert after_s < PHASE_LIMIT_S, tally.hits
        if all(tally.hits[name] for name in TIERS):
            for server in self._servers:
                server.freeze()
            self._begin(self._freeze, tally)

    def _freeze(self, tally: Tally, after_s: float) -> None:
        if after_s >= FROZEN_S:
            self.hits_while_frozen = {name: tally.hits[name] - self._hits[name] for name in TIERS}
            self.thaw()
            self._begin(self._recover, tally)

    def _recover(self, tally: Tally, after_s: float) -> None:
        told = self._told()
        assert after_s < PHASE_LIMIT_S, (tally.hits, told)
        self.is_over = all(tally.hits[name] > self._hits[name] and told[name] > self._stored[name] for name in TIERS)

    def _begin(self, phase: object, tally: Tally) -> None:
        self._phase, self._begun_s = phase, time.monotonic()  # type: ignore[assignment]  # one of the three above
        self._hits, self._stored = {name: tally.hits[name] for name in TIERS}, self._told()

    def _told(self) -> dict[str, int]:
        counters = self._stack.counters()
        return {name: count_of(counters[name], "stored_blocks_total") for name in TIERS}


@pytest.mark.slow
@pytest.mark.trust("frozen-servers")
def test_frozen_servers_do_not_delay_the_scheduler_and_are_used_again(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="redis-py is not installed")
    pytest.importorskip("boto3", reason="boto3 is not installed")
    with Grounds(tmp_path) as grounds, open_engine_stack(grounds.config(0)) as stack, no_full_collections():
        watcher = Watcher(grounds, stack)
        try:
            report = replay(
                stack.manager,
                stack.kv_view,
                chats(0),
                CHATS_SETTINGS,
                should_stop=lambda: watcher.is_over,
                on_progress=watcher.after_step,
            )
        finally:
            watcher.thaw()
        assert pace_problems(watcher.held_s, FROZEN_S) == []
        assert watcher.hits_while_frozen["nvme"] > 0, "the other tiers go on"
        assert watcher.hits_while_frozen["fs"] > 0
        assert report.corrupt_blocks == 0
        assert stack.manager.drain_jobs(120.0), "not every job is reported"
        for name, counters in stack.counters().items():
            if name in TIERS:
                assert count_of(counters, "expired_jobs_total") == count_of(counters, "late_jobs_total")
                assert count_of(counters, "quarantined_bytes") == 0


ROOT = Path(__file__).parents[2]
OF_THE_EXAMPLE = ("cpu", "nvme", "redis", "s3")
WAIT_S = 300.0


@pytest.mark.slow
@pytest.mark.full
def test_the_commands_beside_the_examples_have_hits_in_each_of_the_four_tiers(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    path = f"{scripts}:{os.environ['PATH']}"
    missing = [
        name for name in ("redis-server", "moto_server", "tiered-kv", "curl") if shutil.which(name, path=path) is None
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    commands = shown("../examples/README.md")["all tiers"]
    for name, ours in (("6379", str(free_port())), ("9000", str(free_port())), ("examples/", f"{ROOT}/examples/")):
        commands = commands.replace(name, ours)
    with subprocess.Popen(
        ["bash", "-e", "-c", commands + "wait\n"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=WAIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the servers too, if it did not come to its end
    assert "compared byte by byte: all are right" in " ".join(output.split()), output + errors
    assert all(re.search(rf"^ {name} +[1-9]", output, re.MULTILINE) for name in OF_THE_EXAMPLE), output
