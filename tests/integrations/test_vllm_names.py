"""Where a tier has a `name_key`, nothing that an adapter for vLLM stores stands under the name of its key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.tiering.keyed_names import NameMap
from tiered_kv.toolkit.record import digest_of
from tiered_kv_fs.layout import block_name

PROGRAM = Path(__file__).with_name("vllm_names_program.py")
NAME_KEY = bytes(range(32))


def run(adapter: str, path: Path, **options: object) -> dict[str, Any]:
    entry = {"type": "fs", "path": str(path), "capacity": "8MiB", "lookup_timeout": "60s", **options}
    command = [sys.executable, str(PROGRAM), adapter, json.dumps(entry)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def names_in(path: Path) -> set[str]:
    return {each.name for each in path.glob("*/*/*/*")}


def bytes_in(path: Path) -> bytes:
    return b"\0".join(str(each).encode() + (each.read_bytes() if each.is_file() else b"") for each in path.rglob("*"))


def is_told(key: OffloadKey, namespace_digest: bytes, storage: bytes) -> bool:
    """Return whether anything tells of a key: itself, its hash, or a digest that needs no secret."""
    traces = [key[:16], digest_of(key), bytes.fromhex(block_name(key, namespace_digest))]
    return any(each in storage or each.hex().encode() in storage for each in traces)


@pytest.mark.parametrize("adapter", ["spec", "tier"])
def test_with_a_name_key_blocks_stand_under_keyed_names_only_and_are_found_again(tmp_path: Path, adapter: str) -> None:
    path = tmp_path / "kv"
    report = run(adapter, path, name_key=NAME_KEY.hex())
    keys = [OffloadKey(bytes.fromhex(key)) for key in report["keys"]]
    digest = bytes.fromhex(report["digest"])
    assert report["stored"] == report["loaded"] == len(keys)
    keyed = NameMap(NAME_KEY, digest).of(keys)
    assert names_in(path) == {block_name(name, digest) for name in keyed}
    storage = bytes_in(path)
    assert not any(is_told(key, digest, storage) for key in keys)
    assert all(is_told(name, digest, storage) for name in keyed)


@pytest.mark.parametrize("adapter", ["spec", "tier"])
def test_without_one_the_same_look_finds_every_key(tmp_path: Path, adapter: str) -> None:
    path = tmp_path / "kv"
    report = run(adapter, path)
    keys = [OffloadKey(bytes.fromhex(key)) for key in report["keys"]]
    digest = bytes.fromhex(report["digest"])
    assert report["stored"] == report["loaded"] == len(keys)
    assert names_in(path) == {block_name(key, digest) for key in keys}
    assert all(is_told(key, digest, bytes_in(path)) for key in keys)
