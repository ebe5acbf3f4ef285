"""Fixtures of the proofs: servers and storage, each made on demand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_cases import CrashCases
from tests.support.entries import EntryOf
from tests.support.patient_nvme import patient_nvme
from tests.support.places import PlaceOf, place_of
from tests.support.race_cases import SIZES
from tests.support.redis_groups import redis_cluster, redis_sentinel, tls_redis_cluster, tls_redis_sentinel
from tests.support.redis_servers import redis_server, tls_redis_server
from tests.support.s3_servers import missing_for_moto, moto_server

__all__ = [
    "moto_server",
    "patient_nvme",
    "place_of",
    "redis_cluster",
    "redis_sentinel",
    "redis_server",
    "tls_redis_cluster",
    "tls_redis_sentinel",
    "tls_redis_server",
]


@pytest.fixture(scope="module", autouse=True)
def _moto_first(request: pytest.FixtureRequest) -> None:
    """Start the session's server before the first test, which would fail for leaving it behind."""
    fixtures = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if fixtures & {"moto_server", "place_of"} and not missing_for_moto():
        request.getfixturevalue("moto_server")


@pytest.fixture
def entry_of(place_of: PlaceOf) -> EntryOf:
    """Return the entry of a raced tier over new storage."""
    return lambda kind: {**place_of(kind).entry, **SIZES[kind]}


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[CrashCases]:
    """Servers for crashes and failing calls."""
    with CrashCases(tmp_path / "cases") as cases:
        yield cases
