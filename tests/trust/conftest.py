"""What the proofs share: servers and storage, each made when a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.crash_cases import CrashCases
from tests.support.entries import EntryOf
from tests.support.patient_nvme import patient_nvme
from tests.support.places import Place, PlaceOf
from tests.support.race_cases import SIZES
from tests.support.redis_groups import redis_cluster, redis_sentinel, tls_redis_cluster, tls_redis_sentinel
from tests.support.redis_servers import redis_server, tls_redis_server
from tiered_kv.testing.s3_servers import missing_for_moto, moto_server

__all__ = [
    "moto_server",
    "patient_nvme",
    "redis_cluster",
    "redis_sentinel",
    "redis_server",
    "tls_redis_cluster",
    "tls_redis_sentinel",
    "tls_redis_server",
]


@pytest.fixture(scope="module", autouse=True)
def _moto_first(request: pytest.FixtureRequest) -> None:
    """Start the server that lasts for the session before a test begins, which would be blamed for leaving it behind."""
    fixtures = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if fixtures & {"moto_server", "place_of"} and not missing_for_moto():
        request.getfixturevalue("moto_server")


@pytest.fixture
def place_of(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PlaceOf]:
    """Return new storage by its kind; what is opened there is closed with the test."""
    with ExitStack() as ending:
        yield lambda kind: Place(kind, tmp_path, request.getfixturevalue, ending)


@pytest.fixture
def entry_of(place_of: PlaceOf) -> EntryOf:
    """Return the entry of a tier that is raced on, over storage of its own."""
    return lambda kind: {**place_of(kind).entry, **SIZES[kind]}


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[CrashCases]:
    """Servers for crashes and failing calls."""
    with CrashCases(tmp_path / "cases") as cases:
        yield cases
