"""What a soak replays: chats without end."""

from __future__ import annotations

from collections.abc import Iterator

from tiered_kv.workload.generator import ChatWorkload
from tiered_kv.workload.replay import ReplaySettings
from tiered_kv.workload.request import Request

CHATS_SETTINGS = ReplaySettings(concurrency=16, request_timeout_s=3.0)

STEP_S = 0.003
"""What a step of the model takes, in which the scheduler sleeps and servers and workers run."""
NEIGHBOUR_STEP_S = 0.02
"""The same in the second process, so that two processors are enough for all."""

SAMPLE_S = 0.5
"""How often each process is looked at."""

_CHATS = 10**9
_ACTIVE_CHATS = 100
_TURN_BLOCKS = 4


def chats(seed: int) -> Iterator[Request]:
    """Return requests of chats that go on at once and need several times what any tier but the last holds."""
    return ChatWorkload(seed=seed, chats=_CHATS, active_chats=_ACTIVE_CHATS, turn_blocks=_TURN_BLOCKS).requests()
