"""What a server's allocator takes for a value, which is what counts against the server's `maxmemory`.

The tier's description of its server and the simulation call it, on any thread; it keeps no state. The names are those
that the server's INFO has as `mem_allocator`.
"""

from __future__ import annotations

import re
from typing import Final

KNOWN: Final = re.compile(r"libc|jemalloc-(\d+)\.(\d+)\.(\d+)")
DEFAULT: Final = "jemalloc-5.3.0"
"""That of Redis in Debian 12 and 13. It takes the most, so that a simulation promises no room that is not there."""
_PAGES_SINCE = (5, 3, 1)
"""From this version on jemalloc rounds sizes from 16 KiB on to pages."""
_PAGE_BYTES = 4096
_UNIT_BYTES = 16


def room_bytes(value_bytes: int, allocator: str) -> int | None:
    """Return the bytes that an allocator takes for a value, less than 200 bytes for its name aside; None: not known.

    jemalloc has four sizes between two powers of two. glibc's malloc rounds to units of 16 bytes.
    """
    found = KNOWN.fullmatch(allocator)
    if found is None:
        return None
    step = _UNIT_BYTES
    if allocator != "libc":
        step = max(_UNIT_BYTES, 1 << ((value_bytes - 1).bit_length() - 3))
        if tuple(map(int, found.groups())) >= _PAGES_SINCE:
            step = min(step, _PAGE_BYTES)
    return -(-value_bytes // step) * step
