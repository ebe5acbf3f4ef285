"""What the proofs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.places import Place
from tiered_kv.testing.s3_servers import missing_for_moto


@pytest.fixture(scope="module", autouse=True)
def _moto_first(request: pytest.FixtureRequest) -> None:
    """Start the server that lasts for the session before a test begins, which would be blamed for leaving it behind."""
    if hasattr(request.module, "moto_server") and not missing_for_moto():
        request.getfixturevalue("moto_server")


@pytest.fixture
def place_of(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Place]]:
    """Return new storage for a tier, by the tier's type; what is opened there is closed with the test."""
    with ExitStack() as closing:
        yield lambda kind: Place(kind, tmp_path, request.getfixturevalue, closing)
