"""What blocks are called in a server: `tkv1:<namespace>:<epoch>:<key>`.

The epoch is a token that a reset replaces; see `tiered_kv.toolkit.epoch`. Its mark is under `tkv1:<namespace>:epoch`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from tiered_kv.toolkit.epoch import Epoch
from tiered_kv_redis.exchange import Calls, converse
from tiered_kv_redis.node import NodeDownError
from tiered_kv_redis.reasons import CLUSTER_DOWN, MOVED, READ_ONLY, TIMEOUT, TOO_LONG, WRONG_TYPE
from tiered_kv_redis.replies import Reply, command
from tiered_kv_redis.topology import Topology

KEY_PREFIX = b"tkv1:"


class KeySpace:
    """What blocks are called in the server.

    Threads: `reset` belongs to the scheduler's thread; workers call the other methods.

    Args:
        topology: The servers.
        namespace_digest: 16 bytes.
        namespace: The same in readable form, which is stored beside the blocks.
    """

    def __init__(self, topology: Topology, namespace_digest: bytes, namespace: Mapping[str, object]) -> None:
        self._prefix = KEY_PREFIX + namespace_digest.hex().encode() + b":"
        self._marks = _Marks(topology, self._prefix, json.dumps(namespace, sort_keys=True, default=str).encode())
        self._epoch = Epoch(self._marks)
        topology.on_change = self._epoch.doubt

    def reset(self) -> None:
        """Begin a new epoch; does no I/O."""
        self._epoch.renew()

    def contact(self, deadline: float) -> None:
        """Join or save the epoch, and have the server answer, whatever it has answered before.

        Raises:
            NodeDownError: The server is not reached, or refuses.
            FormatError: Another version of this project wrote the epoch's mark.
        """
        self.prefix(deadline, is_saved=True)
        self._marks.ping(deadline)

    def prefix(self, deadline: float, *, is_saved: bool) -> bytes:
        """Return what the names of the epoch's blocks begin with.

        Args:
            deadline: Seconds of `time.monotonic()`.
            is_saved: Whether the server must have the epoch's mark, as it must before anything is stored.

        Raises:
            NodeDownError: The server is not reached, or refuses.
            FormatError: Another version of this project wrote the epoch's mark.
        """
        try:
            token = self._epoch.saved_token(deadline) if is_saved else self._epoch.token(deadline)
        except TimeoutError:
            raise NodeDownError(TIMEOUT) from None
        return self._prefix + token.encode() + b":"

    def recheck(self, deadline: float) -> None:
        """Look at the mark now if a connection was made anew since `prefix`, whose caller has used it by now.

        The server may have been replaced by one with an older mark, and this process may stay idle for long.
        """
        with contextlib.suppress(NodeDownError):
            self.prefix(deadline, is_saved=False)

    def flush(self, deadline: float) -> None:
        """Write the mark of a reset that no use of the server has written yet; raises as `prefix` does."""
        if not self._epoch.is_saved:
            self.prefix(deadline, is_saved=True)

    @property
    def repairs(self) -> int:
        """How often the server had lost the epoch's mark or fallen back to an older one, and got it again."""
        return self._epoch.repairs


class _Marks:
    """The epoch's mark in the server: an `EpochStore`.

    Args:
        topology: The servers.
        prefix: What the namespace's names begin with.
        described: The namespace in readable form.
    """

    def __init__(self, topology: Topology, prefix: bytes, described: bytes) -> None:
        self._topology = topology
        self._name = prefix + b"epoch"
        self._description_name = prefix + b"namespace"
        self._described = described

    def read(self, deadline: float) -> bytes | None:
        try:
            stored = self._call(deadline, b"GET", self._name)
        except NodeDownError as error:
            if error.reason not in (WRONG_TYPE, TOO_LONG):
                raise
            return b""  # another client wrote it: damaged
        return stored if isinstance(stored, bytes) else None

    def create(self, data: bytes, deadline: float) -> None:
        self._describe(deadline)
        self._call(deadline, b"SET", self._name, data, b"NX")

    def write(self, data: bytes, deadline: float) -> None:
        self._describe(deadline)
        self._call(deadline, b"SET", self._name, data)

    def ping(self, deadline: float) -> None:
        """Ask the server that has the mark a question that it may always answer."""
        self._call(deadline, b"STRLEN", self._name)

    def _describe(self, deadline: float) -> None:
        """Store the namespace in readable form, for people; in a cluster another server has it."""
        with contextlib.suppress(NodeDownError):
            self._call(deadline, b"SET", self._description_name, self._described)

    def _call(self, deadline: float, name: bytes, key: bytes, *arguments: bytes) -> Reply:
        shares = self._topology.split([key], deadline)
        if not shares:
            raise NodeDownError(CLUSTER_DOWN)
        ((node, _),) = shares
        calls = Calls(node, [command(name, key, *arguments)])
        converse([calls], deadline)
        if calls.failures:
            if calls.failures[0] in (MOVED, READ_ONLY):
                self._topology.refresh()
            raise NodeDownError(calls.failures[0])
        return calls.replies[0]
