"""The number of connections that a server takes: its tiers and its pages need descriptors, too.

The server asks on its thread, before it accepts a connection. Half of the descriptors stay for the tiers.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

from tiered_kv.config.stack_config import StackConfig
from tiered_kv.system.limits import DESCRIPTORS_SHARE, Limits

CONNECTIONS_MAX: Final = 1024
CONNECTIONS_MIN: Final = 8
"""The least number of connections that the server takes, however few descriptors it has."""
OF_A_CONNECTION: Final = 2
"""Descriptors of a connection: the socket, and the pidfd that shows the end of the process."""
_OWN: Final = 32
"""Descriptors of the server itself: files of memory, the log, the pages."""
_LIMIT_MAX: Final = 1 << 16


def raise_limit() -> None:
    """Raise this process's limit of descriptors as far as allowed. The default is enough for a few engines only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, _LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def needed_by(config: StackConfig) -> int:
    """Return how many descriptors the tiers of a stack take."""
    takes = (take for tier in config.secondary for take in tier.takes(config.block.bytes))
    return sum(take.amount for take in takes if take.what == "descriptors")


def connections_max(taken: int) -> int:
    """Return how many processes may connect if tiers take `taken` descriptors. At least half of the limit is theirs."""
    limit = Limits().descriptors().amount
    left = limit - max(taken, limit // DESCRIPTORS_SHARE) - _OWN
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, left // OF_A_CONNECTION))
