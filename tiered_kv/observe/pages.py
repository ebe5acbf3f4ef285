"""Pages: lists of keys that wait for another thread, of many batches each.

Python's garbage collector visits each key of a new list, but not of an old one. So a list for each batch would cost the
scheduler's thread more than its making. Who appends a batch gives away the part of the page that it is in.
"""

from __future__ import annotations

from typing import Final

from tiered_kv.base import OffloadKey

PAGE_KEYS: Final = 1 << 14

Page = list[OffloadKey]


def next_page(page: Page) -> Page:
    """Return a page that has room: this one, or a new one."""
    return page if len(page) < PAGE_KEYS else []
