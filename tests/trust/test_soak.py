"""Minutes of load over four tiers while faults come and go: no wrong byte, no limit exceeded, nothing left behind.

Of the scheduler's time it is judged whether steps wait (`pace_problems`), so that what else the machine runs does not
decide it. Calls to storage on the scheduler's thread are found so: a look at redis in each step, through a server that
is stalled and frozen, made long steps 6 % of the time.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.figures import Figures, Profile
from tests.support.soak import SoakSettings, run
from tiered_kv.testing.s3_servers import missing_for_moto

pytestmark = [pytest.mark.trust, pytest.mark.slow]

STOP_LIMIT_S = 600.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What fails is counted, and the tiers log it."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def servers() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    if missing := missing_for_moto():
        pytest.skip(missing)
    pytest.importorskip("redis", reason="redis-py is not installed")


def test_a_soak_keeps_every_promise(tmp_path: Path, profile: Profile, figures: Figures) -> None:
    if profile is Profile.FULL:
        settings = SoakSettings(seconds=600.0, seed=1, kinds_min=12)
    else:  # with recovery about a minute
        settings = SoakSettings(seconds=40.0, seed=1, warm_s=5.0, fault_s=1.5, quiet_s=0.7, kinds_min=4)
    report = run(settings, tmp_path)
    text = "\n".join(report.lines())
    seconds = max(1, round(report.seconds))
    figures.add("soak", seconds, 0 if report.problems else seconds, report.note())
    print(text)
    assert not report.problems, text
    assert not report.interrupted
    assert report.held_s, text
    assert [len(samples) > 20 for samples in report.samples] == [True, True], text
    # The faults have really struck: in the full form every kind, in the short one some.
    assert len(report.switched) >= settings.kinds_min, text
    assert report.struck, text
    if profile is Profile.FULL:
        assert all(report.hits.values()), text
        for kind in ("flipped", "cut", "stalled", "resets", "damaged"):
            assert any(kind in name for name in report.struck), text


def test_a_soak_that_is_stopped_ends_in_good_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.soak", "--minutes", "60", "--dir", str(tmp_path / "soak")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "warming up\n"
            children = children_of(process.pid)
            assert len(children) == 3  # a second process, redis-server, moto's server
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=STOP_LIMIT_S)
        finally:
            if process.poll() is None:  # it will not end what it has started
                for child in children_of(process.pid):
                    os.kill(child, signal.SIGKILL)
                process.kill()
    assert process.returncode == 0, output + errors
    assert "interrupted" in output
    assert "0 problems" in output
    assert "Traceback" not in errors
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert list((tmp_path / "soak").iterdir()) == []


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found
