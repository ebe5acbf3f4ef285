"""What happened since the tier was opened."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Counts of events; `add` may be called by any thread."""

    get_requests: int = 0
    put_requests: int = 0
    head_requests: int = 0
    list_requests: int = 0
    delete_requests: int = 0
    retries: int = 0
    """Requests that were sent again."""
    slow_downs: int = 0
    """Times the server asked for fewer requests."""
    connections_opened: int = 0
    corrupt_blocks: int = 0
    """Records that were not what was asked for, twice in a row."""
    oversized_blocks: int = 0
    """Objects that were longer than a record can be; they are not read."""
    expired_blocks: int = 0
    """Blocks found older than `ttl`."""
    deleted_blocks: int = 0
    """Blocks deleted because of `ttl` or `capacity`."""
    failed_lookups: int = 0
    """Lookups answered with a miss because the bucket did not tell."""
    failed_rounds: int = 0
    """Times the caretaker could not write the epoch, list, or delete."""
    skipped_stores: int = 0
    """Blocks not sent because they were known to be there."""
    resets: int = 0

    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more events of the kind `name`."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "_lock"}
