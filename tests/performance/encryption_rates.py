"""What encryption costs the nvme tier: raw beside a codec, in turn, as one JSON object.

    chrt -r 10 python tests/performance/encryption_rates.py DIRECTORY --rounds 15

DIRECTORY is on the disk to measure. Every round measures as `nvme_rates.py` does, once with each codec; the order
alternates from round to round. A ratio is the codec's rate over the raw one of the same round: its median, least and
greatest. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict

from tests.performance.bench import Sample, command_line, in_turn, summary
from tests.performance.nvme_rates import measure_empty

CODECS = {"raw": "raw", "codec": "aes-256-gcm"}
BATCH = 32


def main() -> None:
    arguments = command_line(__doc__, "directory", block_bytes=1 << 20, blocks=1024, rounds=5).parse_args()
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for number in range(arguments.rounds):
        for side in in_turn(number, CODECS):
            sizes = (arguments.block_bytes, arguments.blocks, BATCH)
            samples[side].append(measure_empty(arguments.directory, CODECS[side], *sizes))
    about = {"codec": CODECS["codec"], "block_bytes": arguments.block_bytes, "rounds": arguments.rounds}
    print(json.dumps({**about, **summary(samples, [("codec", "raw")])}))


if __name__ == "__main__":
    main()
