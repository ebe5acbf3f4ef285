"""The dashboard and the alerts, over a real Prometheus that reads a real stack under replay."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import Kind, record_damages
from tests.support.faulty import FourMethodTier, Gate, HangingTier, HeldJobsTier
from tests.support.pages import tier_metrics
from tests.support.prometheus import MONITORING, OF_THE_MACHINE, Prometheus, missing_prometheus, panels, wait_for
from tests.support.server_process import free_port
from tests.support.stacks import Register, stack_of
from tiered_kv.metrics.vocabulary import MANAGER, PREFIX, TIER_PREFIX
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.workload.replay import ReplaySettings, replay
from tiered_kv.workload.request import ChatWorkload

BLOCK_BYTES = 8 << 10
PAUSE_S, PAUSE_S_MAX = 0.004, 0.1
NONE: set[str] = set()
FAULTS = {  # test_monitoring_files.py has the others
    "TieredKVDamagedBlocks",
    "TieredKVNoSpace",
    "TieredKVStoresSkipped",
    "TieredKVBlocksFail",
    "TieredKVQuarantine",
    "TieredKVExceptions",
    "TieredKVBreakerOpen",
}
BOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUESTIONS = [
    "What does it save?",
    "Are hits worth it?",
    "Which tier is slow?",
    "What is skipped, and why?",
    "How full is it?",
    "Is the disk wearing out?",
    "Are the bytes right?",
]


def test_the_dashboard_has_a_row_a_question_and_says_what_each_panel_shows() -> None:
    known = {f"{PREFIX}{name}" for name in MANAGER} | {f"{TIER_PREFIX}{name}" for name in tier_metrics()}
    assert [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"] == QUESTIONS
    shown = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in shown}) == len(shown)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in shown:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            named = re.findall(r"(tiered_kv_\w+)\{([^}]*)\}", target["expr"])
            assert {name.removesuffix("_bucket") for name, _ in named} <= known
            assert named
            assert all('instance=~"$instance"' in chosen for _, chosen in named)


class Busy:
    """A stack under a replay, in a thread of its own, that goes on until it is closed."""

    def __init__(self, stack: EngineStack) -> None:
        self._counters = stack.counters
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(stack,))
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self, stack: EngineStack) -> None:
        requests = itertools.chain.from_iterable(
            ChatWorkload(seed=seed, chats=80, turns=4, active_chats=16, turn_blocks=4).requests() for seed in range(99)
        )
        settings = ReplaySettings(concurrency=4, request_timeout_s=0.5, store_timeout_s=0.0, drain_timeout_s=0.5)
        replay(stack.manager, stack.kv_view, requests, settings, should_stop=self._pauses)

    def _pauses(self) -> bool:
        """Return whether to stop, once the stores on the disk have kept up, or after a while."""
        end_s = time.monotonic() + PAUSE_S_MAX
        while not self._stop.wait(PAUSE_S) and time.monotonic() < end_s:
            counters = self._counters()
            if not any(counters[tier]["store_budget_used_bytes"] for tier in ("nvme", "fs")):
                break
        return self._stop.is_set()


@dataclass(slots=True)
class Faulty:
    """Tiers with a fault: one raises when it is told to, one holds its jobs while the gate is closed."""

    gate: Gate
    is_raising: bool = False

    def register(self, register: Register) -> None:
        faulty = self

        class Raising(HangingTier):
            is_nonblocking = True  # so that its exceptions are the manager's to count

            def __init__(self, spec: Any, view: memoryview, tier_type: str) -> None:  # Any: as the interface
                super().__init__(FourMethodTier(spec, view, tier_type), Gate())

            def _before(self, call: str) -> None:
                self.raising = faulty.is_raising
                super()._before(call)

        class Held(HeldJobsTier):
            def __init__(self, spec: Any, view: memoryview, tier_type: str) -> None:  # Any: as the interface
                super().__init__(FourMethodTier(spec, view, tier_type), faulty.gate)

        register("raising", Raising)
        register("held", Held)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_prometheus()), reason=missing_prometheus() or "it is")
def test_each_fault_has_its_alert_and_every_panel_has_series(
    tmp_path: Path,
    gate: Gate,
    closing: ExitStack,
    register: Register,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, port, faulty = tmp_path / "fs", free_port(), Faulty(gate)
    faulty.register(register)
    stack = open_engine_stack(
        stack_of(
            {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "4MiB", "write_budget": "1PiB/day"},
            {"type": "fs", "path": str(files), "capacity": "64MiB"},
            {"type": "held", "job_timeout": "1s"},
            {"type": "raising"},
            blocks=128,
            block_bytes=BLOCK_BYTES,
            block={"tokens": 512},
            audit=0.2,
            prefill={"tokens_per_s": 100},
            metrics={"listen": f"127.0.0.1:{port}"},
        )
    )
    closing.enter_context(stack)
    prometheus = closing.enter_context(Prometheus(tmp_path, port))
    busy = Busy(stack)
    closing.callback(busy.close)
    closing.callback(gate.open)

    def firing() -> set[str]:
        return prometheus.firing() - OF_THE_MACHINE

    wait_for(lambda: {"Share of blocks found, by tier", "Share written in vain, over a day"} & empty(prometheus), NONE)
    wait_for(firing, NONE)
    gate.close()
    faulty.is_raising = True
    monkeypatch.setattr("tiered_kv_nvme.disk.Disk.pwritev", full)

    def firing_and_damaged() -> set[str]:
        damage(files)  # each time: the replay reads few of the files that are there at one moment
        return firing()

    wait_for(firing_and_damaged, FAULTS)
    wait_for(lambda: empty(prometheus), NONE)
    busy.close()
    gate.open()
    stack.close()
    wait_for(lambda: prometheus.firing() & {"TieredKVDown"}, {"TieredKVDown"})


class Monitoring(Prometheus):
    """`run.py` of a copy of the folder, with a program that plays Grafana and notes how it was started."""

    def __init__(self, directory: Path, target_port: int) -> None:
        self.files, self.home = directory / "monitoring", directory / "home"
        self.noted = directory / "noted"
        shutil.copytree(MONITORING, self.files)
        super().__init__(self.files, target_port)
        program = self.home / "bin" / "grafana"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\necho "$$ $TIERED_KV_PROMETHEUS $@" >{self.noted}\nexec sleep 60\n')
        program.chmod(0o700)
        (self.home / "conf").mkdir()
        (self.home / "conf" / "defaults.ini").touch()

    def command(self) -> list[str]:
        ports = ["--prometheus-port", str(self.port), "--grafana-port", "3001"]
        path = f"PATH={self.home / 'bin'}:{os.environ['PATH']}"
        data = str(self.home / "data")
        return ["env", path, sys.executable, str(self.files / "run.py"), "--data", data, *ports]

    def grafana(self) -> list[str]:
        return self.noted.read_text().split() if self.noted.exists() else []


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_prometheus()), reason=missing_prometheus() or "it is")
def test_the_command_starts_prometheus_and_grafana_and_ends_both(tmp_path: Path) -> None:
    port = free_port()
    stack = stack_of(blocks=8, metrics={"listen": f"127.0.0.1:{port}"})
    with open_engine_stack(stack), Monitoring(tmp_path, port) as monitoring:
        wait_for(lambda: list(monitoring.query('up{job="tiered-kv"}').values()), [1.0])
        wait_for(lambda: bool(monitoring.grafana()), True)
        pid, url, *arguments = monitoring.grafana()
        assert url == f"http://127.0.0.1:{monitoring.port}"
        assert arguments[:2] == ["server", f"--homepath={monitoring.home}"]
        assert {"cfg:default.server.http_port=3001", f"--config={monitoring.files}/grafana/grafana.ini"} <= {*arguments}
        monitoring.stop()
        assert not monitoring.answers()
        assert not Path(f"/proc/{pid}").exists()


def empty(prometheus: Prometheus) -> set[str]:
    """Return the titles of panels that have a query without a number."""
    return {title for title, queries in panels().items() for query in queries if not has_numbers(prometheus, query)}


def has_numbers(prometheus: Prometheus, query: str) -> bool:
    return any(not math.isnan(value) for value in prometheus.query(query).values())


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def damage(directory: Path) -> None:
    """Damage every file, in turns so that nobody can read it, and so that only this process cannot.

    A file that is damaged twice stays damaged.
    """
    changes = [each for each in record_damages(full=False) if each.name == "payload all zeros"]
    changes += [each for each in record_damages(full=False) if each.kind is Kind.UNREADABLE]
    for file, change in zip(directory.rglob("*"), itertools.cycle(changes)):
        with suppress(OSError):  # it is a directory, or has been deleted meanwhile
            if len(record := file.read_bytes()) > BLOCK_BYTES:
                file.write_bytes(change.apply(record))
