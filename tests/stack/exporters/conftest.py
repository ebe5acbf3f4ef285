"""The plugin of these tests."""

from __future__ import annotations

from tests.support.obedient import obedient_plugin

__all__ = ["obedient_plugin"]
