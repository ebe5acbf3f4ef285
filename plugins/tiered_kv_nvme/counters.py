"""What happened since the tier was opened."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Counts of events; `add` may be called by any thread."""

    stored_batches: int = 0
    corrupt_blocks: int = 0
    """Blocks whose bytes did not match their checksum, or were not there any more."""
    io_errors: int = 0
    """System calls that failed, those for want of space included."""
    no_space_errors: int = 0
    """Times the file system had less space than the capacity allows."""
    room_timeouts: int = 0
    """Stores that were given up because no room was made in time."""
    refused_stores: int = 0
    """Stores that were failed at once: the disk is full, and there is no segment to reclaim."""
    reclaimed_segments: int = 0
    relocated_blocks: int = 0
    """Blocks that moved on when their segment was reclaimed, because they had been used."""
    dropped_blocks: int = 0
    """Blocks that went with their segment."""
    recovered_blocks: int = 0
    """Blocks found when the directory was opened."""
    discarded_segments: int = 0
    """Segments found and not kept, because they were damaged or over the capacity."""
    deleted_segments: int = 0
    """Segments whose file was given back."""
    resets: int = 0

    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more events of the kind `name`."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "_lock"}
