"""The storage of a soak, its workload, and its faults, which come and go in an order that a seed decides.

The storage is directories, a Redis server and a bucket behind fault proxies.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

from tests.support.entries import s3_entry
from tests.support.race_cases import flip_a_bit
from tests.support.redis_servers import RedisServer
from tests.support.s3_servers import S3Server, start_moto
from tests.support.server_process import ServerProcess
from tests.support.stacks import stack_of
from tiered_kv.testing.proxy import NO_FAULTS, Direction, FaultProxy, Faults
from tiered_kv.workload.replay import ReplaySettings
from tiered_kv.workload.request import ChatWorkload, Request

BLOCK_BYTES = 16 << 10
PRIMARY_BLOCKS = 256
NVME_CAPACITY_BYTES = 4 << 20
FS_CAPACITY_BYTES = 6 << 20
REDIS_CAPACITY = "8mb"
S3_CAPACITY_BYTES = 48 << 20
JOB_TIMEOUT_S = 4.0
TIERS = ("nvme", "fs", "redis", "s3")
CHATS_SETTINGS = ReplaySettings(concurrency=16, request_timeout_s=3.0, store_timeout_s=0.0)
SAMPLE_S = 0.5
"""The interval of samples of a process."""

_REDIS_OPTIONS = ("--maxmemory", REDIS_CAPACITY, "--maxmemory-policy", "allkeys-lru")
_BUCKET = "soak"


class Grounds:
    """The servers and directories; a context manager. Any thread may call, but only one restarts servers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fs_directory = directory / "fs"  # which processes share
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self.redis = RedisServer(self.directory / "redis", _REDIS_OPTIONS)
            undo.callback(self.redis.kill)
            self.redis.start()
            self.s3: S3Server = start_moto()
            undo.callback(lambda: self.s3.stop())
            self._make_bucket()
            self.redis_proxy = undo.enter_context(FaultProxy(("127.0.0.1", self.redis.port)))
            self.s3_proxy = undo.enter_context(FaultProxy(self.s3.address))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @property
    def foreign_descriptors(self) -> int:
        """The descriptors of this process that belong to the proxies, two for each connection.

        A slow server keeps connections open that its client has closed.
        """
        return 2 * sum(proxy.open_connections for proxy in (self.redis_proxy, self.s3_proxy))

    def nvme_directory(self, process: int) -> Path:
        return self.directory / f"nvme-{process}"

    def config(self, process: int) -> dict[str, object]:
        """Return the stack of a process: the same blocks, an nvme directory for each, the other tiers shared."""
        limits = {"job_timeout": JOB_TIMEOUT_S, "lookup_timeout": 1.0, "breaker_cooldown": 0.5}
        s3 = s3_entry(self.s3, _BUCKET, name="s3", capacity=S3_CAPACITY_BYTES, sweep_interval=2.0, presence_ttl=1.0)
        s3 |= {"endpoint_url": f"http://{self.s3_proxy.host}:{self.s3_proxy.port}", "request_timeout": 2.0}
        s3 |= {"connections": 4, **limits, "lookup_timeout": 2.0, "admit_after": 2}
        nvme = {"type": "nvme", "path": str(self.nvme_directory(process)), "capacity": NVME_CAPACITY_BYTES}
        fs = {"type": "fs", "path": str(self.fs_directory), "capacity": FS_CAPACITY_BYTES}
        redis = {"type": "redis", "url": f"redis://{self.redis_proxy.host}:{self.redis_proxy.port}/0", "timeout": 1.0}
        tiers = ({**nvme, "segment": 256 << 10, **limits}, {**fs, **limits}, {**redis, **limits}, s3)
        return stack_of(*tiers, blocks=PRIMARY_BLOCKS, block_bytes=BLOCK_BYTES, block={"tokens": 512})

    def restart_s3(self) -> None:
        """Kill moto's server and start another, with an empty bucket."""
        self.s3.stop()
        self.s3 = start_moto()
        self._make_bucket()
        self.s3_proxy.server = self.s3.address
        self.s3_proxy.reset_connections()

    def s3_used_bytes(self) -> int:
        with closing(self.s3.client()) as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET)
            return sum(entry["Size"] for page in pages for entry in page.get("Contents", ()))

    def _make_bucket(self) -> None:
        with closing(self.s3.client()) as client:
            client.create_bucket(Bucket=_BUCKET)


