"""Published requests: which blocks each request asked for, for recorders outside of the process.

They have a topic of their own, since routers know no such events, and numbers of their own, which begin at any one and
rise by one. A message is as one of `event_messages`, with one event, a map with the key `type`:

- `RequestAsked`: `began_s` (seconds since 1970), `blocks` (12 bytes for each: the last 64 bits of its hash and its KV
  cache group, big-endian), `block_tokens`, `session` (a hash, or empty), `hints` (a map, or null).
- `AllBlocksCleared`: the same hashes are other blocks from now on.

The recorder's thread calls, and the publisher's thread sends. What must stay true: no text of a session leaves the
process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.stack.exporters.event_messages import ALL_BLOCKS_CLEARED, Fields
from tiered_kv.stack.exporters.events import EventPublisher
from tiered_kv.system.step import give_way
from tiered_kv.tiering.recording.requests import AskedRequest
from tiered_kv.tiering.recording.trace_file import REQUEST_KEYS_MAX

REQUEST_ASKED: Final = "RequestAsked"
NAME_BYTES: Final = 12
"""The bytes of a block's name in a message."""
_CHUNK_KEYS: Final = 4096


class PublishedRequests:
    """Publishes the requests of a recorder."""

    def __init__(self, publisher: EventPublisher, topic: str, block_tokens: int) -> None:
        self._publisher = publisher
        self._topic = topic.encode()
        self._block_tokens = block_tokens
        self._salt = secrets.token_bytes(16)

    def write(self, request: AskedRequest) -> bool:
        keys = request.keys
        if len(keys) > REQUEST_KEYS_MAX:
            return False
        session = request.session.encode(errors="surrogatepass")
        event: Fields = {
            "type": REQUEST_ASKED,
            "began_s": time.time() - (time.monotonic() - request.began_s),
            "blocks": b"".join(_names(keys[first : first + _CHUNK_KEYS]) for first in range(0, len(keys), _CHUNK_KEYS)),
            "block_tokens": self._block_tokens,
            "session": blake2b(session, key=self._salt, digest_size=8).hexdigest() if session else "",
            "hints": request.hints.given(),
        }
        return self._publisher.publish_apart(self._topic, event)

    def reset(self) -> None:
        self._publisher.publish_apart(self._topic, {"type": ALL_BLOCKS_CLEARED})

    def close(self) -> None:
        """Do nothing: the manager closes the publisher."""


def _names(keys: Sequence[OffloadKey]) -> bytes:
    give_way()
    return b"".join([key[-NAME_BYTES:].rjust(NAME_BYTES, b"\0") for key in keys])
