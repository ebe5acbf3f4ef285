"""What happened since the tier was opened."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Counts of events by name; any thread may call.

    stored_files           blocks that were written
    present_blocks         blocks that were to be stored and were there already
    loaded_files           blocks that were read and verified
    missing_blocks         blocks that were to be loaded and were not there
    corrupt_blocks         blocks that did not match their checksum, were cut off or too long; also as corrupt_<why>
    removed_files          damaged files that were removed
    failed_<reason>        calls that failed, by reason
    evicted_files          files removed to make room
    removed_temporaries    what writers that ended amid a block had left
    sweeps                 times that the directory was counted
    room_timeouts          stores given up because no room was made in time
    """

    _ALWAYS = (
        "stored_files",
        "present_blocks",
        "loaded_files",
        "missing_blocks",
        "corrupt_blocks",
        "removed_files",
        "evicted_files",
        "removed_temporaries",
        "sweeps",
        "room_timeouts",
    )

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(self._ALWAYS, 0))
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more events of the kind `name`."""
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name."""
        with self._lock:
            return dict(self._counts)
