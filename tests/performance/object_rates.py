"""Throughput and CPU time of the tiers gcs and azure beside the s3 tier, against nginx: one JSON object.

    python tests/performance/object_rates.py --blocks 256 --rounds 5 --block-bytes 1048576

nginx is started on loopback with its files in /dev/shm; it answers the requests for blocks of all protocols alike, and
checks no signature. The sides take turns; each round stores every block and loads them back, under the names of the
round before the last. The tiers are driven as the tiering manager drives them, with as many connections. The side
`identity` is azure with a managed identity, to which a server gives tokens; azure itself has a key.
GB = 1e9 bytes; CPU time is that of this process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.performance.bench import BlockRows, Sample, command_line, in_turn, sample, summary
from tests.performance.s3_rates import BUCKET, CONNECTIONS, WARM_ROUNDS, start_nginx
from tests.support.entries import s3_entry
from tests.support.fake_azure import ACCOUNT, ACCOUNT_KEY
from tests.support.fake_tokens import FakeTokens
from tests.support.s3_servers import S3Server
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory


def measure(server: S3Server, blocks: int, rounds: int, block_bytes: int) -> dict[str, object]:
    rows = BlockRows(block_bytes, blocks)
    azure = {"type": "azure", "account": ACCOUNT, "container": BUCKET, "endpoint": server.url}
    entries: dict[str, dict[str, object]] = {
        "gcs": {"type": "gcs", "bucket": BUCKET, "endpoint": server.url, "access_token": "none", "prefix": "by-gcs"},
        "azure": {**azure, "account_key": ACCOUNT_KEY, "prefix": "by-azure"},
        "identity": {**azure, "prefix": "by-identity"},
        "s3": s3_entry(server, BUCKET, prefix="by-s3"),
    }
    of_all = {"connections": CONNECTIONS, "presence_ttl": 0}
    tiers: dict[str, SecondaryTierManager] = {
        side: SecondaryTierFactory.create(TierSpec(side, block_bytes), rows.region.kv_view, {**entry, **of_all})
        for side, entry in entries.items()
    }
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    try:
        for number in range(rounds + WARM_ROUNDS):
            first = number % 2 * blocks
            for side in in_turn(number, tiers):
                store = rows.store(tiers[side], first, blocks, blocks)
                load = rows.load(tiers[side], first, blocks, blocks)
                if number >= WARM_ROUNDS:
                    samples[side].append(sample(blocks * block_bytes / 1e9, store, load))
    finally:
        for tier in tiers.values():
            tier.shutdown()
        rows.region.close()
    return summary(samples, [("gcs", "s3"), ("azure", "s3"), ("identity", "azure")])


def main() -> None:
    arguments = command_line(__doc__, blocks=256, rounds=5, block_bytes=1 << 20).parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, FakeTokens() as tokens:
        os.environ |= tokens.environment
        server = start_nginx(Path(folder))
        try:
            rates = measure(server, arguments.blocks, arguments.rounds, arguments.block_bytes)
        finally:
            server.stop()
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
