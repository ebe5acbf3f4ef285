"""How tiers are found: the pluggy hook, and the plugins that implement it.

A plugin is a module, or any object, with

    @hookimpl
    def tiered_kv_register_tiers() -> Iterable[TierType]: ...

that its distribution names in the entry point group "tiered_kv". The built-in tiers are found in the same way. If a
plugin cannot be loaded, only its own tiers are missing; `TierPlugins.reports` says why.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from tiered_kv.config.settings import ClassArguments, TierSettings
from tiered_kv.config.validation import suggestion
from tiered_kv.errors import ConfigError, MissingExtraError, ResourceError, remedy_of

if TYPE_CHECKING:
    from tiered_kv.tiering.base import SecondaryTierManager
    from tiered_kv.toolkit.administration import TierAdministration
    from tiered_kv.toolkit.keys_only import KeyStore

PROJECT = "tiered_kv"
"""The pluggy project, and the entry point group, of tier plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

_TYPE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierType:
    """A kind of secondary tier.

    Args:
        name: The `type` of its YAML entries: a letter, then letters, digits, "_" and "-".
        settings: The strict model of its YAML entry. With a subclass of `TierSettings` the tier is
            constructed as `cls(offloading_spec, primary_kv_view, tier_type, settings)`; with
            `TierSettings` itself, as `cls(offloading_spec, primary_kv_view, tier_type)`.
        load: Imports and returns the tier's class; called when a stack with such a tier is opened. Raises
            `MissingExtraError` if a client library is missing.
        description: One line for `tiered-kv plugins`.
        administration: Imports and returns the class that `tiered-kv purge` and `inspect` use; it is constructed with
            the settings alone. Optional.
        is_shared: Whether several servers can share its storage.
        key_store: Imports and returns the class that simulates the tier in `tiered-kv simulate`; by default a cache
            that evicts the least recently used block.
    """

    name: str
    settings: type[TierSettings]
    load: Callable[[], type[SecondaryTierManager]]
    description: str = ""
    administration: Callable[[], type[TierAdministration]] | None = None
    is_shared: bool = False
    key_store: Callable[[], type[KeyStore]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _TYPE_NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot name a tier type: it takes a letter, then letters, digits, '_' and '-'"
            )
        if not (isinstance(self.settings, type) and issubclass(self.settings, TierSettings)):
            raise ConfigError(f"tier type '{self.name}' needs a subclass of TierSettings, not {self.settings!r}")
        for given in (self.load, self.administration or self.load, self.key_store or self.load):
            if not callable(given):
                raise ConfigError(f"tier type '{self.name}' needs a callable that returns a class, not {given!r}")


def imported(reference: str, *, library: str = "", extra: str = "") -> Callable[[], Any]:  # Any: the class
    """Return a callable that imports and returns a class, such as "package.module:Class", for a `TierType`.

    Where the `library` that the module needs is not installed, it raises `MissingExtraError`, which names the `extra`.
    """

    def load() -> Any:
        if library and importlib.util.find_spec(library) is None:
            raise MissingExtraError(f"tier '{extra}'", extra)
        return pkgutil.resolve_name(reference)

    return load


def tier_type_of_class(name: str, tier_class: type[SecondaryTierManager]) -> TierType:
    """Return `tier_class` as a tier type without a model: the keys of its YAML entry become arguments."""
    description = (tier_class.__doc__ or "").strip().partition("\n")[0]
    return TierType(name, ClassArguments, lambda: tier_class, description)


@dataclass(frozen=True, slots=True)
class PluginReport:
    """A plugin that was loaded, or could not be.

    Args:
        plugin: The name under which it was registered; for an installed plugin, its entry point's name.
        distribution: Its distribution and version; empty if a program registered it.
        tiers: Its tier types.
        error: Why the plugin, or one of its tier types, cannot be used; empty if it can.
    """

    plugin: str
    distribution: str
    tiers: tuple[TierType, ...]
    error: str = ""

    @property
    def origin(self) -> str:
        """The plugin and its distribution, for messages."""
        return f"plugin '{self.plugin}'" + (f" of {self.distribution}" if self.distribution else "")


