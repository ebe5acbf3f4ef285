"""Published requests: which blocks each request asked for, for recorders outside of the process.

They have a topic of their own, since routers know no such events, and numbers of their own, which begin at any one and
rise by one. A message is as one of `event_messages`, with one event, a map with the key `type`:

- `RequestAsked`: `source`, `began_s` (seconds since 1970), `blocks` (12 bytes for each: 8 of a hash of its key, and its
  KV cache group, big-endian), `block_tokens`, `session` (a hash, or empty), `hints` (a map, or null).
- `AllBlocksCleared`, with `source`: the same hashes are other blocks from now on.

All hashes have a salt that is made when the stack opens, and `source` is a random name of that salt: of another source
the same hashes are other blocks. The recorder's thread calls, and the publisher's thread sends. What must stay true: no
key and no text of a session leaves the process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from tiered_kv.base import OffloadKey, group_of
from tiered_kv.stack.exporters.event_messages import ALL_BLOCKS_CLEARED, Fields
from tiered_kv.stack.exporters.events import EventPublisher
from tiered_kv.system.step import give_way
from tiered_kv.tiering.recording.requests import AskedRequest
from tiered_kv.tiering.recording.trace_file import CHUNK_KEYS, REQUEST_KEYS_MAX

REQUEST_ASKED: Final = "RequestAsked"
NAME_BYTES: Final = 12
"""The bytes of a block's name in a message."""
_HASH_BYTES: Final = 8


class PublishedRequests:
    """Publishes the requests of a recorder."""

    def __init__(self, publisher: EventPublisher, topic: str, block_tokens: int) -> None:
        self._publisher = publisher
        self._topic = topic.encode()
        self._block_tokens = block_tokens
        self._source = secrets.token_hex(8)
        self._hash = blake2b(key=secrets.token_bytes(32), digest_size=_HASH_BYTES)

    def write(self, request: AskedRequest) -> bool:
        keys = request.keys
        if len(keys) > REQUEST_KEYS_MAX:
            return False
        session = request.session.encode(errors="surrogatepass")
        event: Fields = {
            "type": REQUEST_ASKED,
            "source": self._source,
            "began_s": time.time() - (time.monotonic() - request.began_s),
            "blocks": b"".join(self._names(keys[at : at + CHUNK_KEYS]) for at in range(0, len(keys), CHUNK_KEYS)),
            "block_tokens": self._block_tokens,
            "session": self._hash_of(session).hex() if session else "",
            "hints": request.hints.given(),
        }
        return self._publisher.publish_apart(self._topic, event)

    def reset(self) -> None:
        self._publisher.publish_apart(self._topic, {"type": ALL_BLOCKS_CLEARED, "source": self._source})

    def close(self) -> None:
        """Do nothing: the manager closes the publisher."""

    def _names(self, keys: Sequence[OffloadKey]) -> bytes:
        give_way()
        return b"".join([self._hash_of(key) + group_of(key) for key in keys])

    def _hash_of(self, name: bytes) -> bytes:
        each = self._hash.copy()
        each.update(name)
        return each.digest()
