"""Plugins: all are loaded through the same hook, when they are needed; a broken one costs no other plugin's tier."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.faulty import FourMethodTier
from tests.support.stacks import plugged
from tiered_kv.config.entries import tier_settings
from tiered_kv.config.hooks import PROJECT, TierPlugins, TierType, hookimpl, tier_plugins
from tiered_kv.config.settings import ClassArguments, TierSettings
from tiered_kv.errors import ConfigError, ResourceError, TierError
from tiered_kv.tiering.factory import SecondaryTierFactory

HOOK = """
from tiered_kv.config.hooks import TierType, hookimpl
from tiered_kv.config.settings import TierSettings
from tests.support.faulty import FourMethodTier

@hookimpl
def tiered_kv_register_tiers():
    return [TierType({name!r}, TierSettings, lambda: FourMethodTier)]
"""


Install = Callable[[str, str], None]


class Plugin:
    def __init__(self, *names: str) -> None:
        self.names = names

    @hookimpl
    def tiered_kv_register_tiers(self) -> Iterable[TierType]:
        return [TierType(name, TierSettings, lambda: FourMethodTier) for name in self.names]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Install]:
    """Install a distribution of one module, called like the distribution, with the given source."""
    installed: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tiered_kv]\n{name} = {name}\n")
        importlib.invalidate_caches()
        installed.append(name)

    yield install
    for name in installed:
        sys.modules.pop(name, None)


def find_installed() -> TierPlugins:
    return TierPlugins(importlib.metadata.entry_points(group=PROJECT))


def test_a_plugin_is_imported_when_a_tier_of_its_entry_point_s_name_is_asked_for(install: Install) -> None:
    install("wanted", HOOK.format(name="wanted"))
    install("other", HOOK.format(name="third"))
    plugins = find_installed()
    assert plugins.resolve("wanted").load() is FourMethodTier
    assert "other" not in sys.modules
    assert plugins.resolve("third").name == "third"
    assert "other" in sys.modules


def test_the_plugin_whose_entry_point_has_the_name_of_a_tier_has_it_before_others(install: Install) -> None:
    install("copycat", HOOK.format(name="wanted"))
    install("wanted", HOOK.format(name="wanted"))
    plugins = find_installed()
    first = plugins.resolve("wanted")
    errors = {state.plugin: state.error for state in plugins.states()}
    assert "'wanted' is registered by plugin 'wanted' of wanted 1.0 and plugin 'copycat' of copycat 1.0" in str(
        errors["copycat"]
    )
    assert errors["wanted"] is None
    assert plugins.resolve("wanted") is plugins.tier_types()["wanted"] is first


def test_threads_that_ask_at_once_load_a_plugin_once(install: Install) -> None:
    install("slow", "import time; time.sleep(0.05)\n" + HOOK.format(name="slow"))
    plugins = find_installed()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(plugins.resolve, ["slow"] * 8))
    assert found == [found[0]] * 8


def test_an_installed_plugin_is_found(install: Install) -> None:
    install("outsider", HOOK.format(name="outside"))
    plugins = find_installed()
    assert plugins.resolve("outside").load() is FourMethodTier
    (state,) = [state for state in plugins.states() if state.plugin == "outsider"]
    assert (state.distribution, state.error) == ("outsider 1.0", None)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('out of order')", "RuntimeError: out of order"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("raise BaseException('panic')", "BaseException: panic"),
        ("", "gives no tier type: is its function marked with @hookimpl?"),
        (HOOK.format(name="no good name"), "cannot name a tier type"),
        (HOOK.format(name="x").replace("[TierType", "['x', TierType"), "which is no TierType"),
    ],
)
def test_a_broken_plugin_is_reported_and_costs_no_other(
    install: Install, caplog: pytest.LogCaptureFixture, source: str, reason: str
) -> None:
    install("broken", source)
    install("healthy", HOOK.format(name="health"))
    plugins = find_installed()
    assert "health" in plugins.tier_types()
    (state,) = [state for state in plugins.states() if state.plugin == "broken"]
    assert state.error is not None
    assert reason in state.error
    assert "plugin 'broken' of broken 1.0 cannot be loaded" in caplog.text
    with pytest.raises(ConfigError, match=r"unknown tier type 'x'.*plugin 'broken' of broken 1\.0 cannot be loaded"):
        plugins.resolve("x")


def test_a_plugin_that_ends_the_process_is_named_and_costs_only_those_who_load_it(install: Install) -> None:
    install("quitter", "raise SystemExit(0)")
    install("healthy", HOOK.format(name="healthy"))
    plugins = find_installed()
    plugins.resolve("healthy")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"plugin 'quitter' of quitter 1\.0 ends the process when it is loaded"):
            plugins.states()


@pytest.mark.parametrize("source", ["raise SystemExit(0)", "raise BaseException('panic')"])
def test_a_module_that_ends_the_process_is_an_error_of_the_tier_that_names_it(install: Install, source: str) -> None:
    install("quitter", source)
    with pytest.raises(ConfigError, match=r"'quitter:Tier' cannot be loaded: \w+: (0|panic)"):
        TierPlugins().resolve("quitter:Tier")


@pytest.mark.parametrize("error", [SystemExit(0), BaseException("panic")])
@pytest.mark.parametrize("is_late", [False, True], ids=["import", "constructor"])
def test_a_tier_that_ends_the_process_when_it_is_opened_does_not_open(error: BaseException, is_late: bool) -> None:
    def leave(*_: object) -> None:
        raise error

    kind = type("Leaving", (FourMethodTier,), {"__init__": leave})
    view = memoryview(bytearray(8192)).cast("B", (2, 4096))
    with plugged(TierType("leaving", TierSettings, (lambda: kind) if is_late else leave)):  # type: ignore[arg-type]
        settings = tier_settings({"type": "leaving"})
        with pytest.raises(TierError, match=r"(SystemExit: 0|BaseException: panic)"):
            SecondaryTierFactory.create(None, view, settings)


def test_a_plugin_that_could_not_be_loaded_for_want_of_descriptors_is_loaded_later(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("late", "import os\nif 'SHORT' in os.environ: raise OSError(24, 'none')\n" + HOOK.format(name="late"))
    monkeypatch.setenv("SHORT", "1")
    plugins = find_installed()
    with pytest.raises(ResourceError, match="'late' cannot be loaded: none; raise the limit of open files"):
        plugins.resolve("late")
    monkeypatch.delenv("SHORT")
    assert plugins.resolve("late")


def test_a_name_that_two_distributions_claim_is_an_error_that_names_both(install: Install) -> None:
    install(
        "first", HOOK.format(name="first").replace("[", "[TierType('twice', TierSettings, lambda: FourMethodTier), ")
    )
    install("second", HOOK.format(name="twice"))
    install("third", HOOK.format(name="once"))
    plugins = find_installed()
    assert plugins.resolve("first").name == "first"
    with pytest.raises(ConfigError) as caught:
        plugins.resolve("twice")
    assert "plugin 'first' of first 1.0" in str(caught.value)
    assert "plugin 'second' of second 1.0" in str(caught.value)
    assert plugins.resolve("once")
    conflicts = {state.plugin for state in plugins.states() if "uninstall one of them" in (state.error or "")}
    assert conflicts == {"first", "second"}


def test_a_program_cannot_register_a_name_that_is_taken() -> None:
    plugins = TierPlugins()
    plugins.register(Plugin("one"), "first")
    with pytest.raises(ConfigError, match="'one' is registered by plugin 'first' and plugin 'second'"):
        plugins.register(Plugin("two", "one"), "second")
    assert list(plugins.tier_types()) == ["one"]
    plugins.unregister("first")
    plugins.register(Plugin("two", "one"), "second")
    assert list(plugins.tier_types()) == ["one", "two"]


def test_a_plugin_is_registered_once() -> None:
    plugins = TierPlugins()
    plugin = Plugin("one")
    plugins.register(plugin)
    with pytest.raises(ConfigError, match="cannot be loaded: it cannot be registered"):
        plugins.register(plugin, "again")
    assert list(plugins.tier_types()) == ["one"]


def test_a_plugin_that_raises_is_a_config_error_and_is_not_registered() -> None:
    class Raising:
        names: tuple[str, ...] | None = None

        @hookimpl
        def tiered_kv_register_tiers(self) -> Iterable[TierType]:
            return [TierType(name, TierSettings, lambda: FourMethodTier) for name in self.names]  # type: ignore[union-attr]

    plugins, plugin = TierPlugins(), Raising()
    with pytest.raises(ConfigError, match="plugin 'Raising' cannot be loaded: TypeError: "):
        plugins.register(plugin)
    plugin.names = ("one",)
    plugins.register(plugin)
    assert list(plugins.tier_types()) == ["one"]


def test_a_plugin_gives_each_name_once() -> None:
    with pytest.raises(ConfigError, match="two tier types of one name"):
        TierPlugins().register(Plugin("one", "one"))


def test_the_built_in_tiers_come_through_entry_points_alone() -> None:
    assert TierPlugins().tier_types() == {}
    origins = {state.plugin: state for state in tier_plugins().states()}
    for name in ("memory", "nvme"):
        assert origins[name].distribution.startswith("tiered-kv ")
        assert origins[name].error is None
        assert [tier.name for tier in origins[name].tiers] == [name]


def test_a_source_tree_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ConfigError, match=r"is not installed; install it: pip install ") as raised:
        TierPlugins().resolve("nvme")
    assert (Path(str(raised.value).rpartition(" ")[2]) / "tiered_kv").is_dir()


def test_a_class_and_a_tier_type_are_found_by_their_names() -> None:
    tier_type = TierPlugins().resolve("tests.support.faulty:FourMethodTier")
    assert tier_type.load() is FourMethodTier
    assert tier_type.settings is ClassArguments
    assert TierPlugins().resolve("tests.support.obedient:OBEDIENT_TYPE").name == "obedient"


@pytest.mark.parametrize(
    "name", ["tests.support.obedient:WAIT_S", "tests.support.obedient:missing", "no_such_program:Tier", ":", "a:"]
)
def test_what_is_no_tier_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded|expected a tier's class"):
        TierPlugins().resolve(name)


@pytest.mark.parametrize(
    "build",
    [
        lambda: TierType("", TierSettings, lambda: FourMethodTier),
        lambda: TierType("a:b", TierSettings, lambda: FourMethodTier),
        lambda: TierType("a", dict, lambda: FourMethodTier),  # type: ignore[arg-type]
        lambda: TierType("a", TierSettings, None),  # type: ignore[arg-type]
        lambda: TierType("a", TierSettings, lambda: FourMethodTier, "", "b"),  # type: ignore[arg-type]
        lambda: TierType("a", TierSettings, lambda: FourMethodTier, None),  # type: ignore[arg-type]
        lambda: TierType("a", TierSettings, lambda: FourMethodTier, "two\nlines"),
        lambda: TierType("a", TierSettings, lambda: FourMethodTier, is_shared="no"),  # type: ignore[arg-type]
        lambda: TierType("a", TierSettings, lambda: FourMethodTier, is_lasting=None),  # type: ignore[arg-type]
    ],
)
def test_a_tier_type_that_cannot_work_is_refused_when_it_is_made(build: Callable[[], TierType]) -> None:
    with pytest.raises(ConfigError):
        build()
