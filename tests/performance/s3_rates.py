"""Throughput and CPU time of the s3 tier beside boto3's own calls, against nginx: one JSON object.

    python tests/performance/s3_rates.py --blocks 256 --rounds 5

nginx is started on loopback with its files in /dev/shm, so that neither the disk nor a simulated S3 is measured. Ours
and boto3's take turns; each round stores every block and loads them back, under the names of the round before the last,
so that the memory that holds the files does not grow. The tier is driven as the tiering manager drives it. boto3's
`put_object` and `get_object` run on as many threads as the tier has connections, with payload signing and checksums
off; they get `bytes` made beforehand, and what they read is copied nowhere.
GB = 1e9 bytes; CPU time is that of this process.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.performance.bench import BlockRows, Sample, Taken, command_line, sample, summary, timed
from tests.support.entries import s3_entry
from tests.support.s3_servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from tiered_kv.tiering.base import TierSpec
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.tier import S3Tier

BUCKET = "rates"
BLOCK_BYTES = 1 << 20
CONNECTIONS = 16
WARM_ROUNDS = 2
"""The first rounds warm connections and pages, and are not counted."""


_CONFIGURATION = """
daemon off;
{user}
worker_processes 1;
pid nginx.pid;
error_log error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  sendfile on;
  tcp_nodelay on;
  keepalive_requests 10000000;
  client_max_body_size 0;
  client_body_buffer_size 8m;
  client_body_temp_path temp_body;
  proxy_temp_path temp_proxy;
  fastcgi_temp_path temp_fastcgi;
  uwsgi_temp_path temp_uwsgi;
  scgi_temp_path temp_scgi;
  server {{
    listen 127.0.0.1:{port};
    root data;
    location / {{
      dav_methods PUT DELETE;
      etag off;
      add_header ETag '"e"';
      create_full_put_path on;
    }}
  }}
}}
"""


def start_nginx(folder: Path) -> S3Server:
    """Start nginx on a free port, with its files in `folder`, and return once it listens.

    A bucket is a folder that the first PUT makes. It knows neither listings nor signatures.

    Raises:
        RuntimeError: It did not start.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    server = S3Server(functools.partial(_command, folder))
    server.start()
    return server


def _command(folder: Path, port: int) -> list[str]:
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    assert program is not None, "nginx is not installed"
    configuration = folder / "nginx.conf"
    configuration.write_text(_CONFIGURATION.format(port=port, user="user root;" if os.geteuid() == 0 else ""))
    return [program, "-p", str(folder), "-c", str(configuration), "-e", str(folder / "error.log")]


class Bench:
    """Blocks in a region, moved by the tier and by boto3."""

    def __init__(self, server: S3Server, blocks: int) -> None:
        self.blocks, self.gigabytes = blocks, blocks * BLOCK_BYTES / 1e9
        self.rows = BlockRows(BLOCK_BYTES, blocks)
        settings = S3Settings.model_validate(s3_entry(server, BUCKET, connections=CONNECTIONS, presence_ttl=0))
        self.tier = S3Tier(TierSpec("s3", BLOCK_BYTES), self.rows.region.kv_view, "s3", settings)
        self._bodies = [row.tobytes() for row in self.rows.region.array]
        self.client = _boto3_client(server)
        self.threads = ThreadPoolExecutor(CONNECTIONS)

    def close(self) -> None:
        self.threads.shutdown()
        self.client.close()
        self.tier.shutdown()
        self.rows.region.close()

    def round(self, turn: int) -> dict[str, Sample]:
        """Run both sides once, each under names of this turn."""
        region, first = self.rows.region, turn * self.blocks

        def put(row: int) -> None:
            self.client.put_object(Bucket=BUCKET, Key=f"boto3/{turn}/{row}", Body=self._bodies[row])

        def get(row: int) -> None:
            body = self.client.get_object(Bucket=BUCKET, Key=f"boto3/{turn}/{row}")["Body"].read()
            region.array[row, :8] = np.frombuffer(body, np.uint8, 8)

        our_store = self.rows.store(self.tier, first, self.blocks, self.blocks)
        their_store = self._threaded(put)
        our_load = self.rows.load(self.tier, first, self.blocks, self.blocks)
        region.array[:, :8] = 0
        their_load = self._threaded(get)
        self.rows.compare(range(self.blocks))
        return {
            "ours": sample(self.gigabytes, our_store, our_load),
            "boto3": sample(self.gigabytes, their_store, their_load),
        }

    def _threaded(self, move: Callable[[int], None]) -> Taken:
        return timed(lambda: list(self.threads.map(move, range(self.blocks))))


def measure(server: S3Server, blocks: int, rounds: int) -> dict[str, object]:
    bench = Bench(server, blocks)
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    try:
        for number in range(rounds + WARM_ROUNDS):
            for side, taken in bench.round(number % 2).items():
                if number >= WARM_ROUNDS:
                    samples[side].append(taken)
    finally:
        bench.close()
    return summary(samples, [("ours", "boto3")])


def _boto3_client(server: S3Server) -> Any:  # Any: boto3 makes its classes at run time
    import boto3
    from botocore.config import Config

    config = Config(
        max_pool_connections=CONNECTIONS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path", "payload_signing_enabled": False},
    )
    return boto3.session.Session(ACCESS_KEY_ID, SECRET_ACCESS_KEY, region_name=REGION).client(
        "s3", endpoint_url=server.url, config=config
    )


def main() -> None:
    arguments = command_line(__doc__, blocks=256, rounds=5).parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        server = start_nginx(Path(folder))
        try:
            rates = measure(server, arguments.blocks, arguments.rounds)
        finally:
            server.stop()
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
