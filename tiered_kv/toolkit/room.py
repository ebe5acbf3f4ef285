"""Memory that payloads are put into between a block and its storage, used again and again."""

from __future__ import annotations

import threading


class ThreadRoom:
    """A buffer for each thread that asks, as long as the longest that it asked for.

    Fresh memory would cost more than what is done in it: the kernel clears it a page at a time.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, size_bytes: int) -> memoryview:
        """Return `size_bytes` of this thread's buffer, holding anything; what it took before is no longer its own."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._local.buffer = memoryview(bytearray(size_bytes))
        return buffer[:size_bytes]
