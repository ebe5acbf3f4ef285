"""How tiers are found: the pluggy hook, and the plugins that implement it.

A plugin is a module, or any object, with

    @hookimpl
    def tiered_kv_register_tiers() -> Iterable[TierType]: ...

that its distribution names in the entry point group "tiered_kv". The built-in tiers are found in the same way. If a
plugin cannot be loaded, only its own tiers are missing; `TierPlugins.states` says why.

The configuration, the server and the command call it, on any thread. A plugin is imported when its tier type is
asked for, if its entry point has the name of that type. If no entry point has the name, all plugins are imported.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import pkgutil
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from tiered_kv.config.settings import ClassArguments, StorageSettings, TierSettings
from tiered_kv.config.validation import suggestion
from tiered_kv.errors import ConfigError, MissingExtraError, ResourceError, is_too_old, remedy_of
from tiered_kv.metrics.declared import checked_metrics, refuse_conflicts
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import COMMON

if TYPE_CHECKING:
    from tiered_kv.tiering.base import SecondaryTierManager
    from tiered_kv.toolkit.administration import TierAdministration
    from tiered_kv.toolkit.keys_only import KeyStore

PROJECT = "tiered_kv"
"""The pluggy project, and the entry point group, of tier plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks the function of a plugin that returns its tier types."""

REFERENCE = re.compile(r"[\w.]+:[\w.]+")
"""The name of a class; a text of another form, such as a misplaced URL, is never imported."""
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
        is_shared: Whether several processes, and several kinds of blocks, use its storage together. If not, each of
            them has a part of its own: see `TierSettings.part_of_storage`.
        key_store: Imports and returns the class that simulates the tier in `tiered-kv simulate`; by default a cache
            that evicts the least recently used block.
        is_lasting: Whether its blocks outlive the process.
        is_host_client: Whether it is a client of a host's server. That server's own stack cannot have such a tier.
        metrics: The counts that the tier makes itself, and reports by `stats`: each becomes a series
            `tiered_kv_tier_<name>{tier}` of its own. Counts that no type declares share one name.
    """

    name: str
    settings: type[TierSettings]
    load: Callable[[], type[SecondaryTierManager]]
    description: str = ""
    administration: Callable[[], type[TierAdministration]] | None = None
    is_shared: bool = False
    key_store: Callable[[], type[KeyStore]] | None = None
    is_lasting: bool = True
    is_host_client: bool = False
    metrics: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _TYPE_NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot name a tier type: it takes a letter, then letters, digits, '_' and '-'"
            )
        if not (isinstance(self.settings, type) and issubclass(self.settings, TierSettings)):
            raise ConfigError(f"tier type '{self.name}' needs a subclass of TierSettings, not {self.settings!r}")
        if fault := _storage_fault(self.settings):
            raise ConfigError(f"tier type '{self.name}' {fault}")
        if not isinstance(self.description, str) or not self.description.isprintable():
            raise ConfigError(f"tier type '{self.name}' needs a description of one line, not {self.description!r}")
        for flag in ("is_shared", "is_lasting", "is_host_client"):
            if not isinstance(getattr(self, flag), bool):
                raise ConfigError(f"tier type '{self.name}' needs True or False as {flag}, not {getattr(self, flag)!r}")
        for given in (self.load, self.administration or self.load, self.key_store or self.load):
            if not callable(given):
                raise ConfigError(f"tier type '{self.name}' needs a callable that returns a class, not {given!r}")
        try:
            object.__setattr__(self, "metrics", checked_metrics(self.metrics))
        except ConfigError as error:
            raise ConfigError(f"tier type '{self.name}' cannot be used: {error}") from error


def _storage_fault(settings: type[TierSettings]) -> str | None:
    """Return the fault in `storage_settings`, or None. With a wrong name, a storage would not be divided."""
    names = settings.storage_settings
    if not isinstance(names, StorageSettings):
        return f"needs storage_settings as StorageSettings(directory=..., capacity=..., ttl=...), found {names!r}"
    for what, name in names._asdict().items():
        if name != getattr(StorageSettings(), what) and name not in [*settings.model_fields]:
            return f"has no setting {name!r}, which its storage_settings name for {what!r}"
    return None


def imported(
    reference: str, *, library: str = "", extra: str = "", install: str = ""
) -> Callable[[], Any]:  # Any: the class
    """Return a callable that imports and returns a class, such as "package.module:Class", for a `TierType`.

    The callable raises `MissingExtraError` if the `library` that the module needs is not installed, or too old. The
    error names the `extra` of this distribution, or says how to `install` the library of another distribution.
    """

    def load() -> Any:
        if library and importlib.util.find_spec(library) is None:
            raise MissingExtraError(f"tier '{extra or library}'", extra, install=install)
        try:
            return pkgutil.resolve_name(reference)
        except ImportError as error:  # an older release of the library may lack a name
            if extra and is_too_old(extra):
                raise MissingExtraError(f"tier '{extra}'", extra) from error
            raise

    return load


