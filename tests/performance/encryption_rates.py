"""What encryption costs the nvme tier: raw beside a codec, in turn, as one JSON object.

    chrt -r 10 python tests/performance/encryption_rates.py DIRECTORY --rounds 15

DIRECTORY is on the disk to measure. Every round measures as `nvme_rates.py` does, once with each codec, the other one
first in every second round, so that what else the machine does meets both alike. A ratio is the codec's rate over
the raw one of the same round: its median, least and greatest. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict

from tests.performance.bench import Sample, command_line, summary
from tests.performance.nvme_rates import measure_empty


def main() -> None:
    arguments = command_line(
        __doc__, "directory", codec="aes-256-gcm", block_bytes=1 << 20, blocks=1024, batch=32, rounds=5
    ).parse_args()
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for number in range(arguments.rounds):
        sides = (("raw", "raw"), ("codec", arguments.codec))
        for side, codec in sides if number % 2 == 0 else sides[::-1]:
            sizes = (arguments.block_bytes, arguments.blocks, arguments.batch)
            samples[side].append(measure_empty(arguments.directory, codec, *sizes))
    about = {"codec": arguments.codec, "block_bytes": arguments.block_bytes, "rounds": arguments.rounds}
    print(json.dumps({**about, **summary(samples, [("codec", "raw")])}))


if __name__ == "__main__":
    main()
