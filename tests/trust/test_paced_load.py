"""An engine with a stack is not slower than without one, on slow disks and with requests that gain little from a cache.

Only decisions count here, in the time of a clock that nothing but the engine's steps moves. So the limits are sharp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import printed_by
from tests.support.figures import Figures, Profile
from tests.support.paced_loads import MIXES

pytestmark = [pytest.mark.trust, pytest.mark.slow]

TOTAL_MAX = 1.02
"""Of the time of all requests without a stack."""
FAST_DISK = 1.0
GAIN_MAX = 0.9
"""Of chats whose disk reads as fast as the engine computes: their total time."""


def test_no_load_takes_longer_than_without_a_stack(tmp_path: Path, profile: Profile, figures: Figures) -> None:
    options: dict[str, list[Any]] = {
        "mixes": profile.pick(["chats", "all lengths"], list(MIXES)),
        "disks": profile.pick([0.27, 1.0], [0.1, 0.27, 0.4, 1.0, 4.0]),
        "seeds": profile.pick([1], [1, 2, 3]),
    }
    runs = printed_by("0.32.0", "vllm_paced_program.py", str(tmp_path / "paced"), json.dumps(options))
    assert len(runs) == len(options["mixes"]) * len(options["disks"]) * len(options["seeds"])
    slower = [run for run in runs if run["total"] > TOTAL_MAX or run["first_token"] > MIXES[run["mix"]].first_token_max]
    figures.add("paced-load", len(runs), len(runs) - len(slower))
    assert slower == []
    gained = [run for run in runs if run["mix"] == "chats" and run["disk"] >= FAST_DISK]
    assert gained
    assert [run for run in gained if run["total"] > GAIN_MAX or not run["loaded_blocks"]] == []
