#!/usr/bin/env bash
# zstandard: of a file of several frames, `decompress` returns the first one, without an error. Python's own returns all.
#
# What happens: RFC 8878 (section 3) lets compressed data consist of frames one after another: that is what appending to
# a .zst file, pzstd, and the zstd program with several inputs make. The package zstandard reads one frame and passes
# over the rest; with allow_extra_data=False it is an error, and read_across_frames=True is not implemented. Python 3.14's
# compression.zstd, here its backport, returns the content of all frames. So a program that takes whichever of the two is
# installed loses data on older Pythons only. A frame that states no content size (every stream, every pipe), and a
# skippable frame in front, are read by the one and are errors of the other.
# Seen: zstandard 0.25.0, backports.zstd 1.8.0, Python 3.11. Who meets it: readers of logs, traces and exports in .zst.
# What a program can do: zstandard's stream_reader(..., read_across_frames=True), or copy_stream for each frame.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check zstandard==0.25.0 backports.zstd==1.8.0
"$work/venv/bin/python" - <<'PYTHON'
import io
import sys
from importlib.metadata import version

import zstandard
from backports import zstd

compressor = zstandard.ZstdCompressor()
stream = compressor.compressobj()
data = {
    "two frames": compressor.compress(b"first ") + compressor.compress(b"second"),
    "no content size": stream.compress(b"stream") + stream.flush(),
    "skippable frame": bytes.fromhex("502a4d1804000000") + b"note" + compressor.compress(b"after it"),
}


def result(read, frames):
    try:
        return read(frames).decode()
    except Exception as error:
        return type(error).__name__


def streamed(frames):
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frames), read_across_frames=True).read()


found = {case: tuple(result(read, frames) for read in (zstandard.decompress, zstd.decompress, streamed))
         for case, frames in data.items()}
print("zstandard", version("zstandard"), "backports.zstd", version("backports.zstd"))
for case, (packaged, own, across) in found.items():
    print(f"{case}: zstandard.decompress {packaged!r}, Python's own {own!r}, stream_reader {across!r}")
sys.exit(found != {
    "two frames": ("first ", "first second", "first second"),
    "no content size": ("ZstdError", "stream", "stream"),
    "skippable frame": ("ZstdError", "after it", "after it"),
})
PYTHON
