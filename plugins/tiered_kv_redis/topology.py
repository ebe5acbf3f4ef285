"""The servers, and which of them has a block."""

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

from tiered_kv.toolkit.background import BackgroundTask
from tiered_kv_redis.endpoint import pool_options, sentinel_options
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import CLUSTER_DOWN, TIMEOUT, UNAVAILABLE, NodeError, reason_of_error
from tiered_kv_redis.settings import Address, RedisSettings

REFRESH_PAUSE_S = 0.5
"""The time between two requests for the servers' addresses."""
REFRESH_WAIT_S = 0.2
"""How long to wait for the answer if there is an older one, which is used then."""
_CLOSE_WAIT_S = 0.5


class Topology:
    """The servers, and how keys are spread over them. Any thread may call.

    Where the servers are is asked at first use and after `refresh`: of sentinels, or of a cluster's members. One is
    asked after the other, and each may take long. So a thread in the background asks, one at a time, and nobody waits
    for it longer than a deadline allows.

    `on_change` is called by any thread when a connection was made anew, or addresses were received. A server may have
    been replaced then by one with older data.
    """

    def __init__(self, settings: RedisSettings, on_change: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._on_change = on_change
        self._nodes: dict[Address | None, Node] = {}  # this and the next are replaced as a whole
        self._owners: Mapping[int, Node] = {}  # by a cluster's slot; otherwise the one server has number 0
        self._is_stale = settings.mode != "standalone"
        self._reason = ""  # why the last question was not answered
        self._asked_at = -math.inf
        self._last_useful: Address | None = None
        self._asker = BackgroundTask(self._ask, "tiered-kv-redis-topology")
        if settings.mode == "standalone":
            self._use({0: settings.addresses[0] if settings.socket is None else None})

    def split(self, names: Sequence[bytes], deadline: float) -> list[tuple[Node, list[int]]]:
        """Return the servers that have `names`, each with the positions of its own.

        A name that no server has now is left out.

        Raises:
            NodeError: The servers' addresses are unknown at the deadline.
        """
        self._ensure_known(deadline)
        owners = self._owners
        if not owners:
            raise NodeError(self._reason or TIMEOUT)
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
        """Note that servers may have changed places; the next `split` asks, if nobody has asked a moment ago."""
        self._is_stale = self._settings.mode != "standalone"

    def nodes(self) -> list[Node]:
        """Return the servers that are known."""
        return list(self._nodes.values())

    def close(self) -> None:
        """Close every connection, and wait for the threads in the background for half a second in all."""
        nodes = self.nodes()
        for node in nodes:
            node.close()
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for join in (self._asker.join, *(node.join for node in nodes)):
            join(max(0.0, deadline - time.monotonic()))  # a thread that a server keeps ends by itself

    def _ensure_known(self, deadline: float) -> None:
        """Have somebody asked if need be; what was known before stays in use until there is an answer."""
        if self._owners and not self._is_stale:
            return
        if self._is_due():
            self._asker.ask()
        wait_s = max(0.0, deadline - time.monotonic())
        self._asker.join(min(wait_s, REFRESH_WAIT_S) if self._owners else wait_s)

    def _is_due(self) -> bool:
        return self._is_stale and time.monotonic() - self._asked_at >= REFRESH_PAUSE_S

    def _ask(self) -> None:
        if not self._is_due():
            return
        self._is_stale = False  # first, so that a refresh that comes meanwhile is not lost
        self._reason = ""
        try:
            self._use(self._find_owners())
        except Exception as error:  # an invalid reply may raise any exception; no caller could catch it
            self._is_stale = True
            self._reason = reason_of_error(error)
        else:
            self._on_change()
        self._asked_at = time.monotonic()

    def _find_owners(self) -> Mapping[int, Address]:
        """Ask one sentinel or member after the other, until one knows where the servers are."""
        ask = self._master_of if self._settings.mode == "sentinel" else self._masters_of
        failure: Exception = NodeError(UNAVAILABLE if self._settings.mode == "sentinel" else CLUSTER_DOWN)
        for member in self._members():
            try:
                owners = ask(member)
            except Exception as error:  # redis-py may raise any exception for an invalid answer
                failure = error
                continue
            if owners:
                self._last_useful = member
                return owners
        raise failure

    def _members(self) -> Iterable[Address]:
        named = self._settings.addresses
        if self._settings.mode == "sentinel":
            return sorted(named, key=lambda address: address != self._last_useful)
        # Those that are known may have moved, all of them; those that the settings name are found again.
        known = [(node.is_down, random.random(), address) for address, node in self._nodes.items() if address]
        return dict.fromkeys((*(address for _, _, address in sorted(known)), *named))

    def _master_of(self, sentinel: Address) -> Mapping[int, Address]:
        """Return what a sentinel says: where the service's master is, unless it is down."""
        options = sentinel_options(self._settings)
        with closing(Redis(host=sentinel.host, port=sentinel.port, **options)) as client:
            masters: Any = client.sentinel_masters()  # Any: its type says less than what comes
        state = masters.get(self._settings.service)
        if not state or not state["is_master"] or state["is_sdown"] or state["is_odown"]:
            return {}
        return {0: Address(str(state["ip"]), int(state["port"]))}

    def _masters_of(self, member: Address) -> Mapping[int, Address]:
        """Return what a cluster's member says: where the master of each slot is that has one."""
        with closing(Redis.from_pool(ConnectionPool(**pool_options(self._settings, member)))) as client:
            return masters_of(client.execute_command("CLUSTER SLOTS"), member)  # type: ignore[no-untyped-call]

    def _use(self, owners: Mapping[int, Address | None]) -> None:
        """Use the servers at these addresses from now on, and no others."""
        before = self._nodes
        nodes = {address: before.get(address) or self._node_at(address) for address in set(owners.values())}
        self._nodes = nodes
        self._owners = {slot: nodes[address] for slot, address in owners.items()}
        for address in before.keys() - nodes.keys():
            before[address].retire()

    def _node_at(self, address: Address | None) -> Node:
        label = str(self._settings.socket) if address is None else label_of(address)
        return Node(label, pool_options(self._settings, address), self._on_change, self.refresh)


def masters_of(ranges: Sequence[Any], member: Address) -> dict[int, Address]:  # Any: as redis-py has it
    """Return where the master of each slot is that has one.

    Slots may have none: nobody names them, or their master has no address any more, and its port is 0 then. `ranges`
    is the reply to CLUSTER SLOTS (https://redis.io/docs/latest/commands/cluster-slots/) of `member`, which is the host
    that is meant where none is named.
    """
    masters: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in ranges:
        if port:
            name = member.host if host in (None, b"", b"?") else host.decode()
            slots = range(max(first, 0), min(last + 1, REDIS_CLUSTER_HASH_SLOTS))  # whatever a member makes up
            masters.update(dict.fromkeys(slots, Address(name, port)))
    return masters


def label_of(address: Address) -> str:
    """Return an address as people write it."""
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
