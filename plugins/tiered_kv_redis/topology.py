"""Which server has which block."""

from __future__ import annotations

import math
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

from redis import Redis
from redis.connection import ConnectionPool
from redis.crc import key_slot
from redis.sentinel import Sentinel

from tiered_kv_redis.endpoint import pool_options, sentinel_options
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.reasons import CLUSTER_DOWN, TIMEOUT, UNAVAILABLE, reason_of_error
from tiered_kv_redis.settings import Address, RedisSettings

REFRESH_PAUSE_S = 0.5
"""Between two questions of where the servers are."""
REFRESH_WAIT_S = 0.2
"""How long the answer is waited for where there is an older one, which is used then."""
_CLOSE_WAIT_S = 0.5


class Topology(ABC):
    """The servers, and how keys are spread over them. Any thread may call."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = _ignore
        """Called by any thread when a connection was made anew or somebody said where the servers are.

        A server may have been replaced then by one that knows less."""

    @abstractmethod
    def split(self, wire_keys: Sequence[bytes], deadline: float) -> list[tuple[Node, list[int]]]:
        """Return the servers that have `wire_keys`, each with the positions of its own.

        A key that no server has now is left out.

        Raises:
            NodeDownError: Nobody says where the servers are, by the deadline.
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

    def _note_change(self) -> None:
        self.on_change()


class OneServer(Topology):
    """A server that stays where it is.

    Args:
        settings: The tier's.
    """

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__()
        address = settings.addresses[0] if settings.socket is None else None
        label = str(settings.socket) if address is None else label_of(address)
        self._node = Node(label, pool_options(settings, address), self._note_change)

    def split(self, wire_keys: Sequence[bytes], deadline: float) -> list[tuple[Node, list[int]]]:
        return [(self._node, list(range(len(wire_keys))))]

    def nodes(self) -> list[Node]:
        return [self._node]


class MovingServers(Topology):
    """Servers whose places somebody knows, who is asked at first use and after `refresh`.

    redis-py asks one member after the other, and waits for each that does not answer. So a thread of its own does the
    asking, one at a time, and nobody waits for it longer than a deadline allows.

    Args:
        settings: The tier's.
    """

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__()
        self._settings = settings
        self._nodes: dict[Address, Node] = {}  # replaced as a whole, by the thread that asks
        self._reason = ""  # why the last question was not answered
        self._is_stale = True
        self._lock = threading.Lock()  # guards the two below
        self._asking: threading.Thread | None = None
        self._asked_at = -math.inf

    def refresh(self) -> None:
        self._is_stale = True

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    @abstractmethod
    def _discover(self) -> None:
        """Ask, and keep the answer; raises what redis-py raises."""

    def close(self) -> None:
        if self._asking is not None:
            self._asking.join(_CLOSE_WAIT_S)  # it ends by itself; if a server keeps it, what it opened goes with it
        super().close()

    def _ensure_known(self, deadline: float, *, is_known: bool) -> None:
        """Have somebody asked if need be; what was known before stays in use until there is an answer."""
        if is_known and not self._is_stale:
            return
        with self._lock:
            asking = self._asking
            if asking is None or not asking.is_alive():
                if not self._is_stale or time.monotonic() - self._asked_at < REFRESH_PAUSE_S:
                    return
                asking = threading.Thread(target=self._ask, name="tiered-kv-redis-topology", daemon=True)
                asking.start()
                self._asking = asking
        wait_s = deadline - time.monotonic()
        asking.join(max(0.0, min(wait_s, REFRESH_WAIT_S) if is_known else wait_s))

    def _ask(self) -> None:
        self._is_stale = False  # first, so that a refresh that comes meanwhile is not lost
        self._reason = ""
        try:
            self._discover()
        except Exception as error:  # a server that talks nonsense raises anything; here nothing can catch it
            self._is_stale = True
            self._reason = error.reason if isinstance(error, NodeDownError) else reason_of_error(error)
        else:
            self._note_change()
        self._asked_at = time.monotonic()

    def _use(self, addresses: Iterable[Address]) -> dict[Address, Node]:
        """Return the servers at `addresses`, which are all that are used from now on."""
        before = self._nodes
        nodes = {
            address: before.get(address)
            or Node(label_of(address), pool_options(self._settings, address), self._note_change, self.refresh)
            for address in addresses
        }
        self._nodes = nodes
        for address in before.keys() - nodes.keys():
            before[address].retire()
        return nodes


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
        # Asked in this order: the last one that knew stands first. Replaced by the thread that asks.
        self._clients: list[Any] = list(self._sentinel.sentinels)  # Any: redis-py's clients
        self._master: Node | None = None

    def split(self, wire_keys: Sequence[bytes], deadline: float) -> list[tuple[Node, list[int]]]:
        self._ensure_known(deadline, is_known=self._master is not None)
        if self._master is None:
            raise NodeDownError(self._reason or TIMEOUT)
        return [(self._master, list(range(len(wire_keys))))]

    def close(self) -> None:
        super().close()
        for client in self._sentinel.sentinels:
            client.close()

    def _discover(self) -> None:
        address = self._named()
        self._master = self._use([address])[address]

    def _named(self) -> Address:
        """Return what the first sentinel says that knows the master.

        As `Sentinel.discover_master`, which tells nobody why a sentinel was of no use, nor asks others after one that
        refuses.
        """
        service = self._settings.service
        failure: Exception = NodeDownError(UNAVAILABLE)
        for client in self._clients:
            try:
                state = client.sentinel_masters().get(service)
                if state and self._sentinel.check_master_state(state, service):  # type: ignore[no-untyped-call]
                    address = Address(str(state["ip"]), int(state["port"]))
                    self._clients = [client, *(each for each in self._clients if each is not client)]
                    return address
            except Exception as error:  # redis-py makes anything of an answer that makes no sense
                failure = error
        raise failure


