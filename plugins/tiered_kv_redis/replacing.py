"""How much of a quota may be replaced unseen: the account is told of a record that is stored, not of the one before it.

A block that cannot be read here is stored over the one that lies there (`tiered_kv.toolkit.unreadable`). What it takes
is charged, and what it frees is known to nobody until a survey: asking its length first would not tell either, since
another process may replace it at the same time. Processes that cannot read each other's blocks would fill the account
with that, and have blocks evicted from a namespace that is nearly empty. So there is a limit on what is replaced
between two surveys. Beyond it blocks are left as they are, and a survey is wanted.
"""

from __future__ import annotations

import threading
from typing import Final

REPLACED_SHARE: Final = 1 / 16
"""Of the quota, all of its processes together may replace so much between two surveys, and each of them one record.

What is replaced while a survey goes on may be known to it or not, and is forgotten when it has ended. So the account
may have up to twice as much too much.
"""


class Replacing:
    """What this process has replaced since the last survey, and what it may. Any thread may call.

    Args:
        quota_bytes: The namespace's.
        record_bytes_max: How long a record can be; each that is replaced counts for so much.
    """

    def __init__(self, quota_bytes: int, record_bytes_max: int) -> None:
        self._quota_bytes = quota_bytes
        self._record_bytes_max = record_bytes_max
        self._lock = threading.Lock()  # guards the three below, held for a few additions
        self._limit_bytes = self._share_of(1)
        self._replaced_bytes = 0
        self._is_short = False

    def take(self, blocks: int) -> int:
        """Return how many of some blocks may be replaced now; give back those that were not."""
        with self._lock:
            taken = min(blocks, max(0, self._limit_bytes - self._replaced_bytes) // self._record_bytes_max)
            self._replaced_bytes += taken * self._record_bytes_max
            self._is_short = self._is_short or taken < blocks
            return taken

    def give_back(self, blocks: int) -> None:
        """Undo `take` for blocks that were not sent, or that the server did not take."""
        with self._lock:
            self._replaced_bytes = max(0, self._replaced_bytes - blocks * self._record_bytes_max)

    def note_survey(self, owners: int) -> None:
        """Begin anew, since somebody has counted the blocks; so many processes share the quota."""
        with self._lock:
            self._limit_bytes = self._share_of(owners)
            self._replaced_bytes = 0
            self._is_short = False

    @property
    def is_short(self) -> bool:
        """Whether blocks were left as they are since the last survey, so that another is wanted."""
        return self._is_short

    def _share_of(self, owners: int) -> int:
        return max(self._record_bytes_max, int(self._quota_bytes * REPLACED_SHARE) // max(1, owners))
