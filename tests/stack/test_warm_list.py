"""The list of the hottest blocks: whole, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.base import OffloadKey
from tiered_kv.errors import FormatError
from tiered_kv.stack.warm_list import read_list, write_list

DIGEST, BLOCK_BYTES = bytes(range(16)), 4096
KEYS = [OffloadKey(b"%d" % number * (1 + number % 5)) for number in range(20)]


def test_a_list_keeps_the_order_and_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "list"
    assert write_list(path, DIGEST, BLOCK_BYTES, KEYS) == len(KEYS)
    assert read_list(path, DIGEST, BLOCK_BYTES) == KEYS
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["list"]


def test_no_file_is_an_empty_list(tmp_path: Path) -> None:
    assert read_list(tmp_path / "none", DIGEST, BLOCK_BYTES) == []


def test_the_hottest_are_kept_where_not_all_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list"
    monkeypatch.setattr("tiered_kv.stack.warm_list.FILE_BYTES_MAX", 100)
    count = write_list(path, DIGEST, BLOCK_BYTES, KEYS)
    assert 0 < count < len(KEYS)
    assert path.stat().st_size <= 100
    assert read_list(path, DIGEST, BLOCK_BYTES) == KEYS[:count]


def test_a_list_of_another_namespace_or_block_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list"
    write_list(path, DIGEST, BLOCK_BYTES, KEYS)
    for digest, block_bytes in ((bytes(16), BLOCK_BYTES), (DIGEST, 2 * BLOCK_BYTES)):
        with pytest.raises(FormatError, match="another namespace"):
            read_list(path, digest, block_bytes)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list"
    with monkeypatch.context() as newer:
        newer.setattr("tiered_kv.stack.warm_list.FORMAT_VERSION", 2)
        write_list(path, DIGEST, BLOCK_BYTES, KEYS)
    with pytest.raises(FormatError, match="format version 2"):
        read_list(path, DIGEST, BLOCK_BYTES)


@given(st.integers(0, 255), st.integers(0, 10_000))
def test_no_changed_byte_and_no_shorter_file_passes(tmp_path_factory: pytest.TempPathFactory, by: int, at: int) -> None:
    path = tmp_path_factory.mktemp("list") / "list"
    write_list(path, DIGEST, BLOCK_BYTES, KEYS)
    data = bytearray(path.read_bytes())
    at %= len(data)
    damaged = bytes(data[:at]) if not by else bytes(data[:at]) + bytes([data[at] ^ by]) + bytes(data[at + 1 :])
    path.write_bytes(damaged)
    with pytest.raises(FormatError):
        read_list(path, DIGEST, BLOCK_BYTES)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link", "."):
        with pytest.raises(FormatError):
            read_list(tmp_path / name, DIGEST, BLOCK_BYTES)


def test_a_block_with_an_endless_key_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "list"
    assert write_list(path, DIGEST, BLOCK_BYTES, [OffloadKey(b"k" * 70_000), *KEYS]) == len(KEYS)
    assert read_list(path, DIGEST, BLOCK_BYTES) == KEYS
