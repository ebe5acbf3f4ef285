"""Nvme tiers that wait for a busy machine at shutdown, for tests that open their directory again.

A program without fixtures opens and closes its stacks within `waiting_until_closed()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

import pytest

from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier
from tiered_kv.tiering.base import TierSpec
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.tier import NvmeTier

PATIENCE_S = 60.0


@contextlib.contextmanager
def waiting_until_closed() -> Iterator[None]:
    """Let nvme tiers wait at shutdown until their directory is released.

    Otherwise they leave their workers behind after two seconds, and the reclaimer after five, with the directory
    locked. A busy machine holds a thread or a flush up for that long.
    """
    with (
        mock.patch("tiered_kv_nvme.tier._SHUTDOWN_TIMEOUT_S", PATIENCE_S),
        mock.patch("tiered_kv_nvme.store.CLOSE_TIMEOUT_S", PATIENCE_S),
    ):
        yield


@pytest.fixture
def patient_nvme(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let nvme tiers wait until their directory is released, except when the bound of a shutdown is checked."""
    check = TierConformance.test_shutdown_with_jobs_in_flight_is_bounded_and_may_be_repeated
    with contextlib.nullcontext() if request.function.__name__ == check.__name__ else waiting_until_closed():
        yield


def opening_nvme(entry: Mapping[str, object]) -> OpenTier:
    """Return a factory of nvme tiers whose stores wait for room as long as the disk needs."""
    settings = NvmeSettings.model_validate({"job_timeout": 2 * PATIENCE_S, **entry})

    def open_tier(spec: TierSpec, view: memoryview) -> NvmeTier:
        with mock.patch("tiered_kv_nvme.tier._ROOM_TIMEOUT_MAX_S", PATIENCE_S):
            return NvmeTier(spec, view, "nvme", settings)

    return open_tier