def chats(seed: int) -> Iterator[Request]:
    """Yield requests of concurrent chats without end, several times larger than any tier but s3."""
    return ChatWorkload(seed=seed, chats=10**9, active_chats=100, turn_blocks=4).requests()


_AGAIN_S = 0.25
"""How often a fault that strikes once is set again."""
_STRIKING = ("stalled", "cut", "flipped", "reset")


class Troubles:
    """A thread that switches faults."""

    def __init__(
        self, grounds: Grounds, seed: int, *, fault_s: float, quiet_s: float, on_quiet: Callable[[], None]
    ) -> None:
        self.switched: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.error: Exception | None = None
        self._grounds = grounds
        self._chance = random.Random(seed)
        self._fault_s = fault_s
        self._quiet_s = quiet_s
        self._on_quiet = on_quiet
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-troubles")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Switch the present fault off, and return when that is done."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        """Functions that switch a fault on, and return after switching it off."""
        made: dict[str, Callable[[], None]] = {}
        grounds = self._grounds
        for tier, proxy in (("redis", grounds.redis_proxy), ("s3", grounds.s3_proxy)):
            for name, faults in _wire_faults(self._chance).items():
                made[f"{tier}: {name}"] = lambda proxy=proxy, faults=faults: self._on_the_wire(proxy, faults)  # type: ignore[misc]  # bound now
            made[f"{tier}: resets"] = lambda proxy=proxy: self._again(proxy.reset_connections)  # type: ignore[misc]
        made["redis: frozen"] = lambda: self._frozen(grounds.redis)
        made["redis: restarted empty"] = grounds.redis.restart
        made["s3: frozen"] = lambda: self._frozen(grounds.s3)
        made["s3: restarted empty"] = grounds.restart_s3
        made["nvme: damaged"] = lambda: self._damage("nvme: damaged", "nvme-*")
        made["fs: damaged"] = lambda: self._damage("fs: damaged", "fs")
        return made

    def _run(self) -> None:
        try:
            while True:
                names = sorted(self.faults)
                self._chance.shuffle(names)
                for name in names:
                    if self._stop.wait(self._quiet_s):
                        return
                    self._on_quiet()
                    self.switched[name] += 1
                    before = self._strikes()
                    self.faults[name]()
                    if self._strikes() > before:
                        self.struck[name] += 1
        except Exception as error:  # reported at the end of the soak
            self.error = error

    def _strikes(self) -> int:
        counts = [proxy.counts() for proxy in (self._grounds.redis_proxy, self._grounds.s3_proxy)]
        return sum(count[kind] for count in counts for kind in _STRIKING)

    def _on_the_wire(self, proxy: FaultProxy, faults: Callable[[], tuple[Faults, Faults]]) -> None:
        def switch() -> None:
            for direction, fault in zip(Direction, faults(), strict=True):
                proxy.set_faults(fault, direction)

        try:
            self._again(switch)
        finally:
            proxy.set_faults(NO_FAULTS)

    def _frozen(self, server: ServerProcess) -> None:
        server.freeze()
        try:
            self._stop.wait(self._fault_s)
        finally:
            server.thaw()

    def _damage(self, name: str, pattern: str) -> None:
        def damage() -> None:
            for directory in self._grounds.directory.glob(pattern):
                self.struck[name] += flip_a_bit(directory, self._chance, BLOCK_BYTES)

        self._again(damage, pause_s=_AGAIN_S / 10)

    def _again(self, act: Callable[[], None], pause_s: float = _AGAIN_S) -> None:
        """Repeat a call as long as a fault lasts."""
        end_s = time.monotonic() + self._fault_s
        while time.monotonic() < end_s:
            act()
            if self._stop.wait(pause_s):
                return


def _wire_faults(chance: random.Random) -> dict[str, Callable[[], tuple[Faults, Faults]]]:
    """Return faults to the server and to the client, by name; each call draws where they strike."""

    def at() -> int:
        return int(2 ** chance.uniform(0, 18))  # anywhere between a reply's first line and many blocks later

    return {
        "slow": lambda: (Faults(latency_s=0.02), Faults(latency_s=0.05)),
        "stalled": lambda: (NO_FAULTS, Faults(stalls=True)),
        "flipped on the way back": lambda: (NO_FAULTS, Faults(flip_at_byte=at())),
        "flipped on the way there": lambda: (Faults(flip_at_byte=at()), NO_FAULTS),
        "cut": lambda: (NO_FAULTS, Faults(cut_after_bytes=at(), cut_by_reset=chance.random() < 0.5)),
    }
