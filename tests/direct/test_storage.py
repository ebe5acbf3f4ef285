"""A tier type declares its storage: what it keeps for one process is divided, and its settings may have any name."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field

from tests.direct.conftest import open_direct
from tests.support.faulty import FourMethodTier
from tests.support.host_server import serving
from tests.support.stacks import plugged, stack_of
from tiered_kv.config.entries import tier_settings
from tiered_kv.config.hooks import TierType
from tiered_kv.config.settings import StorageSettings, TierSettings
from tiered_kv.config.units import Bytes, Seconds
from tiered_kv.direct.tiers import part_of
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.isolation import IsolatedTier
from tiered_kv.tiering.wrapper import WrapperTier
from tiered_kv.toolkit.keys_only import KeyStore

MIB = 1 << 20


class ShelfSettings(TierSettings):
    """As an outsider might call them."""

    storage_settings: ClassVar[StorageSettings] = StorageSettings(directory="folder", capacity="room", ttl="keep_for")
    type: str = "shelf"
    folder: Path = Field()
    room: Bytes = Field()
    keep_for: Seconds | None = None


class ShelfTier(FourMethodTier):
    """Writes down its settings in the directory that it was given, as if it owned it."""

    takes_offsets = True

    def __init__(self, offloading_spec: Any, view: memoryview, tier_type: str, settings: ShelfSettings) -> None:
        super().__init__(offloading_spec, view, tier_type)
        settings.folder.mkdir(parents=True)
        (settings.folder / "room").write_text(str(settings.room))

    def shutdown(self) -> None:
        self._region.release()


@pytest.fixture(autouse=True)
def types() -> Iterator[None]:
    own = TierType("shelf", ShelfSettings, lambda: ShelfTier)
    shared = TierType("depot", ShelfSettings, lambda: ShelfTier, is_shared=True)
    guest = TierType("guest", TierSettings, lambda: FourMethodTier, is_shared=True, is_host_client=True)
    with plugged(own, shared, guest):
        yield


def shelf(folder: Path, **more: object) -> dict[str, object]:
    return {"type": "shelf", "folder": str(folder), "room": "4MiB", **more}


def test_the_storage_of_one_process_is_divided_and_a_shared_one_is_not(tmp_path: Path) -> None:
    part = part_of(tier_settings(shelf(tmp_path)), "abc", Fraction(1, 4))
    assert (part.storage_facts().directory, part.storage_facts().capacity_bytes) == (str(tmp_path / "abc"), MIB)
    assert isinstance(part, ShelfSettings)
    assert isinstance(part.folder, Path)
    shared = tier_settings({**shelf(tmp_path), "type": "depot"})
    assert part_of(shared, "abc", Fraction(1, 4)) is shared


def test_a_part_opens_over_a_caller_s_memory(tmp_path: Path, pool: Any) -> None:
    with open_direct(pool, part_of(tier_settings(shelf(tmp_path)), "abc", Fraction(1, 4))):  # type: ignore[arg-type]
        assert (tmp_path / "abc" / "room").read_text() == str(MIB)


def test_two_namespaces_of_a_server_get_a_directory_and_half_of_the_capacity_each(tmp_path: Path) -> None:
    stack: dict[str, object] = {"primary": {"capacity": "1MiB"}, "secondary": [shelf(tmp_path / "shelf")]}
    with serving(tmp_path, stack, namespaces=2) as served:
        for name in "ab":
            served.engine(settings={"namespace": {"model": name}, "block": {"bytes": 4096, "tokens": 16}})
        rooms = [file.read_text() for file in (tmp_path / "shelf").glob("*/room")]
    assert rooms == [str(2 * MIB)] * 2


def test_a_class_without_a_model_gets_its_part_in_the_form_of_its_entry() -> None:
    reference = f"{__name__}:ShelfTier"
    whole = tier_settings({"type": reference, "path": "/kv", "capacity": "4MiB", "colour": "red"})
    part = part_of(whole, "abc", Fraction(1, 4))
    assert part.model_extra == {"path": "/kv/abc", "capacity": "1MiB", "colour": "red"}
    with pytest.raises(ConfigError, match=r"capacity: tier 'ShelfTier': expected a size.*found 'plenty'"):
        part_of(tier_settings({"type": reference, "capacity": "plenty"}), "abc", Fraction(1, 4))
    assert part_of(tier_settings({"type": reference, "capacity": "plenty"}), "abc", Fraction(1)).model_extra


def test_the_history_and_the_simulation_know_how_long_a_tier_keeps_blocks_and_how_many(tmp_path: Path) -> None:
    with open_stack(stack_of(shelf(tmp_path / "kv", keep_for="90s"))) as stack:
        history = stack.history
        assert history is not None
        assert stack.config.secondary[0].storage_facts().ttl_s == 90
    simulated = KeyStore(tier_settings(shelf(tmp_path, keep_for="90s")), 4096, lambda: 0.0)
    assert (simulated.ttl_s, simulated.capacity_bytes) == (90, 4 * MIB)
    with pytest.raises(ConfigError, match="room: 1 bytes do not hold one block"):
        KeyStore(tier_settings(shelf(tmp_path, room=1)), 4096, lambda: 0.0)


def test_an_opening_that_hangs_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(seconds: float, *_: object, **more: object) -> None:
        raise TimeoutError("not open yet")

    monkeypatch.setattr("tiered_kv.tiering.factory.call_within", hang)
    view = memoryview(bytearray(8192)).cast("B", (2, 4096))
    with pytest.raises(TierUnavailableError, match=f"not open yet from {tmp_path}"):
        SecondaryTierFactory.create(None, view, tier_settings(shelf(tmp_path)))


def test_a_server_s_own_stack_has_no_client_of_a_server() -> None:
    with pytest.raises(ConfigError, match=r"secondary\.0: a server has the host's cache"):
        Namespaces({"primary": {"capacity": "1MiB"}, "secondary": [{"type": "guest"}]})


@pytest.mark.parametrize(
    "names",
    [("folder", "room"), {"directory": "folder"}, None, StorageSettings("fodler"), StorageSettings(capacity=4)],  # type: ignore[arg-type]
)
def test_a_tier_type_names_settings_of_its_own_for_its_storage(names: object) -> None:
    wrong = type("Wrong", (ShelfSettings,), {"storage_settings": names, "__module__": __name__})
    with pytest.raises(ConfigError, match=r"tier type 'shelf' (needs|has no setting) .*(StorageSettings\(|'fodler'|4)"):
        TierType("shelf", wrong, lambda: ShelfTier)


def test_blocks_that_a_tier_moved_are_known_through_whatever_stands_before_it() -> None:
    class MovingTier(FourMethodTier):
        relocated_blocks = 7

    class MethodTier(FourMethodTier):
        def relocated_blocks(self) -> int:  # type: ignore[override]
            return 7

    view = memoryview(bytearray(8192)).cast("B", (2, 4096))
    assert WrapperTier(MovingTier(None, view, "moving")).relocated_blocks == 7
    for kind in (MovingTier, MethodTier):
        isolated = IsolatedTier(kind(None, view, "moving"))
        wait_until(partial(_has_moved, isolated))
        isolated.shutdown()


def _has_moved(tier: IsolatedTier) -> bool:
    return tier.relocated_blocks == 7
