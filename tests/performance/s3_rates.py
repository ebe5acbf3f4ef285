"""Throughput and CPU time of the s3 tier beside boto3's own calls, against nginx: one JSON object.

    python tests/performance/s3_rates.py --block-bytes 1048576 --blocks 256 --connections 16 --rounds 5

nginx is started on loopback with its files in /dev/shm, so that neither the disk nor a simulated S3 is measured. Ours
and boto3's take turns; each round stores every block and loads them back, under the names of the round before the last,
so that the memory that holds the files does not grow. The tier is driven as the tiering manager drives it. boto3's
`put_object` and `get_object` run on as many threads as the tier has connections, with payload signing and checksums
off; they get `bytes` made beforehand, and what they read is copied nowhere.
GB = 1e9 bytes; CPU time is that of this process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.testing.s3_servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server, start_nginx
from tiered_kv.tiering.base import JobMetadata, TierSpec
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.tier import S3Tier

BUCKET = "rates"
WARM_ROUNDS = 2
"""The first rounds warm connections and pages, and are not counted."""

Sample = tuple[float, float]
"""GB per second, and CPU-seconds per GB."""


class Bench:
    """Blocks in a region, moved by the tier and by boto3.

    Args:
        server: Where to.
        block_bytes: Bytes of a block.
        blocks: How many.
        connections: Transfers in flight.
    """

    def __init__(self, server: S3Server, block_bytes: int, blocks: int, connections: int) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self.region = PrimaryRegion(blocks, block_bytes, prefault=True)
        self.region.array[:] = np.random.default_rng(0).integers(0, 256, block_bytes, dtype=np.uint8)
        self.region.array[:, :8] = np.arange(blocks, dtype="<u8").view(np.uint8).reshape(blocks, 8)
        settings = S3Settings.model_validate(server.settings(BUCKET, connections=connections, presence_ttl=0))
        self.tier = S3Tier(TierSpec("s3", block_bytes), self.region.kv_view, "s3", settings)
        self._bodies = [row.tobytes() for row in self.region.array]
        self.client = _boto3_client(server, connections)
        self.threads = ThreadPoolExecutor(connections)
        self._job_ids = iter(range(1 << 40))

    def close(self) -> None:
        self.threads.shutdown()
        self.client.close()
        self.tier.shutdown()
        self.region.close()

    def ours_store(self, turn: int) -> None:
        self._job(turn, is_promotion=False)

    def ours_load(self, turn: int) -> None:
        self._job(turn, is_promotion=True)

    def boto3_store(self, turn: int) -> None:
        def store(row: int) -> None:
            self.client.put_object(Bucket=BUCKET, Key=f"boto3/{turn}/{row}", Body=self._bodies[row])

        list(self.threads.map(store, range(self.blocks)))

    def boto3_load(self, turn: int) -> None:
        def load(row: int) -> None:
            body = self.client.get_object(Bucket=BUCKET, Key=f"boto3/{turn}/{row}")["Body"].read()
            self.region.array[row, :8] = np.frombuffer(body, np.uint8, 8)

        list(self.threads.map(load, range(self.blocks)))

    def measure(self, action: Callable[[int], None], turn: int, *, is_load: bool) -> Sample:
        """Run one action; for a load, clear the blocks before and compare them after."""
        if is_load:
            self.region.array[:, :8] = 0
        cpu, start = time.process_time(), time.perf_counter()
        action(turn)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        found = self.region.array[:, :8].copy().view("<u8").ravel()
        if not (found == np.arange(self.blocks)).all():
            raise AssertionError("wrong bytes")
        gigabytes = self.blocks * self.block_bytes / 1e9
        return gigabytes / seconds, cpu_seconds / gigabytes

    def _job(self, turn: int, *, is_promotion: bool) -> None:
        keys = [block_key(turn, row) for row in range(self.blocks)]
        rows = np.arange(self.blocks, dtype=np.int64)
        job = JobMetadata(next(self._job_ids), keys, rows, is_promotion, ReqContext("rates"))
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)
        while not (finished := list(self.tier.get_finished())):
            time.sleep(0.0005)
        if not finished[0].success:
            raise AssertionError(f"a job failed: {finished[0].reason}")


def block_key(turn: int, row: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(f"{turn}/{row}".encode()).digest(), 0)


def measure(server: S3Server, block_bytes: int, blocks: int, connections: int, rounds: int) -> dict[str, object]:
    """Return medians of both sides over the rounds that count, and their ratios."""
    bench = Bench(server, block_bytes, blocks, connections)
    samples: dict[str, list[Sample]] = {}
    try:
        for turn in range(rounds + WARM_ROUNDS):
            for name in ("ours_store", "boto3_store", "ours_load", "boto3_load"):
                sample = bench.measure(getattr(bench, name), turn % 2, is_load=name.endswith("load"))
                samples.setdefault(name, []).append(sample)
    finally:
        bench.close()
    result: dict[str, object] = {}
    for name, taken in samples.items():
        rates, costs = zip(*taken[WARM_ROUNDS:], strict=True)
        result[name] = {
            "gb_per_s": round(statistics.median(rates), 3),
            "gb_per_s_range": [round(min(rates), 3), round(max(rates), 3)],
            "cpu_s_per_gb": round(statistics.median(costs), 3),
        }
    for kind in ("store", "load"):
        result[f"{kind}_over_boto3"] = round(_ratio(samples, kind, 0), 2)
        result[f"{kind}_cpu_over_boto3"] = round(_ratio(samples, kind, 1), 2)
    return result


def _ratio(samples: dict[str, list[Sample]], kind: str, column: int) -> float:
    """Return the median over the rounds of ours over boto3's, each pair measured one after the other."""
    pairs = zip(samples[f"ours_{kind}"][WARM_ROUNDS:], samples[f"boto3_{kind}"][WARM_ROUNDS:], strict=True)
    return statistics.median(ours[column] / theirs[column] for ours, theirs in pairs)


def _boto3_client(server: S3Server, connections: int) -> Any:  # Any: boto3 makes its classes when they are asked for
    import boto3
    from botocore.config import Config

    config = Config(
        max_pool_connections=connections,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path", "payload_signing_enabled": False},
    )
    return boto3.session.Session(ACCESS_KEY_ID, SECRET_ACCESS_KEY, region_name=REGION).client(
        "s3", endpoint_url=server.url, config=config
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes = (arguments.block_bytes, arguments.blocks, arguments.connections, arguments.rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        server = start_nginx(Path(folder))
        try:
            rates = measure(server, *sizes)
        finally:
            server.stop()
    print(json.dumps({"block_bytes": arguments.block_bytes, "connections": arguments.connections, **rates}))


if __name__ == "__main__":
    main()
