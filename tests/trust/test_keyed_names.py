"""Who reads a tier's storage cannot tell which keys are stored there: looked for in every byte of it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.support.figures import Figures
from tiered_kv.base import OffloadKey, get_offload_block_hash
from tiered_kv.config import load_config
from tiered_kv.stack import open_stack
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv.tiering.keyed_names import NameMap
from tiered_kv.toolkit.record import digest_of
from tiered_kv_fs.layout import block_name

__all__ = ["moto_bucket", "moto_server", "redis_server"]

pytestmark = [pytest.mark.trust, pytest.mark.slow]

TIERS = ("nvme", "fs", "redis", "s3")
SHARED = ("fs", "redis")
KEYS = 16
SEEN_BYTES = 8
"""A part of a digest that is so long occurs by chance in none of the few megabytes that are looked at."""
NAME_KEY = bytes(range(32))
PROGRAM = Path(__file__).with_name("keyed_names_program.py")

Reader = Callable[[], Iterator[bytes]]
"""Yields all that somebody sees who may read the storage: names, and what stands under them."""


@pytest.fixture
def storage_of(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], tuple[dict[str, Any], Reader]]:
    """Return the YAML entry of a tier over real storage, and a reader of that storage."""

    def storage(tier: str) -> tuple[dict[str, Any], Reader]:
        match tier:
            case "nvme" | "fs":
                path = tmp_path / tier
                return {"type": tier, "path": str(path), "capacity": "8MiB"}, lambda: files_in(path)
            case "redis":
                server: RedisServer = request.getfixturevalue("redis_server")
                patient = {"connect_timeout": "30s", "timeout": "60s"}
                return {"type": "redis", "url": server.url, **patient}, lambda: values_in(server)
            case _:
                moto: S3Server = request.getfixturevalue("moto_server")
                bucket: str = request.getfixturevalue("moto_bucket")
                return moto.settings(bucket, presence_ttl=0.2), lambda: objects_in(moto, bucket)

    return storage


def files_in(root: Path) -> Iterator[bytes]:
    for path in root.rglob("*"):
        yield os.fsencode(path.relative_to(root))
        if path.is_file():
            yield path.read_bytes()


def values_in(server: RedisServer) -> Iterator[bytes]:
    for name in server.keys():  # noqa: SIM118  # no dictionary
        yield name
        yield server.get(name)


def objects_in(server: S3Server, bucket: str) -> Iterator[bytes]:
    client = server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for each in page.get("Contents", ()):
            found = client.get_object(Bucket=bucket, Key=each["Key"])
            yield each["Key"].encode()
            yield found["Body"].read()
            yield repr(found["Metadata"]).encode() + repr(found["ResponseMetadata"]["HTTPHeaders"]).encode()
    client.close()


def traces_of(key: OffloadKey, namespace_digest: bytes) -> dict[str, bytes]:
    """Return what would tell of a key: itself, and digests that need no secret, those of the project among them."""
    traces: dict[str, bytes] = {"the key": key, "the block hash": get_offload_block_hash(key)}
    for what, text in list(traces.items()):
        traces |= {
            f"{digest} of {what}": value
            for digest, value in {
                "xxh3-128": xxhash.xxh3_128_digest(text),
                "xxh3-64": xxhash.xxh3_64_digest(text),
                "xxh64": xxhash.xxh64_digest(text),
                "md5": hashlib.md5(text, usedforsecurity=False).digest(),
                "sha1": hashlib.sha1(text, usedforsecurity=False).digest(),
                "sha256": hashlib.sha256(text).digest(),
                "blake2b-16": hashlib.blake2b(text, digest_size=16).digest(),
                "blake2b-32": hashlib.blake2b(text, digest_size=32).digest(),
                "blake2b-32 with the namespace": hashlib.blake2b(text, digest_size=32, key=namespace_digest).digest(),
                "crc": zlib.crc32(text).to_bytes(4, "big") * 2,
            }.items()
        }
    traces["the record's digest"] = digest_of(key)
    traces["fs's name"] = bytes.fromhex(block_name(key, namespace_digest))
    return traces


def forms_of(trace: bytes) -> dict[str, bytes]:
    """Return how a trace, or the beginning of one that was cut off, may be written."""
    seen = trace[:SEEN_BYTES]
    return {
        "as it is": seen,
        "backwards": seen[::-1],
        "in hexadecimal": seen.hex().encode(),
        "in capitals": seen.hex().upper().encode(),
        "in base64": base64.b64encode(trace)[: SEEN_BYTES * 8 // 6],
        "in base64 for URLs": base64.urlsafe_b64encode(trace)[: SEEN_BYTES * 8 // 6],
    }


def stack_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "namespace": {"model": "m"},
        "block": {"bytes": "4KiB"},
        "primary": {"capacity": "256KiB"},
        "secondary": [{"lookup_timeout": "60s", "job_timeout": "60s", **entry}],
    }


def store(config: dict[str, Any], keys: list[OffloadKey]) -> bytes:
    """Store blocks whose bytes say nothing of their keys; return the namespace's digest."""
    with open_stack(config) as stack:
        assert stack.put(keys, np.full((len(keys), 4096), 0xA5, np.uint8)) == len(keys)
        assert stack.flush(60.0)
        (name,) = stack.tier_names
        assert stack.counters()[name]["stored_blocks"] == len(keys)
    return load_config(config).identity.digest