class TierPlugins:
    """The plugins of one process, or of one test, and their tier types. One thread at a time may call."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(_Hooks)
        self._reports: list[PluginReport] = []

    def load_installed(self) -> None:
        """Load the installed plugins that are not loaded yet. A plugin that fails is logged, reported and left out.

        Raises:
            ResourceError: The system gives no descriptor, thread or memory to load one.
        """
        for entry_point in importlib.metadata.entry_points(group=PROJECT):
            name, found_in = entry_point.name, entry_point.dist
            distribution = f"{found_in.name} {found_in.version}" if found_in else ""
            # An editable installation may be found twice, by its own path and by PYTHONPATH.
            if any((each.plugin, each.distribution) == (name, distribution) for each in self._reports):
                continue
            try:
                tiers = self._tiers_of(entry_point.load(), f"{distribution}:{name}")
            except Exception as error:  # any exception that a third-party module raises when it is imported
                if remedy_of(error):  # it may be loaded later
                    raise ResourceError.of(f"the plugin '{name}' cannot be loaded", error) from error
                report = PluginReport(name, distribution, (), f"{type(error).__name__}: {error}")
                _log.warning("%s cannot be loaded and is left out: %s", report.origin, report.error)
            else:
                report = PluginReport(name, distribution, tiers)
            self._reports.append(report)
            if conflicts := self._conflicts(report):
                _log.warning("%s", conflicts)

    def register(self, plugin: object, name: str | None = None) -> PluginReport:
        """Add a plugin: a module or object with the `tiered_kv_register_tiers` hook.

        Args:
            plugin: The plugin.
            name: Its name in messages; by default its `__name__`, or its class's.

        Raises:
            ConfigError: The plugin is registered already, raises, has no valid tier types, or a name of them is taken.
                Nothing has changed then.
            ResourceError: The system gives no descriptor, thread or memory to load it.
        """
        label = name or str(getattr(plugin, "__name__", type(plugin).__name__))
        try:
            tiers = self._tiers_of(plugin, label)
        except Exception as error:  # any exception of its hook
            if remedy_of(error):
                raise ResourceError.of(f"the plugin '{label}' cannot be used", error) from error
            found = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"plugin '{label}' cannot be used: {found}") from error
        report = PluginReport(label, "", tiers)
        self._reports.append(report)
        if conflicts := self._conflicts(report):
            self.unregister(label)
            raise ConfigError(conflicts)
        return report

    def unregister(self, name: str) -> None:
        """Remove the plugin that was registered as `name`, and its tier types."""
        self._manager.unregister(name=name)
        self._reports = [report for report in self._reports if report.plugin != name]

    def reports(self) -> list[PluginReport]:
        """Return a report of every plugin, in the order they were found, with name conflicts as errors."""
        return [dataclasses.replace(each, error=each.error or self._conflicts(each)) for each in self._reports]

    def tier_types(self) -> dict[str, TierType]:
        """Return the usable tier types by name, sorted; a name of two plugins is not usable."""
        tiers = {tier.name: tier for report in self._reports for tier in report.tiers}
        return {name: tiers[name] for name in sorted(tiers) if not self._conflict(name)}

    def resolve(self, name: str) -> TierType:
        """Return the tier type called `name`, or the one that `name` points to as "module:attribute".

        The attribute is a `TierType`, or a tier's class; a class has no model, so the further keys of its
        YAML entry become arguments of its constructor.

        Raises:
            ConfigError: There is none, or it cannot be used.
        """
        if ":" in name:
            return _from_reference(name)
        tier_type = self.tier_types().get(name)
        if tier_type is None:
            raise ConfigError(self._explain(name))
        return tier_type

    def _explain(self, name: str) -> str:
        """Return why no tier type called `name` can be used, and what to do."""
        if conflict := self._conflict(name):
            return conflict
        broken = [f"; {each.origin} cannot be loaded: {each.error}" for each in self._reports if each.error]
        known, note = list(self.tier_types()), "".join(broken)
        return (
            f"unknown tier type '{name}'{suggestion(name, known)}; known: {', '.join(known) or 'none'}{note}; "
            "install the distribution that brings it, or name a class as 'module:Class'"
        )

    def _tiers_of(self, plugin: object, name: str) -> tuple[TierType, ...]:
        """Register `plugin` with pluggy and return its tier types; on an error it is not registered."""
        try:
            self._manager.register(plugin, name)
        except ValueError as error:  # the same object or name twice
            raise ConfigError(f"it cannot be registered: {error}") from error
        try:
            others = [other for other in self._manager.get_plugins() if other is not plugin]
            hook = self._manager.subset_hook_caller("tiered_kv_register_tiers", remove_plugins=others)
            tiers = tuple(tier for given in hook() for tier in given)
            for tier in tiers:
                if not isinstance(tier, TierType):
                    raise ConfigError(f"it gives {tier!r}, which is no TierType")
            if len({tier.name for tier in tiers}) != len(tiers):
                raise ConfigError("it gives two tier types of one name")
            if not tiers:
                raise ConfigError("it gives no tier type: is its function marked with @hookimpl?")
        except BaseException:
            self._manager.unregister(plugin)
            raise
        return tiers

    def _conflict(self, name: str) -> str:
        """Return an error message if several plugins have a tier type of that name, else ""."""
        origins = [each.origin for each in self._reports if any(tier.name == name for tier in each.tiers)]
        if len(origins) < 2:
            return ""
        return f"tier type '{name}' is registered by {' and '.join(origins)}; uninstall one of them"

    def _conflicts(self, report: PluginReport) -> str:
        return "; ".join(filter(None, (self._conflict(tier.name) for tier in report.tiers)))


@functools.cache
def tier_plugins() -> TierPlugins:
    """Return this process's plugins, the installed ones loaded on the first call."""
    plugins = TierPlugins()
    plugins.load_installed()
    return plugins


class _Hooks:
    @staticmethod
    @hookspec
    def tiered_kv_register_tiers() -> Iterable[TierType]:
        """Return the tier types of this plugin."""
        raise NotImplementedError  # pluggy never calls a specification


def _from_reference(reference: str) -> TierType:
    try:
        target: Any = pkgutil.resolve_name(reference)  # Any: whatever the reference names
    except Exception as error:  # any exception that a third-party module raises when it is imported
        raise ConfigError(f"'{reference}' cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(target, TierType):
        return target
    if not isinstance(target, type):
        raise ConfigError(f"'{reference}' is {target!r}; expected a tier's class or a TierType")
    return tier_type_of_class(target.__name__.lstrip("_"), target)
