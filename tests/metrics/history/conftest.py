"""The plugin of these tests, and a stack over its tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.obedient import obedient_plugin, stack_of
from tiered_kv.stack.open import Stack, open_stack

__all__ = ["obedient_plugin"]

OBEDIENT: dict[str, object] = {"type": "obedient", "name": "disk", "breaker_failures": 1000}


@pytest.fixture
def stack() -> Iterator[Stack]:
    with open_stack(stack_of(OBEDIENT)) as stack:
        yield stack
