"""The servers of a tier, and which server has a block.

The tier's workers call `Topology`. Its background thread asks for the addresses again after a change, at most twice a
second. A wrong map of a cluster costs an attempt, and never leads to a wrong block.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from redis import Redis
from redis.connection import ConnectionPool
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from tiered_kv.reasons import Reason
from tiered_kv.system.threads import BackgroundTask
from tiered_kv.toolkit.resolver import words_of
from tiered_kv_redis import reasons as why
from tiered_kv_redis.connection import pool_options, sentinel_options, speaks_other
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import NodeError, RedisReason, ServerFailure, reason_of_error, sentence
from tiered_kv_redis.settings import Address, RedisSettings

_REFRESH_PAUSE_S = 0.5  # the time between two requests for the servers' addresses
_REFRESH_WAIT_S = 0.2  # how long to wait for new addresses if older ones are known
_ASK_S = 1.0
_CLOSE_WAIT_S = 0.5
_NAMED_MAX = 4  # servers in a message


class Topology:
    """The servers, and how keys are spread over them. Any thread may call.

    At first use and after `refresh`, a background thread asks the sentinels or the cluster's members for the servers'
    addresses, one after the other. Each may take long; a caller waits until its deadline at most.

    `on_change` is called, on any thread, when a connection was opened or addresses were received: the server may have
    been replaced by one with older data.

    Attributes:
        said: The last text of a server or library, by reason.
    """

    def __init__(self, settings: RedisSettings, on_change: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._on_change = on_change
        self.said: dict[RedisReason, str] = {}
        self._nodes: dict[Address | None, Node] = {}
        """The servers by address. The dict is replaced as a whole, as `_owners` is: so readers need no lock."""
        self._owners: Mapping[int, Node] = {}
        """The server of each slot of a cluster. Without a cluster, the only server has the slot 0."""
        self._is_stale = settings.mode != "standalone"  # whether the next `split` asks for addresses
        self._reason: RedisReason | None = None  # why the last request for addresses failed
        self._asked_s = -math.inf
        """When the last request for addresses ended, in seconds of `time.monotonic()`."""
        self._asker = BackgroundTask(self._ask, "tiered-kv-redis-topology")
        if settings.mode == "standalone":
            self._use({0: settings.addresses[0] if settings.socket is None else None})

    def split(self, names: Sequence[bytes], deadline: float) -> list[tuple[Node, list[int]]]:
        """Return each server with the positions of its names. A name in a slot without a server is left out.

        Raises `NodeError`: the servers' addresses are unknown at the deadline.
        """
        self._ensure_known(deadline)
        owners = self._owners
        if not owners:
            raise NodeError(self._reason or Reason.TIMEOUT)
        if self._settings.mode != "cluster":
            return [(owners[0], list(range(len(names))))]
        parts: dict[Node, list[int]] = {}
        for position, name in enumerate(names):
            node = owners.get(key_slot(name))
            if node is None:
                self.refresh()
            else:
                parts.setdefault(node, []).append(position)
        return list(parts.items())

    def refresh(self) -> None:
        """Have the next `split` ask for addresses, at most twice a second: servers may have changed places."""
        self._is_stale = self._settings.mode != "standalone"

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    @property
    def endpoints(self) -> str:
        """The known servers, or the ones of the settings, for messages."""
        known = [node.label for node in self.nodes()] or [_label_of(each) for each in self._settings.addresses]
        return _listed(known)

    def sentence(self, reason: RedisReason, text: str | None = None, *, wants: str = "") -> str:
        """Return which server cannot be used, why, and the remedy; `text` is by default the last one for the reason."""
        said = self.said.get(reason, "") if text is None else text
        down = [node.label for node in self.nodes() if node.is_down] if reason in why.OF_ONE_SERVER else []
        return sentence(_listed(down) or self.endpoints, reason, said, self._settings.secret_texts(), wants=wants)

    def explained(self, reason: RedisReason) -> RedisReason:
        """Return `reason`, or a clearer one if only this client speaks TLS, or only the server.

        To find out, it asks the first server, and waits for a second at most: a server that hangs answers nothing.
        """
        settings = self._settings
        if reason not in why.UNLIKE or settings.socket is not None:
            return reason
        host, port = settings.addresses[0]
        is_other = speaks_other(host, port, tls=settings.tls, timeout_s=min(_ASK_S, settings.connect_timeout))
        return reason if not is_other else ServerFailure.WITHOUT_TLS if settings.tls else ServerFailure.WITH_TLS

    def close(self) -> None:
        """Close every connection, and wait for the background threads, half a second in all."""
        nodes = self.nodes()
        for node in nodes:
            node.close()
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for join in (self._asker.join, *(node.join for node in nodes)):
            join(max(0.0, deadline - time.monotonic()))  # a thread that waits for a server ends by itself

    def _ensure_known(self, deadline: float) -> None:
        if self._owners and not self._is_stale:
            return
        if self._is_due():
            self._asker.ask()
        wait_s = max(0.0, deadline - time.monotonic())
        self._asker.join(min(wait_s, _REFRESH_WAIT_S) if self._owners else wait_s)

    def _is_due(self) -> bool:
        return self._is_stale and time.monotonic() - self._asked_s >= _REFRESH_PAUSE_S

    def _ask(self) -> None:
        if not self._is_due():
            return
        self._is_stale = False  # first: a `refresh` during the request is not lost
        self._reason = None
        try:
            self._use(self._find_owners())
        except Exception as error:  # an invalid reply may raise any exception
            self._is_stale = True
            self._reason = reason_of_error(error)
            self.said[self._reason] = words_of(error)
        else:
            self._on_change()
        self._asked_s = time.monotonic()

    def _find_owners(self) -> Mapping[int, Address]:
        """Ask one sentinel or member after the other, until one returns addresses."""
        ask = self._master_of if self._settings.mode == "sentinel" else self._masters_of
        failure: Exception = NodeError(
            Reason.UNAVAILABLE if self._settings.mode == "sentinel" else ServerFailure.CLUSTER_DOWN
        )
        for member in self._members():
            try:
                owners = ask(member)
            except Exception as error:  # redis-py may raise any exception for an invalid reply
                failure = error
                continue
            if owners:
                return owners
        raise failure

    def _members(self) -> Iterable[Address]:
        if self._settings.mode == "sentinel":
            return self._settings.addresses
        # All known members may have moved; then the settings still name some. Each that is down may take seconds.
        known = [address for address in self._nodes if address]
        random.shuffle(known)
        answering = [address for address in known if not self._nodes[address].is_down]
        return dict.fromkeys((*answering, *self._settings.addresses, *known))

    def _master_of(self, sentinel: Address) -> Mapping[int, Address]:
        """Return the address of the service's master from a sentinel, none if the master is down."""
        with closing(Redis.from_pool(ConnectionPool(**sentinel_options(self._settings, sentinel)))) as client:
            masters: Any = client.sentinel_masters()  # Any: redis-py's type has no fields
        state = masters.get(self._settings.service)
        if not state or not state["is_master"] or state["is_sdown"] or state["is_odown"]:
            return {}
        return {0: Address(str(state["ip"]), int(state["port"]))}

    def _masters_of(self, member: Address) -> Mapping[int, Address]:
        with closing(Redis.from_pool(ConnectionPool(**pool_options(self._settings, member)))) as client:
            return masters_of(client.execute_command("CLUSTER SLOTS"), member)  # type: ignore[no-untyped-call]

    def _use(self, owners: Mapping[int, Address | None]) -> None:
        before = self._nodes
        nodes = {address: before.get(address) or self._node_at(address) for address in set(owners.values())}
        self._nodes = nodes
        self._owners = {slot: nodes[address] for slot, address in owners.items()}
        for address in before.keys() - nodes.keys():
            before[address].retire()

    def _node_at(self, address: Address | None) -> Node:
        label = str(self._settings.socket) if address is None else _label_of(address)
        options = pool_options(self._settings, address)
        return Node(label, options, self._on_change, self.refresh, self.said, self._settings.silence_s)


def masters_of(ranges: Sequence[Any], member: Address) -> dict[int, Address]:  # Any: as redis-py has it
    """Return the address of each slot's master from a member's reply to CLUSTER SLOTS; slots without one are left out.

    https://redis.io/docs/latest/commands/cluster-slots/. Port 0 means that the master has no address any more; a reply
    without a host means the host of `member`.
    """
    masters: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in ranges:
        if port:
            name = member.host if host in (None, b"", b"?") else host.decode()
            slots = range(max(first, 0), min(last + 1, REDIS_CLUSTER_HASH_SLOTS))  # a reply may have any numbers
            masters.update(dict.fromkeys(slots, Address(name, port)))
    return masters


def _listed(labels: Sequence[str]) -> str:
    more = [f"{len(labels) - _NAMED_MAX} more"] if len(labels) > _NAMED_MAX else []
    return ", ".join(sorted(labels)[:_NAMED_MAX] + more)


def _label_of(address: Address) -> str:
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
