"""Checks that a program makes in an engine's environment, one by one."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from pathlib import Path


class ChecksIn:
    """Checks, one method each, in the order they run, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)


def run_checks(checks: object, names: Sequence[str]) -> None:
    """Run the public methods of `checks`, or those that are named; print a line of JSON for each."""
    for name in names or [name for name in vars(type(checks)) if not name.startswith("_")]:
        began_s, error = time.monotonic(), ""
        try:
            getattr(checks, name)()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"check": name, "error": error, "seconds": round(time.monotonic() - began_s, 2)}), flush=True)


def damage(directory: Path, payload: bytes) -> None:
    """Flip a bit of a stored payload, which is in one file of a directory."""
    found = [(path, path.read_bytes().find(payload)) for path in directory.rglob("*") if path.is_file()]
    ((path, at),) = [(path, at + 100) for path, at in found if at >= 0]
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