def tier_type_of_class(name: str, tier_class: type[SecondaryTierManager]) -> TierType:
    """Return `tier_class` as a tier type without a model: the keys of its YAML entry become arguments."""
    description = (tier_class.__doc__ or "").strip().partition("\n")[0]
    return TierType(name, ClassArguments, lambda: tier_class, " ".join(description.split()))


@dataclass(frozen=True, slots=True)
class PluginState:
    """A plugin that was loaded, or could not be loaded."""

    plugin: str
    """The name under which it was registered; for an installed plugin, its entry point's name."""
    distribution: str
    """Name and version of the plugin's distribution; empty if a program registered the plugin."""
    tiers: tuple[TierType, ...]
    error: str | None = None  # why the plugin, or one of its tier types, cannot be used; None if all can be used

    @property
    def origin(self) -> str:
        """The plugin and its distribution, for messages."""
        return f"plugin '{self.plugin}'" + (f" of {self.distribution}" if self.distribution else "")


class TierPlugins:
    """The plugins of one process, or of one test, and their tier types.

    Any thread may ask for them. One thread at a time may call `register` and `unregister`.

    Installed plugins, given by their entry points, are loaded when they are needed. A plugin that cannot be loaded is
    logged, reported and left out. But if it calls `sys.exit`, the method that loads it raises `ConfigError`. If the
    system gives no descriptor, thread or memory, the method raises `ResourceError`, and may be called again.
    """

    def __init__(self, installed: Iterable[importlib.metadata.EntryPoint] = ()) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(_Hooks)
        self._lock = threading.RLock()  # held while plugins are loaded: a plugin may register others
        # Entry points not loaded yet. An editable installation may be found twice, by its own path and by PYTHONPATH.
        self._waiting = list({_origin(each): each for each in installed}.values())
        self._states: list[PluginState] = []
        self._referenced: dict[str, TierType] = {}
        """Tier types that were resolved by reference, by the text "module:attribute"."""

    def register(self, plugin: object, name: str | None = None) -> PluginState:
        """Add a plugin: a module or object with the `tiered_kv_register_tiers` hook.

        `name` is for messages; by default it is the plugin's `__name__`, or the name of its class.

        Raises:
            ConfigError: The plugin is registered already, raises an error, or has no valid tier types; or a name of its
                tier types or metrics is taken. Then nothing has changed.
            ResourceError: The system gives no descriptor, thread or memory to load it.
        """
        self._load()
        state = self._read(name or str(getattr(plugin, "__name__", type(plugin).__name__)), "", lambda: plugin)
        if state.error is not None:
            raise ConfigError(f"{state.origin} cannot be loaded: {state.error}")
        self._states.append(state)
        if (conflicts := self._conflicts(state)) is not None:
            self.unregister(state.plugin)
            raise ConfigError(conflicts)
        return state

    def unregister(self, name: str) -> None:
        """Remove the plugin `name`, and its tier types."""
        self._manager.unregister(name=name)
        self._states = [each for each in self._states if each.distribution or each.plugin != name]

    def states(self) -> list[PluginState]:
        """Return the state of every plugin, in the order they were loaded, with name conflicts as errors."""
        self._load()
        return [
            dataclasses.replace(each, error=self._conflicts(each)) if each.error is None else each
            for each in self._states
        ]

    def tier_types(self) -> dict[str, TierType]:
        """Return the usable tier types by name, sorted."""
        self._load()
        names = sorted({tier.name for state in self._states for tier in state.tiers})
        return {name: tier_type for name in names if (tier_type := self._owner(name)[0]) is not None}

    def metrics(self) -> dict[str, Metric]:
        """Return by name the metrics that the found tier types declare, and the ones that several tiers share."""
        return COMMON | {metric.name: metric for tier in self._found() for metric in tier.metrics}

    def resolve(self, name: str) -> TierType:
        """Return the tier type called `name`, or the one that `name` points to as "module:attribute".

        The attribute is a `TierType`, or a tier's class; a class has no model, so the further keys of its
        YAML entry become arguments of its constructor.

        Raises:
            ConfigError: There is no such tier type, or it cannot be used.
        """
        if ":" in name:
            referenced = _from_reference(name)
            self._check_metrics([referenced])
            self._referenced[name] = referenced
            return referenced
        self._load(name)
        if not any(_is_named(state, name) for state in self._states):
            self._load()
        tier_type, conflict = self._owner(name)
        if tier_type is None:
            raise ConfigError(conflict or self._unknown(name))
        return tier_type

    def _unknown(self, name: str) -> str:
        broken = [f"; {each.origin} cannot be loaded: {each.error}" for each in self._states if each.error is not None]
        known, note = list(self.tier_types()), "".join(broken)
        if not known and not _is_installed():
            return (
                f"unknown tier type '{name}': no tier is known here, since tiered_kv was imported from a folder and is "
                f"not installed{note}; install it: pip install {shlex.quote(str(Path(__file__).parents[2]))}"
            )
        return (
            f"unknown tier type '{name}'{suggestion(name, known)}; known: {', '.join(known) or 'none'}{note}; "
            "install the distribution that brings it, or name a class as 'module:Class'"
        )

    def _load(self, name: str | None = None) -> None:
        """Load the plugins with the entry point `name`, by default all, that are not loaded yet."""
        with self._lock:
            for entry_point in [each for each in self._waiting if name in (None, each.name)]:
                state = self._read(*_origin(entry_point), entry_point.load)
                self._waiting = [each for each in self._waiting if each is not entry_point]
                self._states.append(state)
                if state.error is not None:
                    _log.warning("%s cannot be loaded and is left out: %s", state.origin, state.error)
                elif (conflicts := self._conflicts(state)) is not None:
                    _log.warning("%s", conflicts)

    def _read(self, name: str, distribution: str, load: Callable[[], object]) -> PluginState:
        try:
            return PluginState(
                name, distribution, self._tiers_of(load(), f"{distribution}:{name}" if distribution else name)
            )
        except KeyboardInterrupt:
            raise
        except SystemExit as error:  # a signal's handler may raise it, too: the process must not go on as before
            origin = PluginState(name, distribution, ()).origin
            raise ConfigError(f"{origin} ends the process when it is loaded; repair it, or uninstall it") from error
        except BaseException as error:  # a third-party module, or its hook, may raise anything
            if remedy_of(error):  # it may be loaded later
                raise ResourceError.of(f"the plugin '{name}' cannot be loaded", error) from error
            found = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            return PluginState(name, distribution, (), found)

    def _owner(self, name: str) -> tuple[TierType | None, str | None]:
        """Return the tier type of a name, or None if no plugin alone owns it; and a message if several have the name.

        A plugin whose entry point has the name has precedence. So the answer does not depend on the plugins that are
        loaded.
        """
        claims = [(state, tier) for state in self._states for tier in state.tiers if tier.name == name]
        owners = [tier for state, tier in claims if _is_named(state, name)] or [tier for _, tier in claims]
        origins = " and ".join(state.origin for state, _ in claims)
        conflict = f"tier type '{name}' is registered by {origins}; uninstall one of them"
        return owners[0] if len(owners) == 1 else None, conflict if len(claims) > 1 else None

    def _conflicts(self, state: PluginState) -> str | None:
        """Return an error message about the names that `state` claims and other plugins have; None without such."""
        owners = ((tier, *self._owner(tier.name)) for tier in state.tiers)
        return "; ".join(conflict for tier, owner, conflict in owners if owner is not tier and conflict) or None

    def _tiers_of(self, plugin: object, name: str) -> tuple[TierType, ...]:
        """Register `plugin` with pluggy and return its tier types; on an error it is not registered."""
        try:
            self._manager.register(plugin, name)
        except ValueError as error:  # the same object or name was registered twice
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
            self._check_metrics(tiers)
        except BaseException:
            self._manager.unregister(plugin)
            raise
        return tiers

    def _found(self) -> list[TierType]:
        """Return the tier types that were found so far, usable or not."""
        return [*(tier for state in self._states for tier in state.tiers), *self._referenced.values()]

    def _check_metrics(self, tiers: Sequence[TierType]) -> None:
        for tier in tiers:
            others = {f"tier type '{each.name}'": each.metrics for each in (*self._found(), *tiers) if each is not tier}
            refuse_conflicts(f"tier type '{tier.name}'", tier.metrics, others)


