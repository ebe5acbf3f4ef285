"""The ignored settings: settings and variables that change no byte of a block, so a namespace need not cover them.

`ignored_settings.toml` names them: the file beside an engine's plugin names the engine's settings, the file in this
folder names settings of libraries. `facts` and the plugins' `engine` read the files once, when they are imported. A
setting that no file names counts. So a setting of a new release counts until somebody has looked at it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FILE = "ignored_settings.toml"


@dataclass(frozen=True, slots=True)
class IgnoredSettings:
    """The content of one file. A list or table that the file leaves out is empty."""

    sections: frozenset[str]
    """Sections of settings of which no setting counts."""
    settings: Mapping[str, frozenset[str]]
    """Settings that do not count, by section."""
    counting: Mapping[str, frozenset[str]]
    """Sections of which only these settings count."""
    variables: frozenset[str]
    """Variables of the environment that do not count."""
    packages: frozenset[str]
    """Installed packages that do not count."""

    def counts(self, section: str, name: str) -> bool:
        """Return whether a namespace covers the setting `name` of a section."""
        if section in self.counting:
            return name in self.counting[section]
        return section not in self.sections and name not in self.settings.get(section, ())


def ignored_settings(folder: Path) -> IgnoredSettings:
    """Return the names in the file of `folder`, which is the folder of the calling module."""
    found = tomllib.loads((folder / _FILE).read_text("utf-8"))
    settings, counting = (
        {section: frozenset(names) for section, names in found.get(table, {}).items()}
        for table in ("settings", "counting")
    )
    sections, variables, packages = (frozenset(found.get(key, ())) for key in ("sections", "variables", "packages"))
    return IgnoredSettings(sections, settings, counting, variables, packages)
