"""What a release needs agrees: the version, the changelog, the tag and the stored formats."""

from __future__ import annotations

import itertools
import re

import pytest

import tiered_kv
from tests.support.release import HEADINGS, ROOT, UNRELEASED, objections, sections_of
from tiered_kv.copying import archive
from tiered_kv.toolkit import epoch, record
from tiered_kv_nvme import layout, saved_index

CHANGELOG = (ROOT / "docs" / "CHANGELOG.md").read_text()
README = (ROOT / "README.md").read_text()
NOTES = "The second one.\n\n### Fixed\n\n- A hit was a miss.\n\n"
RELEASED = f"# Changelog\n\n## 0.2.0 - 2027-01-31\n\n{NOTES}## 0.1.0 - 2026-12-01 [YANKED]\n\n{NOTES}"
FORMATS = {
    "block record": record.FORMAT_VERSION,
    "nvme segment": layout.FORMAT_VERSION,
    "nvme saved index": saved_index._FORMAT_VERSION,
    "epoch mark": epoch.FORMAT_VERSION,
    "archive": archive.FORMAT_VERSION,
}


def test_the_changelog_begins_with_this_version_and_goes_back() -> None:
    sections = sections_of(CHANGELOG)
    assert ".".join(map(str, sections[0].version)) == tiered_kv.__version__
    assert all(newer.version > older.version for newer, older in itertools.pairwise(sections))
    assert UNRELEASED not in {section.date for section in sections[1:]}, "only the next release has no date yet"


def test_the_changelog_has_the_headings_that_readers_know() -> None:
    for section in sections_of(CHANGELOG):
        assert section.headings
        assert section.headings == sorted(section.headings, key=HEADINGS.index)


def test_the_changelog_names_the_formats_that_this_version_writes() -> None:
    formats = sections_of(CHANGELOG)[0].text.partition("### Stored formats\n")[2].lower()
    named = {name.strip(): int(number) for name, number in re.findall(r"([a-z ]+) (\d+)", formats)}
    assert named == FORMATS


def test_this_version_is_refused_only_for_a_date_that_is_not_known_yet() -> None:
    found = objections(f"v{tiered_kv.__version__}", tiered_kv.__version__, CHANGELOG, README)
    assert set(found) <= {"the first section of the changelog has no date"}


def test_a_tag_that_agrees_is_released() -> None:
    assert objections("v0.2.0", "0.2.0", RELEASED, "version 0.2.0") == []


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "readme", "why"),
    [
        ("0.2.0", "0.2.0", RELEASED, "0.2.0", "the tag is 0.2.0"),
        ("v0.2.0", "0.1.0", RELEASED, "0.1.0", "the tag is v0.2.0"),
        ("v0.3.0", "0.3.0", RELEASED, "0.3.0", "begins with 0.2.0"),
        ("v0.2.0", "0.2.0", RELEASED.replace("2027-01-31", UNRELEASED), "0.2.0", "no date"),
        ("v0.2.0", "0.2.0", RELEASED.replace("### Fixed\n", ""), "0.2.0", "says nothing"),
        ("v0.2.0", "0.2.0", RELEASED, "0.1.0", "README.md"),
    ],
)
def test_a_tag_that_does_not_agree_is_refused(tag: str, version: str, changelog: str, readme: str, why: str) -> None:
    assert any(why in each for each in objections(tag, version, changelog, readme))


@pytest.mark.parametrize("heading", ["## 0.2.0", "## 0.2.0 - soon", "## 0.2.0 - 2027-02-30", "## Unreleased"])
def test_a_heading_that_names_no_version_and_date_is_an_error(heading: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        sections_of(f"{heading}\n\n{RELEASED}")
