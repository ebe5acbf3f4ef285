"""The shared part of the engines' plugins: the releases that each accepts, imports on first use, settings, facts of a
model.

Each engine has a plugin, `tiered_kv_vllm` and so on, which only users of that engine import. The plugins call these
functions, on any thread; no function keeps state.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiered_kv.errors import ConfigError


def checked_version(package: str, name: str, tested: Sequence[str], *, parts: int = 2) -> str:
    """Return an engine's installed version if it is a tested one. `TIERED_KV_ANY_VLLM=1`, and so on, accepts any.

    Args:
        package: The engine's top-level module, with a `__version__`.
        name: The engine's name in messages.
        tested: The versions that the tests ran with.
        parts: How many parts of a version must be as in a tested one; `post1` is the fourth of `0.5.23.post1`.
    """
    known = " and ".join(tested)
    try:
        version = str(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        are = "are" if len(tested) > 1 else "is"
        raise ConfigError(
            f"tiered_kv_{package} needs {name} ({known} {are} tested), and it is not installed here"
        ) from None
    variable = f"TIERED_KV_ANY_{package.upper()}"
    found, *accepted = [each.partition("+")[0].split(".")[:parts] for each in (version, *tested)]
    if found in accepted or os.environ.get(variable) == "1":
        return version
    raise ConfigError(
        f"{name} {version} is installed, and this tiered_kv was tested with {known}. Its offloading interfaces change "
        f"between releases: install a tested version, or another tiered_kv, or set {variable}=1 to try"
    )


def imported_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports each class from its module in `modules` when it is first used."""

    def get_attribute(name: str) -> Any:  # Any: one of the classes
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get_attribute
