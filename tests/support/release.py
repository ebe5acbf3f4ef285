"""Whether this checkout may be released: `python -m tests.support.release TAG`, run by the workflow that publishes.

The tag is `v` and the version. The version's section is the first of docs/CHANGELOG.md and has the date of the release;
a section without a release says `unreleased` there. README.md names the version.
"""

from __future__ import annotations

import datetime
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tiered_kv

ROOT = Path(__file__).parents[2]
UNRELEASED = "unreleased"
HEADINGS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Stored formats")
"""Those of Keep a Changelog, and what each section of ours ends with."""
_HEADING = re.compile(r"^## (\S+) - (\S+)( \[YANKED\])?$")


@dataclass(frozen=True, slots=True)
class Section:
    """What the changelog says of one version."""

    version: tuple[int, ...]
    date: str
    """YYYY-MM-DD, or `unreleased`."""
    text: str

    @property
    def headings(self) -> list[str]:
        return re.findall(r"^### (.+)$", self.text, re.MULTILINE)


def sections_of(changelog: str) -> list[Section]:
    """Return the sections of a changelog, the first one first. Raises ValueError: a heading is none of a version."""
    sections = []
    for part in re.split(r"^(?=## )", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        if (found := _HEADING.match(heading)) is None:
            raise ValueError(f"expected `## VERSION - YYYY-MM-DD` or `## VERSION - {UNRELEASED}`, found {heading!r}")
        if found[2] != UNRELEASED:
            datetime.date.fromisoformat(found[2])
        sections.append(Section(tuple(map(int, found[1].split("."))), found[2], text))
    return sections


def objections(tag: str, version: str, changelog: str, readme: str) -> list[str]:
    """Return why a commit may not be released as `tag`; nothing is no reason."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and the version in tiered_kv/__init__.py {version}")
    first = sections_of(changelog)[0]
    if ".".join(map(str, first.version)) != version:
        found.append(f"the changelog begins with {'.'.join(map(str, first.version))}, not with {version}")
    if first.date == UNRELEASED:
        found.append("the first section of the changelog has no date")
    if not first.headings:
        found.append("the first section of the changelog says nothing")
    if version not in readme:
        found.append(f"README.md does not name {version}")
    return found


def main(tag: str) -> int:
    """Print each objection to a tag, and return 1 if there are any."""
    texts = ((ROOT / name).read_text() for name in ("docs/CHANGELOG.md", "README.md"))
    found = objections(tag, tiered_kv.__version__, *texts)
    print("\n".join(found) or f"{tag} may be released")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
