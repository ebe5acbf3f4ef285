#!/usr/bin/env bash
# preshed: len() of a PreshMap counts keys that were deleted, and the map grows though it never has more than 1,000.
#
# What happens: pop() marks a cell as deleted and leaves it in its place. len() is the number of cells that were ever
# filled since the table last grew, and the table doubles by that number. One expects the length of a dict. keys(), items()
# and `in` leave deleted keys out. So a window of 1,000 keys (each new one takes the place of the oldest, as in a cache)
# ends with a length of some tens of thousands, and a table for hundreds of thousands, 16 bytes each.
# Seen: preshed 3.0.15 (spaCy's hash table), Python 3.11, Linux. Who meets it: an index or a counter from 64-bit hashes to
# numbers that evicts. What a program can do: count by itself, and copy the live items into a new map from time to time.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check preshed==3.0.15 cymem==2.0.16 murmurhash==1.0.16
"$work/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from preshed.maps import PreshMap

small = PreshMap()
for key in (11, 12, 13):
    small[key] = 10 * key
small.pop(11)
print("preshed", version("preshed"))
print(f"three keys, one deleted: length {len(small)}, keys {sorted(small.keys())}, 11 in it: {11 in small}")

moving, live, last = PreshMap(), 1000, 400_000
for key in range(1, last):
    if key > live:
        moving.pop(key - live)
    moving[key] = key
keys = list(moving.keys())
print(f"a window over {last:,} keys: {len(keys):,} keys, length {len(moving):,}, room for {moving.capacity:,}")
kept = len(keys) == live and all(moving[key] == key for key in range(last - live, last))
sys.exit(not (len(small) == 3 and sorted(small.keys()) == [12, 13] and kept and len(moving) > 10 * live
              and moving.capacity > 100 * live))
PYTHON
