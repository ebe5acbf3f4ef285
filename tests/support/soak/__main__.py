"""Run a soak from a shell: `python -m tests.support.soak --minutes 60`. SIGINT or SIGTERM end it in good order."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
import threading
from pathlib import Path

from tests.support.soak.soak import SoakSettings, run


def main(arguments: list[str] | None = None) -> int:
    """Run it and print what it came to; return 1 if anything was wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides chats and faults (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="where tiers and servers are put; by default a temporary directory")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes: expected more than 0, found {options.minutes}")
    logging.disable(logging.WARNING)  # what fails is counted
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-", dir=options.dir) as directory:
        report = run(SoakSettings(60 * options.minutes, options.seed), Path(directory), should_stop=stop.is_set)
    print("\n".join(report.lines()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
