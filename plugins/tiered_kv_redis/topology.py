"""Which server has which block."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from tiered_kv_redis.endpoint import client_options, pool_options, sentinel_options
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.reasons import reason_of_error
from tiered_kv_redis.settings import Address, RedisSettings

REFRESH_PAUSE_S = 0.5
"""Between two questions of where the servers are."""


class Topology(ABC):
    """The servers, and how keys are spread over them. Any thread may call."""

    @abstractmethod
    def split(self, wire_keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        """Return the servers that have `wire_keys`, each with the positions of its own.

        Raises:
            NodeDownError: Nobody says where the servers are.
        """

    def refresh(self) -> None:
        """Note that servers may have changed places; the next `split` asks, if nobody has asked a moment ago."""
        return

    @abstractmethod
    def nodes(self) -> list[Node]:
        """Return the servers that are known."""

    def close(self) -> None:
        """Close every connection."""
        for node in self.nodes():
            node.close()


class OneServer(Topology):
    """A server that stays where it is.

    Args:
        settings: The tier's.
    """

    def __init__(self, settings: RedisSettings) -> None:
        address = settings.addresses[0] if settings.socket is None else None
        label = str(settings.socket) if address is None else label_of(address)
        self._node = Node(label, pool_options(settings, address))

    def split(self, wire_keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        return [(self._node, list(range(len(wire_keys))))]

    def nodes(self) -> list[Node]:
        return [self._node]


class MovingServers(Topology):
    """Servers whose places somebody knows, who is asked at first use and after `refresh`.

    Args:
        settings: The tier's.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._nodes: dict[Address, Node] = {}
        self._lock = threading.Lock()  # held while asking; guards all of this
        self._is_stale = True
        self._asked_at = -REFRESH_PAUSE_S
        self._reason = ""

    def refresh(self) -> None:
        self._is_stale = True

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    @abstractmethod
    def _discover(self) -> None:
        """Ask, and keep the answer; raises what redis-py raises."""

    def _ensure_known(self, *, is_known: bool) -> None:
        """Ask if need be; what was known before stays in use if nobody answers."""
        if is_known and not self._is_stale:
            return
        with self._lock:
            now = time.monotonic()
            if self._is_stale and now - self._asked_at >= REFRESH_PAUSE_S:
                self._asked_at = now
                self._reason = ""
                try:
                    self._discover()
                    self._is_stale = False
                except (RedisError, OSError) as error:
                    self._reason = reason_of_error(error)
                self._asked_at = time.monotonic()
            if self._reason and not is_known:
                raise NodeDownError(self._reason)

    def _node_at(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(label_of(address), pool_options(self._settings, address))
        return node


class SentinelMaster(MovingServers):
    """The server that sentinels name as the master of a service.

    Args:
        settings: The tier's.
    """

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._sentinel = Sentinel(  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
            list(settings.addresses), sentinel_kwargs=sentinel_options(settings)
        )
        self._master: Node | None = None

    def split(self, wire_keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        self._ensure_known(is_known=self._master is not None)
        if self._master is None:
            raise NodeDownError("unavailable")
        return [(self._master, list(range(len(wire_keys))))]

    def close(self) -> None:
        super().close()
        for client in self._sentinel.sentinels:
            client.close()

    def _discover(self) -> None:
        host, port = self._sentinel.discover_master(self._settings.service)  # type: ignore[no-untyped-call]
        self._master = self._node_at(Address(host, int(port)))


class Cluster(MovingServers):
    """A Redis Cluster. redis-py finds out which master has which slots.

    Args:
        settings: The tier's.
    """

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._client: RedisCluster | None = None
        self._masters: dict[int, Node] = {}  # by slot; replaced as a whole

    def split(self, wire_keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        self._ensure_known(is_known=bool(self._masters))
        masters = self._masters
        parts: dict[Node, list[int]] = {}
        for position, wire_key in enumerate(wire_keys):
            node = masters.get(key_slot(wire_key))
            if node is None:
                self.refresh()
                raise NodeDownError("cluster_down")
            parts.setdefault(node, []).append(position)
        return list(parts.items())

    def close(self) -> None:
        super().close()
        if self._client is not None:
            self._client.close()

    def _discover(self) -> None:
        if self._client is None:
            start = [
                ClusterNode(host, port)  # type: ignore[no-untyped-call]
                for host, port in self._settings.addresses
            ]
            self._client = RedisCluster(startup_nodes=start, **client_options(self._settings))
        else:
            self._client.nodes_manager.initialize()
        manager = self._client.nodes_manager
        self._masters = {
            slot: self._node_at(Address(members[0].host, int(members[0].port)))
            for slot, members in dict(manager.slots_cache).items()
            if members
        }


def topology_of(settings: RedisSettings) -> Topology:
    """Return the topology that the settings name; nothing is connected yet."""
    if settings.mode == "sentinel":
        return SentinelMaster(settings)
    return Cluster(settings) if settings.mode == "cluster" else OneServer(settings)


def label_of(address: Address) -> str:
    """Return an address as people write it."""
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
