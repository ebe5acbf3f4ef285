"""The example of a wrapper keeps the contract of a tier."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import ClassVar

import pytest

from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier

EXAMPLES = Path(__file__).parents[2] / "examples"


class TestKeyedNames(TierConformance):
    survives_reopen: ClassVar[bool] = True

    @pytest.fixture
    def open_tier(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenTier:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        keyed_names = importlib.import_module("keyed_names").KeyedNames
        nvme = {"type": "nvme", "path": str(tmp_path), "capacity": "64MiB", "segment": "1MiB"}
        return lambda spec, view: keyed_names(spec, view, "keyed", secret="5a" * 32, inner=nvme)
