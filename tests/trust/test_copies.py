"""Copies that are killed, from damaged sources, and to targets that are full, evict, or end: nothing is wrong or lost.

The source is as it was, and a copy that is made again has the same end as one that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.figures import Figures, Profile
from tests.support.places import Place, PlaceOf
from tests.support.tenants import BLOCK_BYTES, Tenant
from tiered_kv.cli.main import main
from tiered_kv.stack.open import open_stack

pytestmark = [pytest.mark.trust, pytest.mark.slow]

BLOCKS = 600
KILLS = (4, 50)
"""In the short and the full profile, of each pair of tiers together."""
WAIT_S = 120.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Tenant:
    source = tenant(tmp_path_factory.mktemp("source"))
    assert source.store(BLOCKS) == BLOCKS
    return source


@pytest.fixture
def unchanged(source: Tenant) -> Iterator[None]:
    before = {path: path.read_bytes() for path in source.path.rglob("*") if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in source.path.rglob("*") if path.is_file()} == before


def tenant(folder: Path, kind: str = "nvme", **settings: object) -> Tenant:
    folder.mkdir(parents=True, exist_ok=True)
    return Place(kind, folder).tenant("alice", **settings)


def copy(source: Tenant, target: Tenant, *options: str) -> tuple[int, dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        status = main(["copy", str(source.file), str(target.file), "--json", *options])
    return status, json.loads(shown.getvalue())


def started(source: Tenant, target: Tenant, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tiered_kv", "copy", str(source.file), str(target.file), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("kind", ["nvme", "fs"])
def test_a_copy_that_is_killed_goes_on_where_it_was(
    kind: str, source: Tenant, tmp_path: Path, profile: Profile, figures: Figures
) -> None:
    draw = random.Random(kind)
    kills = profile.pick(*KILLS) // 2
    partial = 0
    for number in range(kills):
        target = tenant(tmp_path / str(number), kind)
        process = started(source, target, "--rate", "1MiB/s")
        end_s = time.monotonic() + WAIT_S
        while not list(target.path.glob("segment-*" if kind == "nvme" else "*/*/*/*")):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < end_s
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert target.load(BLOCKS)[1] == 0, "no block is wrong after a kill"
        status, done = copy(source, target)
        assert (status, done["copied"] + done["present"], done["ok"]) == (0, BLOCKS, True)
        partial += done["present"] > 0
        assert target.load(BLOCKS) == (BLOCKS, 0), "the end is that of a copy that nothing disturbed"
        assert target.verify()[1]["ok"]
        figures.add("copies", 1, 1)
    assert partial, "no kill came while blocks were copied"


@pytest.mark.usefixtures("unchanged")
def test_ctrl_c_ends_a_copy_after_its_batch(source: Tenant, tmp_path: Path) -> None:
    target = tenant(tmp_path, "fs")
    process = started(source, target, "--rate", "512KiB/s", "--json")
    end_s = time.monotonic() + WAIT_S
    while not list(target.path.glob("*/*/*/*")):
        assert process.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=WAIT_S)
    done = json.loads(out)
    assert (process.returncode, done["interrupted"], done["is_whole"]) == (130, True, False)
    assert copy(source, target)[1]["present"] == done["copied"] > 0
    assert target.load(BLOCKS) == (BLOCKS, 0)


def test_a_source_that_stores_evicts_and_is_killed_gives_right_blocks_only(
    tmp_path: Path, profile: Profile, figures: Figures
) -> None:
    """Segments are written again during the copy: blocks that left are counted, and none is taken for another."""
    tried = 0
    for number in range(profile.pick(1, 5)):
        source = tenant(tmp_path / f"source-{number}", capacity="12MiB")
        source.store(2000)
        target = tenant(tmp_path / f"target-{number}", "fs", capacity="256MiB")
        with contextlib.ExitStack() as ending:
            program = "from tests.support.tenants import store_and_load_until_input as main; main()"
            writer = subprocess.Popen(
                [sys.executable, "-c", program, "alice", str(source.file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            ending.callback(writer.communicate)
            ending.callback(writer.kill)
            assert writer.stdout is not None
            for _ in range(3):
                writer.stdout.readline()
            status, done = copy(source, target, "--rate", "4MiB/s")
            assert writer.poll() is None, "the source goes on"
            assert (status, done["damaged"]) == (0, {})
            writer.kill()
            status, done = copy(source, target)
            assert (status, done["damaged"]) == (0, {})
        came, wrong = target.load(4000)
        assert came > 0
        assert wrong == 0
        tried += 1
    figures.add("copies", tried, tried)


@pytest.mark.usefixtures("unchanged")
def test_a_full_server_refuses_and_takes_the_rest_later(source: Tenant, place_of: PlaceOf, figures: Figures) -> None:
    place = place_of("redis")
    (server,) = place.masters
    target = place.tenant("alice")
    server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.call("CONFIG", "SET", "maxmemory", "3mb")
    status, done = copy(source, target)
    assert status in (1, 2)
    assert done["refused"]
    assert 0 < done["copied"] < BLOCKS
    assert target.load(BLOCKS)[1] == 0
    server.call("CONFIG", "SET", "maxmemory", "0")
    status, again = copy(source, target)
    assert (status, again["present"]) == (0, done["copied"])
    assert target.load(BLOCKS) == (BLOCKS, 0)
    status, back = copy(target, tenant(place.folder / "back"), "--hottest", "1MiB")
    assert (status, back["copied"]) == (0, back["planned"]["blocks"])
    figures.add("copies", 1, 1)


@pytest.mark.usefixtures("unchanged")
def test_a_copy_to_a_target_that_evicts_ends_and_is_right(source: Tenant, tmp_path: Path, figures: Figures) -> None:
    target = tenant(tmp_path, capacity="8MiB")
    target.store(3000, first=10_000)
    for _ in range(3):
        status, done = copy(source, target)
        assert (status, done["is_whole"], done["refused"]) == (0, True, {})
        came, wrong = target.load(BLOCKS)
        assert came > 0
        assert wrong == 0
    with open_stack(target.file) as stack:
        assert target.wrong(stack, target.keys(3000, 10_000))[1] == 0
    figures.add("copies", 1, 1)


@pytest.mark.usefixtures("unchanged")
def test_a_server_that_is_killed_ends_the_copy_and_gets_the_rest_later(
    source: Tenant, place_of: PlaceOf, profile: Profile, figures: Figures
) -> None:
    place = place_of("redis")
    (server,) = place.masters
    target = place.tenant("alice")
    kills = profile.pick(1, 5)
    for _ in range(kills):
        server.call("FLUSHALL")
        process = started(source, target, "--rate", "1MiB/s", "--json")
        end_s = time.monotonic() + WAIT_S
        while len(server.keys("tkv1:*")) < 50:
            assert process.poll() is None
            assert time.monotonic() < end_s
            time.sleep(0.01)
        server.kill()
        out, _ = process.communicate(timeout=WAIT_S)
        done = json.loads(out)
        assert (process.returncode, done["ok"]) in ((2, False), (1, False))
        server.start()
        status, again = copy(source, target)
        assert (status, again["copied"] + again["present"]) == (0, BLOCKS)
        assert target.load(BLOCKS) == (BLOCKS, 0)
    figures.add("copies", kills, kills)


def test_no_flip_of_a_byte_reaches_the_target(tmp_path: Path, profile: Profile, figures: Figures) -> None:
    draw, flips = random.Random(1), profile.pick(10, 200)
    source = tenant(tmp_path / "source")
    source.store(200)
    (segment,) = [path for path in source.path.glob("segment-*") if source.marker in path.read_bytes()]
    sound = segment.read_bytes()
    used = sound.rindex(source.marker) + BLOCK_BYTES
    for number in range(flips):
        data = bytearray(sound)
        data[draw.randrange(used)] ^= 1 << draw.randrange(8)
        segment.write_bytes(data)
        target = tenant(tmp_path / f"target-{number}")
        status, done = copy(source, target)
        assert status in (0, 1, 2)
        if target.path.exists():
            assert target.load(200) == (done["copied"], 0)
    figures.add("copies", flips, flips)
