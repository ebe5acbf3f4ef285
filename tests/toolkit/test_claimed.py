"""A tier takes an empty directory or its own, and leaves any other directory untouched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.toolkit.claimed import ClaimedDirectory, absolute

MARKER = "marker.json"
FIELDS = {"tier": "test"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def claim(path: Path) -> None:
    directory = ClaimedDirectory(str(path), MARKER, 1, frozenset({"lock"}))
    path.mkdir(mode=0o700, exist_ok=True)
    with directory.opened("open") as fd:
        assert fd is not None
        directory.check(fd)
        directory.mark(fd, FIELDS)
        assert directory.marker(fd) == {"format": 1, **FIELDS}


def test_a_directory_is_claimed_once_and_found_again(path: Path) -> None:
    claim(path)
    claim(path)
    assert os.listdir(path) == [MARKER]


def test_files_that_a_crash_left_before_the_marker_are_tolerated(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "lock").write_text("1")
    (path / f".{MARKER}.{'0' * 16}.tmp").write_text("{")
    (path / "lost+found").mkdir()
    claim(path)


def test_a_foreign_directory_is_refused_and_left_untouched(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("ten years")
    with pytest.raises(FormatError, match=r"not empty and not a directory of this tier \(it holds 'thesis.tex'\)"):
        claim(path)
    assert os.listdir(path) == ["thesis.tex"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tier": "test"}', "\x00\xff", "[" * 100_000], ids=range(6))
def test_a_marker_that_cannot_be_read_is_a_clear_error(path: Path, text: str) -> None:
    claim(path)
    (path / MARKER).write_text(text)
    with pytest.raises(FormatError, match="cannot be read; if the blocks may go, delete the directory"):
        claim(path)


def test_a_path_that_is_no_directory_is_a_clear_error(path: Path) -> None:
    path.write_text("a file")
    directory = ClaimedDirectory(str(path), MARKER, 1, frozenset())
    with pytest.raises(TierUnavailableError, match="kv is a file; give a directory"), directory.opened("open"):
        pass


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free some space on its disk"), (errno.EACCES, "make it writable")]
)
def test_a_directory_that_cannot_be_used_says_what_to_do(path: Path, code: int, remedy: str) -> None:
    path.mkdir(mode=0o700)
    directory = ClaimedDirectory(str(path), MARKER, 1, frozenset())
    with pytest.raises(TierUnavailableError, match=f"{os.strerror(code)}; {remedy}"), directory.opened("open"):
        raise OSError(code, os.strerror(code))


def test_a_path_may_be_relative_or_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert absolute("~/kv") == absolute("kv") == str(tmp_path / "kv")
