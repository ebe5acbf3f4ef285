"""What blocks are called in a server: `tkv1:<namespace>:<generation>:<key>`.

The *generation* is the part of every name that a reset replaces: eight random bytes in hexadecimal, kept in the server
under `tkv1:<namespace>:generation`. A tier reads it when it first reaches the server, writes one if there is none, and
stays with it. A reset draws a new one, at once and without asking anybody, and has it written before the first use of
the server that follows. So

- what anybody stored before the reset is under another generation, which nobody can draw again;
- other processes go on with theirs until they are reset or opened again, and share no block with this one until then;
- if the server loses the generation (evicted, flushed, restarted empty), processes that run go on, and the next
  to open draws a new one: blocks are lost, and none comes back.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiered_kv_redis.exchange import Calls, converse
from tiered_kv_redis.node import NodeDownError
from tiered_kv_redis.reasons import CLUSTER_DOWN, MOVED, READ_ONLY, TOO_LONG, WRONG_TYPE
from tiered_kv_redis.replies import Reply, command
from tiered_kv_redis.topology import Topology

KEY_PREFIX = b"tkv1:"
TOUCH_PAUSE_S = 30.0
"""How often the generation is touched, so that a server that evicts by use keeps it."""

_TOKEN = re.compile(rb"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation, as one epoch of a tier uses it.

    Args:
        epoch: The tier's epoch; see `QueuedTier.begin_epoch`.
        token: Sixteen hexadecimal digits; empty while the server has not been reached.
        is_written: Whether the server has it.
    """

    epoch: int
    token: bytes = b""
    is_written: bool = False


class KeySpace:
    """What blocks are called in the server.

    Threads: `reset` is the scheduler's; the other methods are the workers'.

    Args:
        topology: The servers.
        namespace_digest: 16 bytes.
        namespace: The same in readable form, which is stored beside the blocks.
    """

    def __init__(self, topology: Topology, namespace_digest: bytes, namespace: Mapping[str, object]) -> None:
        self._topology = topology
        self._prefix = KEY_PREFIX + namespace_digest.hex().encode() + b":"
        self._described = json.dumps(namespace, sort_keys=True, default=str).encode()
        self._generation = Generation(0)
        self._settling = threading.Lock()  # held by the worker that reads or writes the generation
        self._swapping = threading.Lock()  # held for an assignment, by that worker and by `reset`
        self._touched_at = 0.0

    def reset(self, epoch: int) -> None:
        """Begin a new generation, for the tier's new epoch."""
        with self._swapping:
            self._generation = Generation(epoch, _new_token())

    def contact(self, deadline: float) -> None:
        """Have the server answer, whatever it has answered before.

        Raises:
            NodeDownError: The server is not reached, or refuses.
        """
        self.current(deadline)
        self._call(deadline, b"STRLEN", self._key)

    def current(self, deadline: float) -> Generation:
        """Return the generation, which the server has.

        Raises:
            NodeDownError: The server is not reached, or refuses.
        """
        generation = self._generation
        if generation.is_written:
            if time.monotonic() - self._touched_at >= TOUCH_PAUSE_S:
                self._touched_at = time.monotonic()
                with contextlib.suppress(NodeDownError):  # the blocks may be elsewhere than the generation
                    self._call(deadline, b"TOUCH", self._key)
            return generation
        if not self._settling.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NodeDownError("timeout")
        try:
            return self._settle(deadline)
        finally:
            self._settling.release()

    def flush(self, deadline: float) -> None:
        """Write a generation that a reset drew and no use of the server has written yet."""
        if self._generation.token and not self._generation.is_written:
            self.current(deadline)

    def wire_keys(self, generation: Generation, keys: Sequence[bytes]) -> list[bytes]:
        """Return what the blocks `keys` are called in a generation."""
        prefix = self._prefix + generation.token + b":"
        return [prefix + key for key in keys]

    @property
    def _key(self) -> bytes:
        return self._prefix + b"generation"

    def _settle(self, deadline: float) -> Generation:
        generation = self._generation
        if generation.is_written:  # another worker was first
            return generation
        token = generation.token
        if token:
            self._describe(deadline)
            self._call(deadline, b"SET", self._key, token)
        else:
            token = self._stored(deadline)
            if not token:
                self._describe(deadline)
                self._call(deadline, b"SET", self._key, _new_token(), b"NX")
                token = self._stored(deadline)
            if not _TOKEN.fullmatch(token):  # written by somebody else, or gone again
                token = _new_token()
                self._call(deadline, b"SET", self._key, token)
        self._touched_at = time.monotonic()
        settled = Generation(generation.epoch, token, True)
        with self._swapping:
            if self._generation is generation:  # otherwise a reset came between, and the next use writes its own
                self._generation = settled
        return settled

    def _stored(self, deadline: float) -> bytes:
        try:
            stored = self._call(deadline, b"GET", self._key)
        except NodeDownError as error:
            if error.reason not in (WRONG_TYPE, TOO_LONG):  # what somebody else wrote is replaced
                raise
            return b""
        return stored if isinstance(stored, bytes) else b""

    def _describe(self, deadline: float) -> None:
        """Write beside the blocks whose they are, for people."""
        self._call(deadline, b"SET", self._prefix + b"namespace", self._described)

    def _call(self, deadline: float, name: bytes, key: bytes, *arguments: bytes) -> Reply:
        shares = self._topology.split([key], deadline)
        if not shares:
            raise NodeDownError(CLUSTER_DOWN)
        ((node, _),) = shares
        calls = Calls(node, [command(name, key, *arguments)])
        converse([calls], deadline)
        if calls.failures:
            if calls.trouble or calls.failures[0] in (MOVED, READ_ONLY):
                self._topology.refresh()
            raise NodeDownError(calls.failures[0])
        return calls.replies[0]


def _new_token() -> bytes:
    return secrets.token_hex(8).encode()
