"""The eviction policies by name: the built-in ones, and the policies of other distributions.

A distribution names the class of a policy in the entry point group `POLICIES`, by the name that a stack's file gives.
The built-in policies are entry points too, of this module. The class is imported when a primary tier is made. Any
thread may call. What must stay true: no distribution takes the name of a built-in policy, and a broken policy fails
only a stack that names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from tiered_kv.config.validation import suggestion
from tiered_kv.errors import ConfigError, remedy_of

POLICIES: Final = "tiered_kv.policies"
"""The entry point group."""
BUILT_IN_POLICIES: Final = {
    "lru": "tiered_kv.cpu.policies.recency:LRUPolicy",
    "arc": "tiered_kv.cpu.policies.recency:ARCPolicy",
    "density": "tiered_kv.cpu.policies.density:DensityPolicy",
}
_BUILT_IN: Final = [EntryPoint(name, reference, POLICIES) for name, reference in BUILT_IN_POLICIES.items()]
LOCATION: Final = "primary.policy"  # the setting that names the policy, for messages


@dataclass(frozen=True, slots=True)
class FoundPolicy:
    """A policy that was found, whether it can be used or not."""

    name: str
    distribution: str  # and its version; empty for a built-in policy
    description: str = ""
    error: str = ""  # why it cannot be used; empty if it can

    @property
    def origin(self) -> str:
        """The policy and its distribution, for messages."""
        return f"policy '{self.name}'" + (f" of {self.distribution}" if self.distribution else "")


class Policies:
    """The policies of one process, or of one test; `installed` has the policies of other distributions."""

    def __init__(self, installed: Iterable[EntryPoint] = ()) -> None:
        # An editable installation may be found twice, by its own path and by PYTHONPATH.
        others = {(each.name, _distribution(each), each.value): each for each in installed}
        self._entry_points = [*_BUILT_IN, *(others[key] for key in sorted(others))]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(each.name for each in self._entry_points))

    def load(self, name: str) -> object:
        """Import and return the object of this name, which should be a class.

        Raises:
            ConfigError: There is no such policy, or several distributions have one. An exception of the import, of any
                kind, is not caught.
        """
        found = [each for each in self._entry_points if each.name == name]
        if not found:
            raise ConfigError(
                f"there is no policy {name!r}{suggestion(name, self.names)}; known are {', '.join(self.names)}; "
                "install the distribution that brings it, or give 'module:Class'",
                location=LOCATION,
            )
        if name in BUILT_IN_POLICIES:
            return found[0].load()
        if len(found) > 1:
            raise ConfigError(_conflict(name, found), location=LOCATION)
        return found[0].load()

    def found(self) -> list[FoundPolicy]:
        """Import all policies and return how each was found."""
        return [self._found(each) for each in self._entry_points]

    def _found(self, entry_point: EntryPoint) -> FoundPolicy:
        name, distribution = entry_point.name, _distribution(entry_point)
        rivals = [each for each in self._entry_points if each.name == name]
        if len(rivals) > 1 and entry_point not in _BUILT_IN:
            taken = f"'{name}' is a built-in policy; give yours another name"
            error = taken if name in BUILT_IN_POLICIES else _conflict(name, rivals)
            return FoundPolicy(name, distribution, error=error)
        try:
            loaded = entry_point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any exception that a third-party module raises, SystemExit too
            if remedy_of(error):
                raise
            return FoundPolicy(name, distribution, error=f"{type(error).__name__}: {error}")
        if not callable(loaded):
            return FoundPolicy(name, distribution, error=f"it names {loaded!r:.80}, which is no class of a policy")
        return FoundPolicy(name, distribution, (inspect.getdoc(loaded) or "").partition("\n")[0])


def _conflict(name: str, found: Iterable[EntryPoint]) -> str:
    origins = " and ".join(_distribution(each) for each in found)
    return f"policy '{name}' is registered by {origins}; uninstall one of them"


def _distribution(entry_point: EntryPoint) -> str:
    found_in = entry_point.dist
    return f"{found_in.name} {found_in.version}" if found_in else ""


@functools.cache
def policies() -> Policies:
    """Return this process's policies, the installed ones among them."""
    return Policies(entry_points(group=POLICIES))
