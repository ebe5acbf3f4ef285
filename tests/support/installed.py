"""Tries a distribution that is installed where nothing else is: `python -P installed.py EXTRA...`, with that Python.

The task `packages` runs it. Its arguments are the extras that were installed. The command must work, and must name
the others, and only these, as missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.executable).with_name("tiered-kv")
TORCH = {"torch", "transformers"}
"""Extras of programs; no verb needs them, and no other extra may bring them."""
PLACE = {"endpoint": "http://127.0.0.1:1", "capacity": "64MiB", "attempts": 1}
S3 = {"endpoint_url": "http://127.0.0.1:1", "region": "r", "access_key_id": "id", "secret_access_key": "key"}
TIERS: dict[str, dict[str, object]] = {
    "redis": {"url": "redis://127.0.0.1:1/0"},
    "s3": {"bucket": "blocks", **S3, "capacity": "64MiB", "attempts": 1},
    "gcs": {"bucket": "blocks", "access_token": "token", **PLACE},
    "azure": {"account": "store", "container": "blocks", "account_key": "a2V5", **PLACE},
    "fs": {"capacity": "64MiB"},
    "zstd": {"type": "nvme", "codec": "zstd", "capacity": "64MiB"},
    "crypto": {"type": "nvme", "codec": "aes-256-gcm", "encryption": {"keys": {1: "00" * 32}}, "capacity": "64MiB"},
}
"""For each extra of a tier or codec, an entry that needs it. No server is there: to be refused is enough."""


def run(*arguments: str, **variables: str) -> str:
    """Run the command, and return all that it printed."""
    done = subprocess.run(
        [str(COMMAND), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.stdout


def stack_of(tiers: dict[str, dict[str, object]], folder: Path, **fields: object) -> str:
    """Write a stack's file, and return its path."""
    entries = [
        {"name": name, "type": name, **entry}
        | ({"path": str(folder / name)} if entry.get("type", name) in ("nvme", "fs") else {})
        for name, entry in tiers.items()
    ]
    primary = {"namespace": {"model": "m"}, "block": {"bytes": "4KiB"}, "primary": {"capacity": "1MiB"}}
    path = folder / f"{len(entries)}.yaml"
    path.write_text(json.dumps({**primary, "secondary": entries, **fields}))  # which is YAML too
    return str(path)


def missing(folder: Path) -> set[str]:
    """Return the extras that the command asks for."""
    wanted = {"metrics": {"listen": "127.0.0.1:0"}, "events": {"publish": "tcp://127.0.0.1:0"}}
    said = run("check", stack_of(TIERS, folder, **wanted))
    small = stack_of({"nvme": {"capacity": "64MiB"}}, folder)
    replay = run("replay", small, "--requests", "50", "--turn-blocks", "2", "--report", str(folder / "report.html"))
    if (folder / "report.html").exists():
        assert "hit" in replay, replay
    said += replay
    names = set(re.findall(r"the extra '(\w+)'", said))
    return names if completes(folder) else names | {"completion"}


def completes(folder: Path) -> bool:
    """Return whether the command completes its own verbs, as a shell asks for it."""
    if importlib.util.find_spec("argcomplete") is None:
        return False
    line, answer = "tiered-kv plug", folder / "words"
    run(_ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE_STDOUT_FILENAME=str(answer))
    assert "plugins" in answer.read_text()
    return True


def main(extras: set[str]) -> None:
    """Check that what is installed are these extras, those that share their libraries, and nothing else."""
    metadata = importlib.metadata.metadata("tiered-kv")
    assert "nvme" in run("plugins")
    has_torch = importlib.util.find_spec("torch") is not None
    assert has_torch == bool(extras & TORCH), "torch comes with its own extras only"
    known = set(metadata.get_all("Provides-Extra") or []) - TORCH - {"all", "docs", "test"}
    same = {"gcs": "azure", "azure": "gcs"}
    installed = known if "all" in extras else (extras | {same.get(extra, extra) for extra in extras}) & known
    built_in = {"zstd"} if importlib.util.find_spec("compression") else set()
    with tempfile.TemporaryDirectory() as folder:
        assert (found := missing(Path(folder))) == known - installed - built_in, found
    if "transformers" in extras:
        importlib.import_module("tiered_kv_transformers")
    print(f"tiered-kv {metadata['Version']} with {', '.join(sorted(extras)) or 'no extra'}: works")


if __name__ == "__main__":
    main(set(sys.argv[1:]))
