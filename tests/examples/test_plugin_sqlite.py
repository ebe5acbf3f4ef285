"""The example of a tier from outside keeps the contract, and comes in through the door that everybody uses."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support.stacks import stack_of
from tiered_kv.config.entries import tier_settings, tier_type_of
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.administration import TierAdministrationConformance
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.administration import TierAdministration

WAIT_S = 60.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin_sqlite"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example, registered without being installed."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import tiered_kv_sqlite  # type: ignore[import-not-found]  # a distribution of its own

    tier_plugins().register(tiered_kv_sqlite)
    yield tiered_kv_sqlite
    tier_plugins().unregister("tiered_kv_sqlite")


def damage(path: Path) -> None:
    database = sqlite3.connect(path, timeout=WAIT_S)
    with contextlib.closing(database), database:
        for number, record in database.execute("SELECT number, record FROM blocks").fetchall():
            damaged = record[:-1] + bytes([record[-1] ^ 1])
            database.execute("UPDATE blocks SET record = ? WHERE number = ?", (damaged, number))


@pytest.mark.usefixtures("plugin")
class TestSqliteAdministration(TierAdministrationConformance):
    @pytest.fixture
    def settings(self, tmp_path: Path) -> TierSettings:
        self.path = tmp_path / "blocks.db"
        entry = {"type": "sqlite", "path": str(self.path), "capacity": "64MiB", "lookup_timeout": "60s"}
        return tier_settings(entry)

    @pytest.fixture
    def open_tier(self, settings: TierSettings) -> OpenTier:
        return lambda spec, view: SecondaryTierFactory.create(spec, view, settings)

    @pytest.fixture
    def administration(self, settings: TierSettings) -> TierAdministration:
        load = tier_type_of(settings).administration
        assert load is not None
        return load()(settings)

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        damage(self.path)
        return True


@pytest.mark.usefixtures("plugin")
class TestSqliteTier(TierConformance):
    survives_reopen = True

    @pytest.fixture
    def open_tier(self, tmp_path: Path) -> OpenTier:
        self.path = tmp_path / "blocks.db"
        entry = {"type": "sqlite", "path": str(self.path), "capacity": "64MiB", "lookup_timeout": "60s"}
        settings = tier_settings(entry)
        return lambda spec, view: SecondaryTierFactory.create(spec, view, settings)

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        damage(self.path)
        return True


def stack_with(path: Path, capacity: str = "1MiB") -> dict[str, object]:
    return stack_of({"type": "sqlite", "path": str(path), "capacity": capacity, "lookup_timeout": "60s"})


@pytest.mark.usefixtures("plugin")
def test_blocks_outlive_the_stack_and_the_file_keeps_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "blocks.db"
    keys = [bytes([index]) * 8 for index in range(200)]
    blocks = np.random.default_rng(0).integers(0, 256, (200, 4096), dtype=np.uint8)
    out = np.zeros_like(blocks)
    with open_stack(stack_with(path, "256KiB")) as stack:
        for index in range(0, 200, 4):  # prefixes of four
            assert stack.put(keys[index : index + 4], blocks[index : index + 4], timeout=WAIT_S) == 4
            assert stack.flush(WAIT_S)
            assert path.stat().st_size <= 256 << 10
    with open_stack(stack_with(path, "256KiB")) as stack:
        assert stack.get(keys[196:], out[196:], timeout=WAIT_S) == 4
        assert stack.get(keys[:4], out[:4], timeout=WAIT_S) == 0
    assert np.array_equal(out[196:], blocks[196:])


@pytest.mark.usefixtures("plugin")
def test_a_file_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailableError, match=r"tier 'sqlite' cannot be opened: .*blocks\.db"):
        open_stack(stack_with(tmp_path / "missing" / "blocks.db"))
    path = tmp_path / "blocks.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(TierUnavailableError, match="not a database"):
        open_stack(stack_with(path))
    path.unlink()
    with open_stack(stack_with(path)) as stack:
        keys = [bytes([index]) for index in range(32)]
        assert stack.put(keys, np.zeros((32, 4096), dtype=np.uint8), timeout=WAIT_S) == 32
        assert stack.flush(WAIT_S)
    with pytest.raises(ConfigError, match=r"secondary\.0\.capacity: .*delete it, or allow that many"):
        open_stack(stack_with(path, "64KiB"))


@pytest.mark.slow
def test_the_example_installs_and_is_found(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the build backend of the example")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(EXAMPLE)], check=True, timeout=600)
    program = (
        "import json; from tiered_kv.config.hooks import tier_plugins;"
        "print(json.dumps([[r.plugin, r.distribution, r.error] for r in tier_plugins().states()]))"
    )
    search = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert ["sqlite", "tiered-kv-sqlite 1.0.0", None] in json.loads(found.stdout)
