"""Fuzz one target under the coverage guidance of atheris, which is not installed with the tests:

    pip install atheris
    python -m tests.trust.fuzz TARGET [libFuzzer's options, such as -runs=100000 or -max_total_time=300] [CORPUS]

Without atheris it says so and ends with status 77, which tells "skipped" to those who know that convention. TARGET is
one of `tests.support.fuzzing.catalogue`. An input that breaks a promise ends the run and is written to
`crash-...`; give that file in place of CORPUS to run it alone.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SKIPPED = 77
_BYTES_MAX = 1 << 16
_INSTRUMENTED = ["tiered_kv", "tiered_kv_fs", "tiered_kv_nvme", "tiered_kv_redis", "tiered_kv_s3", "yaml"]


def main(arguments: Sequence[str]) -> int:
    """Run a target; libFuzzer ends the process itself when it has begun."""
    if importlib.util.find_spec("atheris") is None:
        print("skipped: atheris is not installed (pip install atheris)")
        return SKIPPED
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENTED, enable_loader_override=False):
        from tests.support.fuzzing import catalogue
        from tests.support.fuzzing.target import guide

        guide()

        name = arguments[0] if arguments else ""
        if name not in catalogue.NAMES:
            print(f"usage: fuzz.py TARGET [options of libFuzzer]; the targets: {', '.join(catalogue.NAMES)}")
            return 2
        target = catalogue.target(name)
    logging.disable(logging.WARNING)
    options = [f"-max_len={_BYTES_MAX}", "-timeout=60", "-rss_limit_mb=4096", *arguments[1:]]
    with tempfile.TemporaryDirectory(prefix="tiered-kv-fuzz-corpus-") as directory:
        corpus = Path(directory)
        for number, seed in enumerate(target.seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        words = corpus / "words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        if not any(not option.startswith("-") for option in options):
            seeds = corpus / "seeds"
            seeds.mkdir()
            for path in corpus.glob("seed-*"):
                path.rename(seeds / path.name)
            options.append(str(seeds))
        atheris.Setup([sys.argv[0], f"-dict={words}", *options], target.run)
        atheris.Fuzz()
    return 0


def _escaped(word: bytes) -> str:
    """Return a word as libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
