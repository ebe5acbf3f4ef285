"""Programs beside a module that calls itself an engine of some version, or where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def told_beside(
    directory: Path, engine: str, version: str | None, program: str, *arguments: str, **variables: str
) -> str:
    """Return what a program prints where the module `engine` has this version, or cannot be found."""
    missing = f"raise ModuleNotFoundError(name={engine!r})"
    (directory / f"{engine}.py").write_text(missing if version is None else f"__version__ = {version!r}")
    search = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **variables, "PYTHONPATH": search}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    return done.stdout.strip()
