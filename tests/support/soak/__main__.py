"""Run a soak from a shell: `python -m tests.support.soak --minutes 60`."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.support.soak.soak import SoakSettings, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides chats and faults (default: %(default)s)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what fails is counted
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        report = run(SoakSettings(60 * options.minutes, options.seed), Path(directory))
    print("\n".join(report.lines()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
