"""Counts of an engine that uses a host's cache; the server counts all else.

`client.AttachedManager` counts, on the scheduler's thread. Any thread may read, through the manager's registry. The
name of the tier is `host`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiered_kv.metrics.series import Family, by_label, numbers
from tiered_kv.metrics.vocabulary import ACCOUNT, ATTACHED, HISTORY
from tiered_kv.server.connection import ServerConnection


class AttachedCounts:
    """Blocks that an engine has stored, loaded and missed, and the state of its connection."""

    def __init__(self, server: ServerConnection) -> None:
        self.stored_blocks = self.loaded_blocks = 0
        self.absent_blocks = self.late_blocks = 0  # misses: no tier had the block, or the answer came too late
        self._server = server

    def measure(self) -> Iterator[tuple[str, list[Family]]]:
        """Yield all counts, for a `Registry`."""
        counts = {"loaded_blocks_total": self.loaded_blocks, "stored_blocks_total": self.stored_blocks}
        state = {
            "lost_connections_total": self._server.losses,
            "connection_state": int(self._server.is_attached),
        }
        misses = by_label(HISTORY["misses_total"], {"absent": self.absent_blocks, "too_late": self.late_blocks})
        yield "host", [*numbers(ACCOUNT, counts), *numbers(ATTACHED, state), misses]