def _is_named(state: PluginState, name: str) -> bool:
    """Return whether a plugin's entry point, and one of its tier types, have this name."""
    return bool(state.distribution) and state.plugin == name and any(tier.name == name for tier in state.tiers)


def _is_installed() -> bool:
    try:
        importlib.metadata.distribution("tiered-kv")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def tier_plugins() -> TierPlugins:
    """Return this process's plugins, the installed ones among them."""
    return TierPlugins(importlib.metadata.entry_points(group=PROJECT))


def _origin(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Return the name of an entry point, and its distribution with the version."""
    found_in = entry_point.dist
    return entry_point.name, f"{found_in.name} {found_in.version}" if found_in else ""


class _Hooks:
    @staticmethod
    @hookspec
    def tiered_kv_register_tiers() -> Iterable[TierType]:
        """Return the tier types of this plugin."""
        raise NotImplementedError  # pluggy never calls a specification


def _from_reference(reference: str) -> TierType:
    try:
        target: Any = pkgutil.resolve_name(reference)  # Any: the object that the reference names
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any exception that a third-party module raises when it is imported
        raise ConfigError(f"'{reference}' cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(target, TierType):
        return target
    if not isinstance(target, type):
        raise ConfigError(f"'{reference}' is {target!r}; expected a tier's class or a TierType")
    return tier_type_of_class(target.__name__.lstrip("_"), target)
