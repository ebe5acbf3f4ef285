"""The factory: constructs classes by name with their arguments, and reports their errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from pydantic import SecretStr

from tests.support.faulty import FourMethodTier
from tests.support.stacks import Register, plugged
from tiered_kv.config.hooks import TierType, tier_plugins
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError, MissingExtraError, TierError, TierUnavailableError
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

SPEC = TierSpec(name="t", block_bytes=4)


@pytest.fixture
def view() -> memoryview:
    return memoryview(bytearray(8)).cast("B", (2, 4))


class SizedTier(FourMethodTier):
    """A tier with one more argument."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, *, size: int = 1) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.size = size


class VaultSettings(TierSettings):
    password: SecretStr = SecretStr("")


class VaultTier(FourMethodTier):
    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: VaultSettings
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.settings = settings


def test_a_class_with_the_three_arguments_is_built_by_its_name(view: memoryview, register: Register) -> None:
    register("four", FourMethodTier)
    assert tier_plugins().tier_types()["four"].description.startswith("Keeps copies of blocks")
    tier = SecondaryTierFactory.create(SPEC, view, {"type": "four", "name": "mine", "job_timeout": "1s"})
    assert isinstance(tier, FourMethodTier)
    assert tier.tier_type == "four"
    with plugged(TierType("plain", TierSettings, lambda: FourMethodTier)):
        assert SecondaryTierFactory.create(SPEC, view, {"type": "plain"}).tier_type == "plain"
    with pytest.raises(ConfigError, match="unknown tier type 'plain'"):
        SecondaryTierFactory.create(SPEC, view, {"type": "plain"})


def test_the_further_keys_of_an_entry_are_arguments_of_its_class(view: memoryview, register: Register) -> None:
    register("sized", lambda: SizedTier)
    tier = SecondaryTierFactory.create(SPEC, view, {"type": "sized", "size": 7})
    assert isinstance(tier, SizedTier)
    assert tier.size == 7
    with pytest.raises(ConfigError, match=r"tier 'sized'.* 'sise'.*takes: size"):
        SecondaryTierFactory.create(SPEC, view, {"type": "sized", "sise": 7})


class Passing(FourMethodTier):
    """Passes on what it gets, as wrappers and subclasses do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args)
        self.options = options


class KeywordsBehindStar(FourMethodTier):
    def __init__(self, *args: Any, size: int = 1) -> None:
        super().__init__(*args)
        self.options = {"size": size}


class Inherits(Passing):
    pass


class OneNamed(Passing):
    def __init__(self, offloading_spec: Any, *args: Any, size: int = 1, **options: Any) -> None:
        super().__init__(offloading_spec, *args, size=size, **options)


class Created(Passing):
    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(cls)


class Wrapped(Passing):
    @wraps(SizedTier.__init__)  # type: ignore[misc]  # as decorators of other libraries do
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


@pytest.mark.parametrize("tier_class", [Passing, KeywordsBehindStar, Inherits, OneNamed, Created, Wrapped])
def test_an_option_arrives_however_the_class_takes_it(
    view: memoryview, register: Register, tier_class: type[Passing]
) -> None:
    register("own", lambda: tier_class)
    common = {"load_budget": "8B", "job_timeout": "1s", "name": "mine"}
    tier = SecondaryTierFactory.create(SPEC, view, {"type": "own", "size": 64, **common})
    assert isinstance(tier, tier_class)
    assert tier.options == {"size": 64}, "and none of the settings that every tier has"


@pytest.mark.parametrize("tier_class", [KeywordsBehindStar, Wrapped, FourMethodTier])
def test_an_option_that_a_class_does_not_take_is_refused(
    view: memoryview, register: Register, tier_class: type[SecondaryTierManager]
) -> None:
    register("own", lambda: tier_class)
    with pytest.raises(ConfigError, match="tier 'own' has unknown keys 'sise'"):
        SecondaryTierFactory.create(SPEC, view, {"type": "own", "sise": 64})


def test_a_plugin_s_class_gets_its_settings(view: memoryview) -> None:
    with plugged(TierType("vault", VaultSettings, lambda: VaultTier)):
        tier = SecondaryTierFactory.create(SPEC, view, {"type": "vault", "password": "hunter2"})
        assert isinstance(tier, VaultTier)
        assert tier.settings.password.get_secret_value() == "hunter2"
        again = SecondaryTierFactory.create(SPEC, view, tier.settings)
        assert isinstance(again, VaultTier)
        assert again.settings is tier.settings


def test_exceptions_of_a_constructor_become_a_tier_error_without_secrets(view: memoryview) -> None:
    class Failing(VaultTier):
        def __init__(self, spec: Any, view: memoryview, tier_type: str, settings: VaultSettings) -> None:
            raise OSError(f"cannot log in with {settings.password.get_secret_value()} at vault://me:pw@host")

    with plugged(TierType("vault", VaultSettings, lambda: Failing)), pytest.raises(TierError) as caught:
        SecondaryTierFactory.create(SPEC, view, {"type": "vault", "name": "mine", "password": "hunter2"})
    assert str(caught.value) == "tier 'mine' cannot be opened: OSError: cannot log in with *** at vault://***@host"
    assert caught.value.__context__ is None


def test_this_project_s_own_errors_stay_as_they_are(view: memoryview, register: Register) -> None:
    def fails(error: Exception) -> Callable[[], type[SecondaryTierManager]]:
        def load() -> type[SecondaryTierManager]:
            raise error

        return load

    for error in (MissingExtraError("tier 'x'", "x"), TierUnavailableError("gone", tier="x")):
        register(name := type(error).__name__, fails(error))
        with pytest.raises(type(error)) as caught:
            SecondaryTierFactory.create(SPEC, view, {"type": name})
        assert caught.value is error
    register("failing", fails(ImportError("no module")))
    with pytest.raises(TierError, match="ImportError: no mod"):
        SecondaryTierFactory.create(SPEC, view, {"type": "failing"})


@pytest.mark.parametrize("loaded", [dict, 1, None])
def test_a_class_that_is_not_a_tier_is_refused(view: memoryview, loaded: Any, register: Register) -> None:
    register("odd", lambda: loaded)
    with pytest.raises(ConfigError, match="no subclass of SecondaryTierManager"):
        SecondaryTierFactory.create(SPEC, view, {"type": "odd"})


def test_a_class_that_does_not_initialize_its_base_is_refused_with_what_to_do(
    view: memoryview, register: Register
) -> None:
    class Forgetful(FourMethodTier):
        def __init__(self, *arguments: Any) -> None:
            self.blocks = {}

    register("forgetful", Forgetful)
    with pytest.raises(TierError, match=r"super\(\)\.__init__\(offloading_spec, primary_kv_view, tier_type\)"):
        SecondaryTierFactory.create(SPEC, view, {"type": "forgetful"})


@pytest.mark.parametrize("name", ["is_nonblocking", "takes_offsets"])
def test_a_property_that_raises_names_its_tier(view: memoryview, name: str, register: Register) -> None:
    def raising(self: object) -> bool:
        raise RuntimeError("out of order")

    register("odd", type("Odd", (FourMethodTier,), {name: property(raising)}))
    with pytest.raises(TierError, match="tier 'odd' cannot be opened: RuntimeError: out of order"):
        SecondaryTierFactory.create(SPEC, view, {"type": "odd"})


def test_a_name_is_registered_once(register: Register) -> None:
    register("four", FourMethodTier)
    with pytest.raises(ConfigError, match="four"):
        register("four", FourMethodTier)
    assert "four" in tier_plugins().tier_types()
