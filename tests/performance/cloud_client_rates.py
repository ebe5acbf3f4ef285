"""Throughput and CPU time of gcs and azure beside the clouds' own Python clients: one JSON object.

    python tests/performance/cloud_client_rates.py --blocks 64 --rounds 5 --block-bytes 1048576

Both tiers and both clients talk to simulated servers on loopback, in a process of their own. The sides take turns; each
round stores every block and loads it back, under the names of the round before the last. The tiers are driven as the
tiering manager drives them. The clients' uploads and downloads run on as many threads as the tiers have connections,
with their checksums off; they get `bytes` made beforehand, and what they read is copied nowhere. The clients
(google-cloud-storage, azure-storage-blob) are no dependency: one that is not installed is left out.
GB = 1e9 bytes; CPU time is that of this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.performance.bench import BlockRows, Sample, Taken, command_line, in_turn, sample, summary, timed
from tests.performance.s3_rates import CONNECTIONS, WARM_ROUNDS
from tests.support.fake_azure import FakeAzure
from tests.support.fake_gcs import TOKEN, FakeGCS
from tests.support.fake_s3 import FakeS3
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

Put = Callable[[str, bytes], object]
Get = Callable[[str], bytes]
CLOUDS: dict[str, type[FakeS3]] = {"gcs": FakeGCS, "azure": FakeAzure}


_SERVES = """
import json, sys
from collections import deque
from tests.performance.cloud_client_rates import CLOUDS

with CLOUDS[sys.argv[1]]() as server:
    server.seen = deque(maxlen=0)  # or it would keep each body
    print(json.dumps(server.entry), flush=True)
    sys.stdin.read()
"""


@contextmanager
def served(cloud: str) -> Iterator[dict[str, Any]]:  # Any: values of a YAML entry
    """Run the cloud's server in another process; give the YAML entry of a tier."""
    command = [sys.executable, "-c", _SERVES, cloud]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield {**json.loads(process.stdout.readline()), "connections": CONNECTIONS, "presence_ttl": 0}
        process.communicate()  # the end of its input ends it


def google_client(entry: dict[str, Any]) -> tuple[Put, Get]:
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud import storage
    from google.oauth2.credentials import Credentials

    credentials = Credentials(TOKEN)
    session = AuthorizedSession(credentials)
    session.mount("http://", _adapter())
    endpoint = {"api_endpoint": entry["endpoint"]}
    bucket = storage.Client("project", credentials, _http=session, client_options=endpoint).bucket(entry["bucket"])

    def put(name: str, data: bytes) -> None:
        bucket.blob(name).upload_from_string(data, "application/octet-stream", checksum=None)

    def get(name: str) -> bytes:
        return bytes(bucket.blob(name).download_as_bytes(checksum=None))

    return put, get


def azure_client(entry: dict[str, Any]) -> tuple[Put, Get]:
    import requests
    from azure.core.pipeline.transport import RequestsTransport
    from azure.storage.blob import ContainerClient

    session = requests.Session()
    session.mount("http://", _adapter())
    client = ContainerClient(
        entry["endpoint"],
        entry["container"],
        credential={"account_name": entry["account"], "account_key": entry["account_key"]},
        transport=RequestsTransport(session=session, session_owner=False),
    )

    def put(name: str, data: bytes) -> None:
        client.upload_blob(name, data, overwrite=True)

    def get(name: str) -> bytes:
        return bytes(client.download_blob(name).readall())

    return put, get


CLIENTS: dict[str, Callable[[dict[str, Any]], tuple[Put, Get]]] = {"gcs": google_client, "azure": azure_client}


def _adapter() -> Any:  # Any: requests has no types
    from requests.adapters import HTTPAdapter

    return HTTPAdapter(pool_connections=CONNECTIONS, pool_maxsize=CONNECTIONS)


def measure(cloud: str, blocks: int, rounds: int, block_bytes: int) -> dict[str, object]:
    """Compare the tier with the cloud's client; without it, only measure the tier."""
    rows, theirs = BlockRows(block_bytes, blocks), f"{cloud}_client"
    bodies = [row.tobytes() for row in rows.region.array]
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    with served(cloud) as entry, ThreadPoolExecutor(CONNECTIONS) as threads:
        spec = TierSpec(cloud, block_bytes)
        tier: SecondaryTierManager = SecondaryTierFactory.create(spec, rows.region.kv_view, entry)
        try:
            put, get = CLIENTS[cloud](entry)
            sides = [cloud, theirs]
        except ImportError:
            sides = [cloud]

        def stored(turn: int) -> Taken:
            return timed(lambda: list(threads.map(lambda row: put(f"{turn}/{row}", bodies[row]), range(blocks))))

        def loaded(turn: int) -> Taken:
            def load(row: int) -> None:
                rows.region.array[row, :8] = np.frombuffer(get(f"{turn}/{row}"), np.uint8, 8)

            rows.region.array[:, :8] = 0
            taken = timed(lambda: list(threads.map(load, range(blocks))))
            rows.compare(range(blocks))
            return taken

        for number in range(rounds + WARM_ROUNDS):
            turn = number % 2
            for side in in_turn(number, sides):
                if side == theirs:
                    store, load = stored(turn), loaded(turn)
                else:
                    store = rows.store(tier, turn * blocks, blocks, blocks)
                    load = rows.load(tier, turn * blocks, blocks, blocks)
                if number >= WARM_ROUNDS:
                    samples[side].append(sample(blocks * block_bytes / 1e9, store, load))
        tier.shutdown()
    rows.region.close()
    return summary(samples, [(cloud, theirs)])


def main() -> None:
    options = command_line(__doc__, blocks=64, rounds=5, block_bytes=1 << 20).parse_args()
    figures = [measure(cloud, options.blocks, options.rounds, options.block_bytes) for cloud in CLOUDS]
    print(json.dumps({name: value for each in figures for name, value in each.items()}))


if __name__ == "__main__":
    main()
