"""The storage of a soak: directories, a Redis server and a bucket behind fault proxies; and its workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

from tests.support.entries import s3_entry
from tests.support.redis_servers import RedisServer
from tests.support.stacks import stack_of
from tiered_kv.testing.proxy import FaultProxy
from tiered_kv.testing.s3_servers import S3Server, start_moto
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
CHATS_SETTINGS = ReplaySettings(concurrency=16, request_timeout_s=3.0)
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
