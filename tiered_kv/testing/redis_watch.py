"""What the namespaces in a Redis server take, watched while processes that have a quota come and go."""

from __future__ import annotations

import threading
from typing import Final, Self

from tiered_kv.testing.redis_servers import RedisServer

_WATCH_S: Final = 0.25


class NamespacesWatched:
    """The most that the blocks of each namespace in a server came to, by a look every quarter of a second.

    Args:
        server: The server.
        record_bytes: How long each record is.
        surveys_end_early: Whether a survey that nobody has gone on with for 8 s ends then, as it does after a minute.
    """

    _COUNT = b"""
        local found = {}
        for _, key in ipairs(redis.call('KEYS', 'tkv1:*')) do
            local namespace = string.match(key, '^tkv1:(%x+):%x+:')
            if namespace then found[namespace] = (found[namespace] or 0) + 1 end
        end
        local lines = {}
        for namespace, count in pairs(found) do table.insert(lines, namespace .. ' ' .. count) end
        return table.concat(lines, '\\n')
    """  # in one step; names only, since a look at a value would count as a use of it
    _END = b"""
        for _, key in ipairs(redis.call('KEYS', 'tkv1:*:survey')) do
            local left = redis.call('PTTL', key)
            if left >= 0 and left < 52000 then redis.call('UNLINK', key) end
        end
    """

    def __init__(self, server: RedisServer, record_bytes: int, *, surveys_end_early: bool) -> None:
        self._server = server
        self._record_bytes = record_bytes
        self._ends = surveys_end_early
        self._peaks: dict[str, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._look()
        sizes = {
            int(self._server.call("STRLEN", key)[1:])
            for key in self._server.keys("tkv1:*")
            if key.count(b":", 0, 55) > 2
        }
        assert sizes <= {self._record_bytes}, "records are not as long as was reckoned with"

    def over(self, limit_bytes: int) -> list[str]:
        """Return the namespaces that took more than their limit at any look."""
        assert self._peaks, "no block was ever in the server"
        over = {namespace: count * self._record_bytes for namespace, count in self._peaks.items()}
        return [f"{namespace} took {size} bytes" for namespace, size in over.items() if size > limit_bytes]

    def _watch(self) -> None:
        while not self._stopping.wait(_WATCH_S):
            self._look()
            if self._ends:
                self._server.call("EVAL", self._END, "0")

    def _look(self) -> None:
        for line in self._server.call("EVAL", self._COUNT, "0").splitlines():
            namespace, _, count = line.decode().partition(" ")
            if count:  # or it is the length of the reply
                self._peaks[namespace] = max(self._peaks.get(namespace, 0), int(count))
