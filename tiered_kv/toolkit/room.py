"""Reusable memory for payloads between a block and its storage."""

from __future__ import annotations

import threading


class ThreadRoom:
    """A buffer for each calling thread, as long as the longest that it requested.

    Fresh memory would cost more than the work in it: the kernel clears it page by page.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, size_bytes: int) -> memoryview:
        """Return `size_bytes` of this thread's buffer, with undefined content. Earlier results become invalid."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._local.buffer = memoryview(bytearray(size_bytes))
        return buffer[:size_bytes]
