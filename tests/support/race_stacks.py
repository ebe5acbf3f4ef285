"""What races run on: stacks with hardly any room over real storage, and how their cases are counted.

    from tests.support.race_stacks import entry_of

A test module that imports the fixture, and those of `redis_servers` and `s3_servers` that it needs, has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.figures import Figures
from tiered_kv.testing.redis_servers import RedisServer
from tiered_kv.testing.s3_servers import S3Server

BLOCK_BYTES = 4096
PRIMARY_BLOCKS = 32
TIERS = ("memory", "nvme", "fs", "redis", "s3")
ROUNDS_MAX = 20
"""How often a race goes on that has not yet come to what it is about: on a slow machine that takes longer."""

Entry = dict[str, object]
EntryOf = Callable[[str], Entry]


def stack_of(*entries: Mapping[str, object], block_bytes: int = BLOCK_BYTES) -> dict[str, object]:
    """Return the configuration of a stack with 32 blocks of primary memory over tiers."""
    return {
        "namespace": {"model": "races"},
        "block": {"bytes": block_bytes},
        "primary": {"capacity": PRIMARY_BLOCKS * block_bytes},
        "secondary": list(entries),
    }


@pytest.fixture
def entry_of(tmp_path: Path, request: pytest.FixtureRequest) -> EntryOf:
    """Return the YAML entry of a tier, by its type, over storage of its own."""

    def entry(tier: str) -> Entry:
        match tier:
            case "memory":
                return {"type": "memory", "capacity": 1 << 20}
            case "nvme":
                return {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": 1 << 20, "segment": 128 << 10}
            case "fs":
                return {"type": "fs", "path": str(tmp_path / "fs"), "capacity": 2 << 20}
            case "redis":
                server: RedisServer = request.getfixturevalue("redis_server")
                return {"type": "redis", "url": f"{server.url}/0"}
            case _:
                moto: S3Server = request.getfixturevalue("moto_server")
                bucket: str = request.getfixturevalue("moto_bucket")
                return moto.settings(bucket, presence_ttl=0.2)

    return entry


def unless(happened: bool, what: str) -> list[str]:
    """Return a problem where that which a case is about has not happened in it."""
    return [] if happened else [f"the case proves nothing: {what}"]


def conclude(figures: Figures, cases: dict[str, list[str]]) -> None:
    """Count cases, each with its problems, then fail with what was wrong in them."""
    bad = {case: problems for case, problems in cases.items() if problems}
    figures.add("races", len(cases), len(cases) - len(bad))
    assert not bad, "\n".join(f"{case}: {problem}" for case, problems in bad.items() for problem in problems)
