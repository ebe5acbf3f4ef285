"""A host's cache for programs that put and get blocks, other than engines.

A program calls `connect`, and then `put` and `get`, on any thread. `HostStack`'s one lock serializes all use of the
manager. What must stay true: each call ends by its timeout, also if the server hangs.
"""

from __future__ import annotations

import hashlib
import os
import select
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Final

from tiered_kv.base import OffloadKey, ReqContext, get_offload_group_idx, make_offload_key
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.server import protocol
from tiered_kv.server.attach import Attachment, HostLink
from tiered_kv.server.attached_request import AttachedRequest, parts_of
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.idle import IdlePoll
from tiered_kv.server.protocol import KEY_BYTES_MAX, Hello, Message
from tiered_kv.stack.buffers import Blocks
from tiered_kv.stack.calls import end_of
from tiered_kv.stack.facade import keys_of
from tiered_kv.stack.values import ValueFacade
from tiered_kv.tiering.interface import CalledManager

START_A_SERVER: Final = "start 'tiered-kv serve STACK --socket PATH'"
AWAIT_S: Final = 0.002
"""Limit of one wait of a thread for a message, in seconds. Another thread may have taken the message already."""
_BATCH_BLOCKS_MAX: Final = 256
"""Limit of the blocks that a `put` hands over at once."""
_REQUEST_KEYS_MAX: Final = 4096
"""Limit of the keys of a call that the server knows at a time: for each message, the server looks at all these keys."""
_DIGEST_BYTES: Final = 64


def connect(
    address: str, *, namespace: dict[str, Any] | None = None, block: dict[str, Any] | None = None, name: str = ""
) -> HostStack:
    """Connect to the cache of this host; close it with `HostStack.close`, or use it as a context manager.

    Args:
        address: "unix:" and the path of the server's socket.
        namespace: As in a stack's file; by default the namespace of the server's file.
        block: As in a stack's file; given together with `namespace`.
        name: For the server's log; by default the number of the process.

    Raises:
        ConfigError: The server refuses this process.
        TierUnavailableError: No server answers there.
    """
    if (namespace is None) != (block is None):
        missing = "namespace" if namespace is None else "block"
        raise ConfigError("give namespace and block together, or leave both to the server's file", location=missing)
    settings = None if namespace is None else {"namespace": namespace, "block": block}
    hello = Hello(f"{name or os.getpid()}-{uuid.uuid4().hex[:8]}", "scheduler", settings=settings)
    attachment = Attachment(address, hello)
    try:
        attachment.open()
    except OSError as error:
        to_do = START_A_SERVER
        if isinstance(error, PermissionError):
            to_do = "start the server with --allow-user, and let this user reach the socket"
        raise TierUnavailableError(f"no server answers at {address}: {error.strerror or error}; {to_do}") from error
    return HostStack(attachment)


