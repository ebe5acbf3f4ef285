"""A cluster's memory on loopback: masters of a Redis or Valkey Cluster without replicas, as an operator runs them.

A test or the program `cluster_memory` starts them, breaks them, and asks `redis-cli --cluster` to mend or extend them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import pytest
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from tests.support.redis_servers import RedisServer
from tests.support.server_process import free_port
from tiered_kv.testing.control import wait_until

_WAIT_S: Final = 120.0
_SILENT_MS: Final = 5000
"""`cluster-node-timeout`: after it, the other masters call a silent one failed."""

_MANAGED_S: Final = 900.0
_KEEPER: Final = Path(__file__).parents[2] / "examples" / "cluster" / "keeper.sh"

Ranges = list[tuple[int, int]]
"""First and last slot of each range."""


@contextlib.contextmanager
def keeper(addresses: Sequence[str], **settings: str) -> Iterator[None]:
    """Run examples/cluster/keeper.sh for servers, in the `with` block; `settings` are its further variables."""
    variables = {**os.environ, "PEERS": " ".join(addresses), "CLI": "redis-cli", "EVERY_S": "0.5", **settings}
    process = subprocess.Popen(["sh", str(_KEEPER)], env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_WAIT_S)


class RedisMasters:
    """`count` masters on 127.0.0.1, each with an equal share of the slots, `maxmemory`, and no persistence.

    As a context manager it starts them, and kills them at the end.
    """

    def __init__(self, directory: Path, count: int = 6, *, maxmemory: str = "128mb") -> None:
        if shutil.which("redis-cli") is None:
            pytest.skip("redis-cli is not installed")
        self._directory = directory
        self._options = (
            *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
            *("--cluster-node-timeout", str(_SILENT_MS), "--cluster-require-full-coverage", "no"),
            *("--maxmemory", maxmemory, "--maxmemory-policy", "allkeys-lru"),
        )
        self.servers = [self._new(number) for number in range(count)]

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                server.start()
            with keeper(self.addresses):
                self.wait_until_whole()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{server.port}" for server in self.servers]

    def wait_until_whole(self) -> None:
        """Return when every master sees all masters, and a master for every slot."""
        ids = {self.id_of(server) for server in self.servers}
        wait_until(lambda: all(self._sees(server, ids) for server in self.servers), _WAIT_S, what="a whole cluster")

    def id_of(self, server: RedisServer) -> str:
        return server.call("CLUSTER", "MYID").split()[1].decode()

    def slots_of(self, server: RedisServer) -> Ranges:
        """Return the slots of a master, as another master knows them."""
        own = self.id_of(server)
        return [
            (int(first), int(last or first))
            for line in self._nodes(server)
            if line[0] == own
            for first, _, last in (each.partition("-") for each in line[8:] if not each.startswith("["))
        ]

    def add(self) -> RedisServer:
        """Start one more master, without slots, and make it known to the others."""
        server = self._new(len(self.servers))
        server.start()
        self.servers.append(server)
        self._do(self.servers[0], "CLUSTER", "MEET", "127.0.0.1", str(server.port))
        self.wait_until_whole()
        return server

    @property
    def moves_whole_slots(self) -> bool:
        """Whether the servers move a slot in one step, as Valkey 9 does; else `MIGRATE` moves its values one by one."""
        return b"ERR" not in self.servers[0].call("CLUSTER", "GETSLOTMIGRATIONS")[:5]

    def give(self, target: RedisServer, count: int) -> None:
        """Move `count` slots with their values to `target`, from each of the other masters alike."""
        others = [server for server in self.servers if server is not target]
        if not self.moves_whole_slots:
            sources = ",".join(map(self.id_of, others))
            self._manage(
                "reshard", "--cluster-from", sources, "--cluster-to", self.id_of(target), "--cluster-slots", str(count)
            )
            return
        for number, source in enumerate(others):
            share = count * (number + 1) // len(others) - count * number // len(others)
            first = self.slots_of(source)[0][0]
            slots = ["SLOTSRANGE", str(first), str(first + share - 1), "NODE", self.id_of(target)]
            self._do(source, "CLUSTER", "MIGRATESLOTS", *slots)
        wait_until(lambda: count_of_slots(self.slots_of(target)) >= count, _WAIT_S, pause_s=0.1, what="the new slots")

    def lose(self, server: RedisServer, grace_s: int) -> None:
        """Kill a master for good, and return when the keeper has given its slots to the others."""
        server.kill()
        with keeper(self.addresses, GRACE_S=str(grace_s)):
            self.servers.remove(server)
            self.wait_until_whole()

    def start_elsewhere(self) -> None:
        """Start all masters, which were killed, at other addresses. They keep their slots; their values are lost."""
        for server in self.servers:
            server.port = free_port()
            server.start()
        with keeper(self.addresses):
            self.wait_until_whole()

    def _manage(self, verb: str, *options: str) -> None:
        command = ["redis-cli", "--cluster", verb, self.addresses[0], *options, "--cluster-yes"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MANAGED_S)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def _new(self, number: int) -> RedisServer:
        return RedisServer(self._directory / str(number), self._options)

    def _do(self, server: RedisServer, *arguments: str) -> None:
        reply = server.call(*arguments)
        assert reply == b"+OK\r\n", reply

    def _nodes(self, server: RedisServer) -> list[list[str]]:
        """Return the lines of CLUSTER NODES, in words: id, address, flags, ..., and from the ninth on the slots."""
        return [line.split() for line in server.call("CLUSTER", "NODES").decode().splitlines()[1:] if line]

    def _sees(self, server: RedisServer, ids: set[str]) -> bool:
        info, lines = server.call("CLUSTER", "INFO"), self._nodes(server)
        is_known = {line[0] for line in lines} == ids  # one that is lost is forgotten
        are_up = all(line[7] == "connected" and "fail" not in line[2] for line in lines)
        has_slots = b"cluster_slots_ok:%d" % REDIS_CLUSTER_HASH_SLOTS in info and b"cluster_state:ok" in info
        return is_known and are_up and has_slots


def count_of_slots(ranges: Ranges) -> int:
    return sum(last - first + 1 for first, last in ranges)