def findings(read: Reader, keys: list[OffloadKey], namespace_digest: bytes) -> dict[OffloadKey, list[str]]:
    """Return by what each key was found, for those keys that were."""
    storage = b"\0".join(read())
    found: dict[OffloadKey, list[str]] = {}
    for key in keys:
        for what, trace in traces_of(key, namespace_digest).items():
            for form, text in forms_of(trace).items():
                if text in storage:
                    found.setdefault(key, []).append(f"{what}, {form}")
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_a_reader_finds_no_key_nor_a_digest_of_one(
    tier: str, storage_of: Callable[[str], tuple[dict[str, Any], Reader]], figures: Figures
) -> None:
    entry, read = storage_of(tier)
    keys = make_keys(KEYS, "a prompt that the reader knows")
    digest = store(stack_of({**entry, "name_key": NAME_KEY.hex()}), keys)
    found = findings(read, keys, digest)
    figures.add("security", tried=KEYS, passed=KEYS - len(found), note="keys sought in storage in all forms")
    assert found == {}
    names = NameMap(NAME_KEY, digest).of(keys)
    assert findings(read, names, digest).keys() == set(names), "the same reader does not see where the blocks are"


@pytest.mark.parametrize("tier", TIERS)
def test_the_reader_finds_every_key_where_names_are_not_keyed(
    tier: str, storage_of: Callable[[str], tuple[dict[str, Any], Reader]]
) -> None:
    entry, read = storage_of(tier)
    keys = make_keys(KEYS, "a prompt that the reader knows")
    digest = store(stack_of(entry), keys)
    assert findings(read, keys, digest).keys() == set(keys)


@pytest.mark.parametrize("tier", SHARED)
def test_processes_share_blocks_if_they_have_the_same_name_key(
    tier: str, storage_of: Callable[[str], tuple[dict[str, Any], Reader]], tmp_path: Path, figures: Figures
) -> None:
    entry, _ = storage_of(tier)
    file = tmp_path / "name.key"
    file.touch(mode=0o600)
    file.write_text(base64.b64encode(NAME_KEY).decode())
    assert run("store", {**entry, "name_key": NAME_KEY.hex()}) == 8
    found = {
        "the same key": run("load", {**entry, "name_key": NAME_KEY.hex()}),
        "the same key in a file": run("load", {**entry, "name_key_file": str(file)}),
        "another key": run("load", {**entry, "name_key": NAME_KEY[::-1].hex()}),
        "no key": run("load", entry),
    }
    wanted = {"the same key": 8, "the same key in a file": 8, "another key": 0, "no key": 0}
    passed = sum(found[who] == blocks for who, blocks in wanted.items())
    figures.add("security", tried=len(wanted), passed=passed, note="processes with and without the key")
    assert found == wanted


def run(action: str, entry: dict[str, Any]) -> int:
    command = [sys.executable, str(PROGRAM), action, json.dumps(stack_of(entry))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)
