"""The names of a namespace's blocks in a server, `tkv1:<namespace>:<epoch>:<key>`, and the mark of the epoch.

A reset replaces the epoch; see `tiered_kv.toolkit.epoch`. The mark is the value of `tkv1:<namespace>:epoch`.
The tier's workers, its opening and its description call `KeySpace`, and so do the commands. Before a store, the server
must have the epoch's mark.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from tiered_kv.reasons import Reason
from tiered_kv.toolkit.epoch import Epoch
from tiered_kv_redis.exchange import Calls, Failures, run
from tiered_kv_redis.reasons import NodeError, ServerFailure
from tiered_kv_redis.replies import Reply, command
from tiered_kv_redis.topology import Topology

KEY_PREFIX = b"tkv1:"
MARK_PAUSE_S = 1.0
"""Seconds between two reads of the mark, while blocks are stored or used. So the server does not evict it."""


class KeySpace:
    """The names of a namespace's blocks, and the `EpochStore` of its mark.

    Methods that take a deadline (seconds of `time.monotonic()`) ask the server. They raise `NodeError` if it does not
    answer or refuses, and `FormatError` if another version of this project wrote the mark.
    """

    def __init__(
        self, topology: Topology, namespace_digest: bytes, namespace: Mapping[str, object] | None, tier: str = ""
    ) -> None:
        self._topology = topology
        self._prefix = KEY_PREFIX + namespace_digest.hex().encode() + b":"
        self._described = json.dumps(namespace, sort_keys=True, default=str).encode() if namespace is not None else b""
        self.epoch = Epoch(self, tier=tier, store_pause_s=MARK_PAUSE_S)

    # Worker threads.

    def prefix(self, deadline: float, *, is_saved: bool = False) -> bytes:
        """Return the beginning of the names of the epoch's blocks. With `is_saved`, the server then has the mark."""
        try:
            value = self.epoch.saved_value(deadline) if is_saved else self.epoch.value(deadline)
        except TimeoutError:
            raise NodeError(Reason.TIMEOUT) from None
        return self._prefix + value.encode() + b":"

    def contact(self, deadline: float) -> None:
        """Join the epoch or save its mark. Then ask the server, which `prefix` may not have done."""
        self.prefix(deadline, is_saved=True)
        self._call(deadline, b"STRLEN", b"epoch")

    def check_writes(self, deadline: float, block_bytes: int) -> None:
        """Check that the server accepts a command as long as a block, a delete and a write. No block changes."""
        self._call(deadline, b"STRLEN", bytes(block_bytes))
        self._call(deadline, b"UNLINK", b"none")
        self._call(deadline, b"SET", b"namespace", self._described)

    def recheck(self, deadline: float) -> None:
        """Check the mark if a connection was opened since `prefix`: the server may have an older mark now.

        The check does not wait for the next transfer, since this process may stay idle for long.
        """
        with contextlib.suppress(NodeError):
            self.prefix(deadline)

    # The epoch's store.

    def read(self, deadline: float) -> bytes | None:
        try:
            stored = self._call(deadline, b"GET", b"epoch")
        except NodeError as error:
            if error.reason not in (ServerFailure.WRONG_TYPE, ServerFailure.TOO_LONG):
                raise
            return b""  # damaged: another program wrote it
        return stored if isinstance(stored, bytes) else None

    def create(self, data: bytes, deadline: float) -> None:
        self.describe(deadline)
        self._call(deadline, b"SET", b"epoch", data, b"NX")

    def write(self, data: bytes, deadline: float) -> None:
        self.describe(deadline)
        self._call(deadline, b"SET", b"epoch", data)

    def remove(self, deadline: float) -> None:
        self._call(deadline, b"UNLINK", b"epoch")

    def describe(self, deadline: float) -> None:
        """Store the namespace in readable form, if this process knows it. A failure is ignored."""
        with contextlib.suppress(NodeError):
            if self._described:
                self._call(deadline, b"SET", b"namespace", self._described)

    def _call(self, deadline: float, verb: bytes, name: bytes, *arguments: bytes) -> Reply:
        name = self._prefix + name
        shares = self._topology.split([name], deadline)
        if not shares:
            raise NodeError(ServerFailure.CLUSTER_DOWN)
        failures: Failures = {}
        call = Calls(shares[0][0], [0], failures, {0: command(verb, name, *arguments)})
        run([call], deadline)
        if failures:
            if failures[0] in (ServerFailure.MOVED, ServerFailure.READ_ONLY):
                self._topology.refresh()
            raise NodeError(failures[0])
        return call.replies[0]
