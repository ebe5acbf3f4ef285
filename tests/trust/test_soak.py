"""Minutes of load over four tiers while faults come and go: no wrong byte, no limit exceeded, nothing left behind.

Of the scheduler's time it is judged whether steps wait (`pace_problems`), so that what else the machine runs does not
decide it. Calls to storage on the scheduler's thread are found so: a look at redis in each step, through a server that
is stalled and frozen, made long steps 6 % of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.figures import Figures, Profile
from tests.support.s3_servers import missing_for_moto
from tests.support.soak.soak import SoakSettings, run

pytestmark = [pytest.mark.trust, pytest.mark.slow]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What fails is counted, and the tiers log it."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def servers() -> None:
    if missing := missing_for_moto():
        pytest.skip(missing)
    pytest.importorskip("redis", reason="redis-py is not installed")


def test_a_soak_keeps_every_promise(tmp_path: Path, profile: Profile, figures: Figures) -> None:
    if profile is Profile.FULL:
        settings = SoakSettings(seconds=600.0, seed=1, kinds_min=12)
    else:  # with recovery about half a minute
        settings = SoakSettings(seconds=20.0, seed=1, warm_s=5.0, fault_s=1.5, quiet_s=0.7, kinds_min=4)
    report = run(settings, tmp_path)
    text = "\n".join(report.lines())
    seconds = max(1, round(report.seconds))
    figures.add("soak", seconds, 0 if report.problems else seconds, report.note())
    print(text)
    assert not report.problems, text
    assert report.held_s, text
    assert [len(samples) > 20 for samples in report.samples] == [True, True], text
    # The faults have really struck: in the full form every kind, in the short one some.
    assert len(report.switched) >= settings.kinds_min, text
    assert report.struck, text
    if profile is Profile.FULL:
        assert all(report.hits.values()), text
        for kind in ("flipped", "cut", "stalled", "resets", "damaged"):
            assert any(kind in name for name in report.struck), text