class Cluster(MovingServers):
    """A Redis Cluster, any member of which says which master has which slots.

    Args:
        settings: The tier's.
    """

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._masters: dict[int, Node] = {}  # by slot; replaced as a whole

    def split(self, wire_keys: Sequence[bytes], deadline: float) -> list[tuple[Node, list[int]]]:
        self._ensure_known(deadline, is_known=bool(self._masters))
        masters = self._masters
        if not masters:
            raise NodeDownError(self._reason or TIMEOUT)
        parts: dict[Node, list[int]] = {}
        for position, wire_key in enumerate(wire_keys):
            node = masters.get(key_slot(wire_key))
            if node is None:
                self.refresh()
            else:
                parts.setdefault(node, []).append(position)
        return list(parts.items())

    def _discover(self) -> None:
        # Those that are known may have moved, all of them; those that the settings name are found again.
        known = list(self._nodes.items())
        random.shuffle(known)
        known.sort(key=lambda each: each[1].is_down)  # whoever is down is asked last: it may keep us waiting
        failure: Exception = NodeDownError(CLUSTER_DOWN)
        for address in dict.fromkeys((*(address for address, _ in known), *self._settings.addresses)):
            try:
                masters = self._masters_by(address)
            except Exception as error:  # redis-py makes anything of an answer that makes no sense
                failure = error
                continue
            if masters:
                nodes = self._use(set(masters.values()))
                self._masters = {slot: nodes[master] for slot, master in masters.items()}
                return
        raise failure

    def _masters_by(self, member: Address) -> dict[int, Address]:
        """Return what a member says: where the master of each slot is that has one."""
        with closing(Redis.from_pool(ConnectionPool(**pool_options(self._settings, member)))) as client:
            return masters_of(client.execute_command("CLUSTER SLOTS"), member)  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only


def masters_of(ranges: Sequence[Any], member: Address) -> dict[int, Address]:  # Any: as redis-py has it
    """Return where the master of each slot is that has one.

    Slots may have none: nobody names them, or their master has no address any more, and its port is 0 then.

    Args:
        ranges: The reply to CLUSTER SLOTS (https://redis.io/docs/latest/commands/cluster-slots/).
        member: Who sent it: the host that is meant where none is named.
    """
    masters: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in ranges:
        if port:
            name = member.host if host in (None, b"", b"?") else host.decode()
            masters.update(dict.fromkeys(range(first, last + 1), Address(name, port)))
    return masters


def topology_of(settings: RedisSettings) -> Topology:
    """Return the topology that the settings name; nothing is connected yet."""
    if settings.mode == "sentinel":
        return SentinelMaster(settings)
    return Cluster(settings) if settings.mode == "cluster" else OneServer(settings)


def _ignore() -> None:
    return


def label_of(address: Address) -> str:
    """Return an address as people write it."""
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
