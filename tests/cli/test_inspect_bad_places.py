"""`tiered-kv inspect --verify` names the places that the disk cannot read, and `--repair` takes their blocks out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bad_files import BadFiles, BadPlace, bad_files
from tests.support.places import Place
from tests.support.tenants import BLOCK_BYTES, Tenant
from tiered_kv.cli.main import main

__all__ = ["bad_files"]  # a fixture

BLOCKS = 24
PAGE_BYTES = 4096


@pytest.fixture
def alice(request: pytest.FixtureRequest, tmp_path: Path) -> Tenant:
    """A tenant whose tier has blocks."""
    alice = Place(getattr(request, "param", "nvme"), tmp_path).tenant("alice")
    alice.store(BLOCKS)
    return alice


def places_of(alice: Tenant, number: int) -> BadPlace:
    """Return a sector within the stored block of this number."""
    content = alice.content(alice.keys(1, number)[0])
    (found,) = [
        (path, data.index(content))
        for path in alice.path.rglob("*")
        if path.is_file() and content in (data := path.read_bytes())
    ]
    path, begin = found
    return BadPlace(path, begin + BLOCK_BYTES // 2, begin + BLOCK_BYTES // 2 + 512)


@pytest.mark.parametrize("alice", ["nvme", "fs"], indirect=True)
def test_a_place_that_cannot_be_read_is_named_and_its_block_is_taken_out(
    alice: Tenant, bad_files: BadFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = places_of(alice, 7)
    bad_files.reads.append(bad)
    status, found = alice.verify()
    assert (status, found["damaged"], found["blocks"], found["unreadable"]) == (1, {"bad_place": 1}, BLOCKS, {})
    (named,) = found["named"]
    assert named["reason"] == "bad_place"
    assert str(bad.path) in named["name"]
    status, found = alice.verify("--repair")
    assert (status, found["repaired"]) == (0, 1)
    status, found = alice.verify()
    assert (status, found["damaged"], found["blocks"]) == (0, {}, BLOCKS - 1)
    assert alice.load(BLOCKS) == (BLOCKS - 1, 0)


def without_summary(alice: Tenant) -> Path:
    """Return the segment with blocks, as a crash leaves it: its batches are read one after another."""
    (path,) = [path for path in alice.path.glob("segment-*") if alice.content(alice.keys(1)[0]) in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[-PAGE_BYTES:] = bytes(PAGE_BYTES)
    path.write_bytes(data)
    return path


def test_a_bad_place_in_a_segment_without_a_summary_is_named_and_ends_it(alice: Tenant, bad_files: BadFiles) -> None:
    path = without_summary(alice)
    bad_files.reads.append(places_of(alice, BLOCKS - 1))
    status, found = alice.verify()
    assert (status, found["damaged"]) == (1, {"bad_place": 1})
    assert f"{path}, from byte" in found["named"][0]["name"]
    status, found = alice.verify("--repair")
    assert (status, found["repaired"]) == (0, 1)
    assert alice.verify()[:1] == (0,)
    loaded, wrong = alice.load(BLOCKS)
    assert (loaded < BLOCKS, wrong) == (True, 0)
    assert alice.store(BLOCKS) == BLOCKS
    assert alice.load(BLOCKS) == (BLOCKS, 0)


def test_a_summary_that_cannot_be_read_is_named_and_its_repair_costs_no_block(
    alice: Tenant, bad_files: BadFiles
) -> None:
    bad = places_of(alice, 7)
    size = bad.path.stat().st_size
    bad_files.reads.append(BadPlace(bad.path, size - PAGE_BYTES, size))
    status, found = alice.verify()
    assert (status, found["damaged"], found["blocks"]) == (1, {"bad_place": 1}, BLOCKS + 1)
    assert str(bad.path) in found["named"][0]["name"]
    assert alice.verify("--repair")[0] == 0
    bad_files.reads.clear()  # a disk replaces a place when it is written
    assert alice.verify()[0] == 0
    assert alice.load(BLOCKS) == (BLOCKS, 0)


def test_a_header_that_cannot_be_read_is_named(alice: Tenant, bad_files: BadFiles) -> None:
    path = without_summary(alice)
    bad_files.reads.append(BadPlace(path, 0, 512))
    status, found = alice.verify()
    assert (status, found["damaged"]) == (1, {"bad_place": 1})
    assert str(path) in found["named"][0]["name"]
    assert alice.verify("--repair")[0] == 0
    assert not path.exists()
    assert alice.store(BLOCKS) == BLOCKS


def files_of_blocks(alice: Tenant) -> list[Path]:
    """Return all files but nvme's saved index, which a repair deletes: the next opening builds it anew."""
    return sorted(path for path in alice.path.rglob("*") if path.is_file() and path.name != "index")


@pytest.mark.parametrize("every", [21, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("alice", ["nvme", "fs"], indirect=True)
def test_of_a_disk_that_is_away_no_repair_takes_a_block_out(alice: Tenant, bad_files: BadFiles, every: int) -> None:
    files = files_of_blocks(alice)
    for transfers in range(0, 64, every):  # it goes away later and later
        bad_files.transfers_before = transfers
        bad_files.reads.append(BadPlace(alice.path))
        alice.inspect("--verify", "--repair")
        bad_files.reads.clear()
        assert files_of_blocks(alice) == files
    assert bad_files.refused
    assert alice.load(BLOCKS) == (BLOCKS, 0)


def test_segments_that_refused_a_write_are_counted(
    alice: Tenant, bad_files: BadFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = [path for path in alice.path.glob("segment-*") if alice.content(alice.keys(1)[0]) in path.read_bytes()]
    bad_files.writes.append(BadPlace(path, PAGE_BYTES, path.stat().st_size))
    assert alice.store(BLOCKS + 8) == BLOCKS + 8
    assert alice.inspect()[1]["segments"]["left_out"] == 1
    capsys.readouterr()
    assert main(["inspect", str(alice.file)]) == 0
    assert "1 segments have a place that refused a write" in capsys.readouterr().out
