"""Which releases of an engine an integration takes."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterable, Sequence

from tiered_kv.errors import ConfigError


def checked_version(package: str, name: str, tested: Sequence[str], *, parts: int = 2) -> str:
    """Return the version of an engine that is installed. `TIERED_KV_ANY_VLLM=1`, and so on, lets any version through.

    Args:
        package: What is imported, and has a `__version__`.
        name: What people call the engine.
        tested: The versions that the integration's tests run.
        parts: How many parts of a version must be as tested; a fourth is that of `0.5.23.post1`.

    Raises:
        ConfigError: There is none, or its interfaces are not known here.
    """
    integration = f"tiered_kv.integrations.{package}"
    known = " and ".join(tested)
    are = "are" if len(tested) > 1 else "is"
    try:
        version = str(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(f"{integration} needs {name} ({known} {are} tested), and it is not installed here") from None
    variable = f"TIERED_KV_ANY_{package.upper()}"
    numbers = [each.partition("+")[0].split(".")[:parts] for each in (version, *tested)]
    if numbers[0] in numbers[1:] or os.environ.get(variable) == "1":
        return version
    one_of = "one of these" if len(tested) > 1 else "that"
    raise ConfigError(
        f"{name} {version} is installed, and this tiered_kv was tested with {known}. Its offloading interfaces change "
        f"between releases: install {one_of}, or another tiered_kv, or set {variable}=1 to try"
    )


def installed_versions(packages: Iterable[str]) -> str:
    """Return those of some packages that are installed, with their versions, or "none"."""
    versions = []
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(versions) or "none"
