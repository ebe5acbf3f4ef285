"""How much may be received, and believed, of what a server says in lists."""

from __future__ import annotations

from typing import Final

REPLIES_BYTES_MAX: Final = 4 << 20
"""Of all replies to one batch of commands, or of all that redis-py reads of a connection, with `ITEM_BYTES` for each
item of a list. SCAN is asked for 500 names, which so may have 8 KiB each; the slots of a cluster take 1.4 KB for each
range that has two replicas, of which there are seldom a hundred."""
ITEM_BYTES: Final = 64
"""What an item is counted with, besides what is received for it: about what an empty one takes in Python. Four bytes on
the wire make one."""


class Budget:
    """What is left to be received; one thread at a time."""

    def __init__(self) -> None:
        self.left_bytes = REPLIES_BYTES_MAX

    def take(self, received_bytes: int, items: int = 0) -> bool:
        """Count what is, or is about to be, received; return whether there is that much left."""
        self.left_bytes -= received_bytes + items * ITEM_BYTES
        return self.left_bytes >= 0
