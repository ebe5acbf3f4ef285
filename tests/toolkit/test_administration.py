"""Directories are claimed, their surveys count in bounded memory, and records are judged without their keys."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.reasons import RecordStatus
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.administration import NAMESPACES_MAX, Ages, RecordCheck, Verification, block_bytes_in
from tiered_kv.toolkit.census import Census
from tiered_kv.toolkit.claimed import ClaimedDirectory, absolute
from tiered_kv.toolkit.codecs import PLAIN
from tiered_kv.toolkit.record import digest_of, encode_record

DIGEST = bytes(range(16))


@pytest.mark.parametrize("ages_s", [[7.0], [-3.0], [5.0, 1.0, 0.0, 9.0, 2.0]])
def test_of_many_ages_the_oldest_and_the_newest_are_kept(ages_s: list[float]) -> None:
    census = Census()
    for age_s in ages_s:
        census.add("ab" * 16, 1, written_s=age_s)
    (found,) = census.survey(lambda digest: {}).namespaces
    clipped = [max(0.0, age_s) for age_s in ages_s]
    assert (found.written, found.used) == (Ages(max(clipped), min(clipped)), None)


def test_further_namespaces_and_foreign_names_are_only_counted() -> None:
    census = Census()
    for number in range(NAMESPACES_MAX + 10):
        census.add(f"{number:032x}", 2)
    survey = census.survey(lambda digest: {})
    assert len(survey.namespaces) == NAMESPACES_MAX
    assert survey.foreign is not None
    assert (survey.foreign.entries, survey.foreign.size_bytes, len(survey.foreign.names)) == (10, 20, 8)


def test_one_unknown_size_makes_the_sum_unknown() -> None:
    census = Census()
    for size_bytes in (1, None, 1):
        census.add("ab" * 16, size_bytes)
    (found,) = census.survey(lambda digest: {}).namespaces
    assert (found.blocks, found.size_bytes) == (3, None)


@pytest.mark.parametrize("block_bytes", [4096, None])
def test_a_record_is_checked_without_its_key(block_bytes: int | None) -> None:
    (key, other) = make_keys(2)
    header, payload = encode_record(key, memoryview(bytes(4096)), DIGEST)
    record = memoryview(bytearray(header + payload))
    check = RecordCheck(DIGEST, PLAIN, block_bytes)
    assert check.check(record) is RecordStatus.OK
    assert check.check(record, digest_of(key)) is RecordStatus.OK
    assert check.check(record, digest_of(other)) is RecordStatus.WRONG_KEY
    assert RecordCheck(bytes(16), PLAIN, block_bytes).check(record) is RecordStatus.WRONG_NAMESPACE
    assert check.check(record[:-1]) is RecordStatus.TRUNCATED
    record[2000] ^= 1
    assert check.check(record) is RecordStatus.BAD_CHECKSUM
    assert check.room(1 << 40) is None


@pytest.mark.parametrize("size", [0, -1, True, 1e99, "4096", None, 1 << 60])
def test_an_impossible_size_of_blocks_is_none(size: object) -> None:
    assert block_bytes_in({"block": {"bytes": size}}) is None
    assert block_bytes_in({"block": size}) is None


@pytest.mark.parametrize("repairs", [False, True])
def test_only_damaged_blocks_are_to_be_deleted_and_only_if_wished(repairs: bool) -> None:
    found = Verification(block_bytes=4096, repairs=repairs)
    kept: list[RecordStatus | str] = [RecordStatus.OK, RecordStatus.UNKNOWN_KEY, RecordStatus.UNENCRYPTED, "io_error"]
    assert not any(found.note(status, 10) for status in kept)
    assert found.ok
    assert found.note(RecordStatus.BAD_CHECKSUM, 10) is repairs
    assert not found.ok
    assert (found.blocks, found.size_bytes, found.damaged) == (5, 50, {"checksum": 1})
    assert found.unreadable == {"unknown_key": 1, "unencrypted": 1, "io_error": 1}


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