class ProgramManager(AttachedManager, CalledManager):
    """An attached manager with the methods that a program's calls need.

    The caller holds `HostStack`'s lock for each call that changes the manager's state or sends a message. Without the
    lock run `await_message`, and the questions that only read state: the properties, `is_idle`, `is_outdated`,
    `stores_nothing_of`, `has_kept` and `reserve_stores`.

    Rows to write pass through three places, by which a program sees whether rows will come:

    - `AttachedStores`: blocks that found too few free rows (`are_short`), until the next `poll` asks for rows.
    - `link.asked`: the numbers of rows that the server was asked for, until the server grants them.
    - `link.free`: rows that the server has granted and no store has taken.
    """

    keys_are_alike = False
    callers_have_timeouts = True
    _has_heard = False
    """Whether a message of the server was handled since a thread last called `await_message`."""

    @property
    def jobs_in_flight(self) -> int:
        """1 if there are rows to write, or the server may still grant rows; else 0."""
        link = self.link
        return int(link is not None and bool(link.asked or self._stores.are_short or link.free))

    @property
    def is_granting(self) -> bool:
        """Whether an answer about rows to write is due: rows were asked for, or the next `poll` will ask for rows."""
        return self.link is not None and bool(self.link.asked or self._stores.are_short)

    @property
    def has_tiers_below(self) -> bool:
        return self.link is not None and len(self.link.welcome.tiers) > 1

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """See `CalledManager`. In one point the answer differs: a block behind a missing block of the request is False.

        `CalledManager` answers None for such a block.
        """
        request = self._request_of(req_context)
        request.is_prefix = True
        if request.keys and len(request.keys) + len(keys) > _REQUEST_KEYS_MAX and request.transfers <= 0:
            rows = request.rows
            if any(key not in rows for key in keys):
                self._begin_anew(request)
        return self.lookup_many(keys, req_context)

    def _begin_anew(self, request: AttachedRequest) -> None:
        """Continue as another request of the server.

        A request of the server has a limit of keys (`_REQUEST_KEYS_MAX`), and a program's call has no limit.
        """
        if request.link is not None and request.link is self.link:
            self.server.send(protocol.END, request.number)
        self._requests.begin_anew(request)

    def let_go(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._release(keys, self._request_of(req_context))

    def contains_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        request = self._request_of(req_context)
        if not self.is_attached or request.is_outdated:
            return [False] * len(keys)
        asked = [key for key in dict.fromkeys(keys) if key not in request.stored]
        if asked:
            request.stored.update(dict.fromkeys(asked))
            self._tell(request)
            for part, packed in parts_of(asked):
                request.stored_asked.append(part)
                self.server.send(protocol.ACQUIRE, request.number, len(part), packed, protocol.ONLY_STORED)
            self.server.send(protocol.PING)  # the answer comes at once: so the server is not silent while a tier looks
            request.asked_s, request.waits_for_answer = self._clock(), False
        if self.link is None:  # the connection was lost while messages were sent
            return [False] * len(keys)
        answers = [request.stored[key] for key in keys]
        unknown = answers.count(None)
        if unknown:
            answer = self._wait(request, unknown)
            answers = [answer if each is None else each for each in answers]
        return answers

    def stores_nothing_of(self, req_context: ReqContext) -> bool:
        """Return whether no block of a request is stored now: the server is away, or the request stores no block."""
        request = self._request_of(req_context)
        return not self.is_attached or request.is_outdated or request.hints.skips_store

    def is_outdated(self, req_context: ReqContext) -> bool:
        return self._request_of(req_context).is_outdated

    def has_kept(self, req_context: ReqContext) -> bool:
        """Return False: only the server knows which blocks secondary tiers have taken."""
        return False

    def spare_own(self, req_context: ReqContext) -> None:
        """Do nothing: the server evicts the blocks of the request that was used last after all others."""

    def reserve_stores(self, num_blocks: int) -> bool:
        """Return True: the server limits the stores of its tiers."""
        return True

    def release_stores(self, num_blocks: int) -> None:
        """Do nothing; see `reserve_stores`."""

    def ask_idle(self) -> tuple[HostLink | None, int]:
        """Ask the server to tell when no job of a tier is in flight. `is_idle` takes what this method returns."""
        number = self._requests.new_number()
        self.server.send(protocol.PING, number, flags=protocol.WHEN_IDLE)
        self.server.flush()
        return self.link, number

    def is_idle(self, asked: tuple[HostLink | None, int]) -> bool:
        """Return whether the server has answered `ask_idle`, or was away since then."""
        link, number = asked
        return link is None or link is not self.link or link.pong >= number

    def await_message(self, timeout_s: float) -> None:
        """Wait for a message of the server, at most `timeout_s`: another thread may take the message. Any thread."""
        if self._has_heard:
            self._has_heard = False
            return
        link, poller = self.link, select.poll()
        if link is not None:
            with suppress(ValueError):  # the connection has been closed
                poller.register(link.channel.sock, select.POLLIN)
        poller.poll(timeout_s * 1e3)

    def _handle(self, message: Message) -> None:
        self._has_heard = True
        super()._handle(message)


class HostStack(ValueFacade[ProgramManager]):
    """The cache of a host, with the calls of a `Stack` but `counters` and `explain`. Any thread may call it.

    While the server is away, no block is stored and every block is a miss. The program attaches again when the server
    is back.

    `put` hands over up to `_BATCH_BLOCKS_MAX` blocks at once, or the blocks of a quarter of the memory if they are
    fewer. It counts these blocks without a confirmation. A paused server stores them when it continues. A server that
    ends loses them, with all of its memory. If a `put` has more blocks, it counts the blocks that the server reports as
    stored. `put` does not wait for the tiers below, which store no block over their `store_budget`.

    Args:
        attachment: An attachment that is connected.
    """

    def __init__(self, attachment: Attachment) -> None:
        manager = ProgramManager(attachment, on_attached=self._attached)
        super().__init__(manager, self.region)
        self._idle_poll = IdlePoll(manager, self._lock)

    def close(self, timeout: float = 5.0) -> None:
        end_of(timeout)  # an invalid timeout raises before anything ends
        self._idle_poll.stop()
        super().close(timeout)

    def _pause(self, pause_s: float) -> float:
        self._manager.await_message(AWAIT_S)
        return pause_s

    @property
    def is_attached(self) -> bool:
        """Whether the server answers."""
        return self._manager.is_attached

    @property
    def epoch(self) -> int:
        """The number of resets of the namespace that this program knows. It never decreases; any process may reset."""
        return self._run(self._current_epoch)

    def _current_epoch(self) -> int:
        with self._lock:
            self._manager.poll()
            return self._manager.epoch

    def _attached(self, link: HostLink) -> None:
        """Use the rows of a new server, under the lock; no copy runs."""
        assert link.region is not None, "the program copies blocks itself"
        self.region = link.region
        self._batch_blocks = min(_BATCH_BLOCKS_MAX, link.welcome.grant_max)

    def _keys_of(self, block_hashes: Sequence[bytes]) -> list[OffloadKey]:
        return names_of(keys_of(block_hashes))

    def _store(
        self, keys: Sequence[OffloadKey], blocks: Blocks, context: ReqContext, reserved: int, end_s: float
    ) -> bool:
        if super()._store(keys, blocks, context, reserved, end_s):
            return True
        # `super` has asked the server for rows. To wait for the answer takes less time than to store in small batches.
        link = self._manager.link
        if link is not None:
            until_s = min(end_s, time.monotonic() + link.welcome.answer_s)
            self._wait(lambda: not self._manager.is_granting, until_s)
            with self._lock:
                if self._manager.stores_nothing_of(context):  # the server has gone during the wait
                    return False
        return super()._store(keys, blocks, context, reserved, end_s)

    def _flush(self, end_s: float) -> bool:
        with self._call():
            with self._lock:
                asked = self._manager.ask_idle()
            return self._wait(lambda: self._manager.is_idle(asked), end_s)


def names_of(keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Return the keys that the server gets: a key that is too long is replaced by a digest, all others stay.

    A key is too long if it has `KEY_BYTES_MAX` bytes or more. The digest (BLAKE2b, RFC 7693) has exactly
    `KEY_BYTES_MAX` bytes, so no key that stays has its length. The last 64 bits of the block's hash end the digest,
    too: events name a block by these bits.
    """
    return [key if len(key) < KEY_BYTES_MAX else _digest(key) for key in keys]


def _digest(key: OffloadKey) -> OffloadKey:
    digest = hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest()
    return make_offload_key(digest.ljust(KEY_BYTES_MAX - 12, b"\0") + key[-12:-4], get_offload_group_idx(key))
