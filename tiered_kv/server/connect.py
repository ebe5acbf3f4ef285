"""A host's cache for programs that put and get blocks, other than engines."""

from __future__ import annotations

import os
import uuid
from typing import Any, Final, Self

from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import TierUnavailableError
from tiered_kv.facade import BlockFacade
from tiered_kv.server.attach import Attachment, HostLink
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.protocol import Hello

_BATCH_BLOCKS_MAX: Final = 256


def connect(
    address: str, *, namespace: dict[str, Any] | None = None, block: dict[str, Any] | None = None, name: str = ""
) -> HostStack:
    """Connect to the cache of this host; close it with `HostStack.close`, or use it as a context manager.

    Args:
        address: "unix:" and the path of the server's socket.
        namespace: As in a stack's file; by default that of the server's file.
        block: As in a stack's file; given together with `namespace`.
        name: For the server's log; by default the number of the process.

    Raises:
        ConfigError: The server refuses this process.
        TierUnavailableError: No server listens there.
    """
    given = {"namespace": namespace, "block": block}
    settings = given if namespace is not None else None
    hello = Hello(f"{name or os.getpid()}-{uuid.uuid4().hex[:8]}", "scheduler", settings=settings)
    attachment = Attachment(address, hello)
    if not attachment.connect():
        attachment.close()
        raise TierUnavailableError(f"no server listens at {address}; start 'tiered-kv serve STACK --socket PATH'")
    return HostStack(attachment)


class HostStack(BlockFacade[AttachedManager]):
    """The cache of a host, with the calls of a `Stack`. Any thread may call it.

    While the server is away, nothing is stored and every block is a miss. The program is attached again when the server
    is back.

    Args:
        attachment: Has a connection.
    """

    def __init__(self, attachment: Attachment) -> None:
        regions: list[PrimaryRegion] = []
        manager = AttachedManager(attachment, on_attached=lambda link: regions.append(_rows_of(link)))
        super().__init__(manager, regions[-1])
        manager.on_attached = self._attached
        link = manager.link
        assert link is not None
        self._batch_blocks = min(_BATCH_BLOCKS_MAX, link.welcome.grant_max)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_attached(self) -> bool:
        """Whether the server answers."""
        return self._manager.is_attached

    @property
    def epoch(self) -> int:
        """The number of resets of the namespace, by any process, that this one knows. It never goes back."""
        return self._run(self._current_epoch)

    def _current_epoch(self) -> int:
        with self._lock:
            self._manager.poll()
            return self._manager.epoch

    def _attached(self, link: HostLink) -> None:
        """Use the rows of a new server, under the lock; no copy runs."""
        self.region = _rows_of(link)

    def _flush(self, end_s: float) -> bool:
        with self._call():
            with self._lock:
                number = self._manager.ask_idle()
            return self._wait(lambda: self._manager.is_idle(number), end_s)


def _rows_of(link: HostLink) -> PrimaryRegion:
    assert link.region is not None, "the program copies blocks itself"
    return link.region
