"""Starts the GPU's driver before the first test of copies."""

from __future__ import annotations

import importlib
from contextlib import suppress

import pytest

from tests.support.devices import start_device


@pytest.fixture(scope="session", autouse=True)
def _driver_is_started() -> None:
    """Let the driver open what it keeps open for the whole process before the descriptors of a test are counted.

    A fixture of the session runs before those of a test, and so before the check for leaks.
    """
    with suppress(ImportError):
        if importlib.import_module("torch").cuda.is_available():
            start_device("cuda")
