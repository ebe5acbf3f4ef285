"""A reset that a process of a host asks for is carried out, whatever becomes of the process and of the server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.host_server import BLOCK_BYTES, WAIT_S, Engine, Served, keys_of, serving, stack_of
from tests.support.stacks import PATIENT
from tiered_kv.server.attach import Attachment
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.protocol import Hello
from tiered_kv.server.reset_file import ResetFile, ResetNotes, reset_path
from tiered_kv.server.server import CacheServer
from tiered_kv.system.permissions import check_file
from tiered_kv.testing.control import wait_until

KEYS = keys_of(12)
SETTINGS = {"namespace": {"model": "test"}, "block": {"bytes": BLOCK_BYTES}}


def stack_in(folder: Path, kind: str = "nvme") -> dict[str, object]:
    return stack_of(secondary=[{"type": kind, "path": str(folder / kind), "capacity": "64MiB", **PATIENT}])


def store(served_at: Path) -> None:
    """Store blocks in all tiers, and leave."""
    engine = Engine(f"unix:{served_at}/cache.sock", "stores")
    engine.store(KEYS)
    asked = engine.manager.ask_idle()
    engine.step_until(lambda: engine.manager.is_idle(asked))
    engine.close()


def found(served_at: Path) -> int:
    engine = Engine(f"unix:{served_at}/cache.sock", f"finds-{os.urandom(4).hex()}")
    context = engine.begin()
    count = engine.look_up(KEYS, context)
    engine.end(context)
    engine.close()
    return count


@contextmanager
def attached(served_at: Path, ends: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is attached, and asks for a reset when told; then it ends at once."""
    program = f"""
import os, tiered_kv
stack = tiered_kv.connect("unix:{served_at}/cache.sock")
print("attached", flush=True)
input()
stack.reset_cache()
{ends}
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_a_reset_asked_for_while_the_server_is_away_outlives_its_process(tmp_path: Path) -> None:
    for kind in ("nvme", "fs"):
        folder = tmp_path / kind
        folder.mkdir()
        with serving(folder, stack_in(folder, kind)):
            store(folder)
            attachment = ExitStack()
            process = attachment.enter_context(attached(folder, "os._exit(0)"))
        with attachment:
            process.communicate("\n", timeout=WAIT_S)
        with serving(folder, stack_in(folder, kind)):
            assert found(folder) == 0
            store(folder)
        with serving(folder, stack_in(folder, kind)):
            assert found(folder) == len(KEYS), "it was carried out again"


def test_a_reset_that_ends_with_its_process_reaches_a_server_that_runs(tmp_path: Path) -> None:
    """The server reads nothing of the process any more: not even its message."""
    with serving(tmp_path, stack_in(tmp_path)) as served:
        store(tmp_path)
        path = reset_path(tmp_path / "cache.sock", served.host.config.identity.digest.hex())
        notes = ResetNotes(f"{tmp_path}/cache.sock", SETTINGS)
        notes.note("")
        assert path.exists()
        wait_until(lambda: served.count(lambda host: host.epoch) == 1)
        assert found(tmp_path) == 0


def test_a_program_that_never_attached_can_ask_for_a_reset(tmp_path: Path) -> None:
    with serving(tmp_path, stack_in(tmp_path)):
        store(tmp_path)
    attachment = Attachment(f"unix:{tmp_path}/cache.sock", Hello("early", "scheduler", settings=SETTINGS))
    manager = AttachedManager(attachment)
    manager.reset_cache()
    manager.shutdown()
    with serving(tmp_path, stack_in(tmp_path)):
        assert found(tmp_path) == 0


def test_a_reset_through_both_ways_is_carried_out_once(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        for number in range(1, 4):
            engine.manager.reset_cache()
            engine.step_until(lambda: not engine.manager.server._resets_owed)
            served.server.call_soon(served.host.look_for_resets)
            assert served.count(lambda host: host.epoch) == engine.manager.epoch == number
        engine.store(KEYS)
        assert engine.load(KEYS) == len(KEYS)


@contextmanager
def held(served: Served) -> Iterator[None]:
    """The server's thread reads nothing meanwhile."""
    is_held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        goes_on.wait(WAIT_S)

    served.server.call_soon(hold)
    assert is_held.wait(WAIT_S)
    yield
    goes_on.set()


def test_who_resets_twice_and_stores_at_once_finds_the_blocks(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(keys_of(1, first=20))
        link = engine.manager.server.link
        assert link is not None
        engine.step_until(lambda: len(link.free) >= len(KEYS))
        with held(served):
            engine.manager.reset_cache()
            engine.manager.reset_cache()
            assert engine.store(KEYS) == KEYS
        engine.step_until(lambda: not engine.manager.server._resets_owed)
        assert engine.load(KEYS) == len(KEYS)


def test_a_request_from_before_resets_whose_number_is_lost_with_the_connection_stores_nothing(tmp_path: Path) -> None:
    """Others may have reset the namespace as often as the server has not for this engine."""
    with serving(tmp_path) as served:
        engine, other = served.engine(), served.engine()
        with held(served):
            for each in (engine, other, engine):
                each.manager.reset_cache()
            before = engine.begin()
            engine.manager.poll()
            served.disconnect("scheduler")
        engine.step_until(lambda: engine.manager.server.losses and engine.manager.is_attached)
        assert engine.store(KEYS, before) == []
        assert engine.store(KEYS) == KEYS


def test_blocks_are_found_after_resets_that_the_server_carries_out_as_one(tmp_path: Path) -> None:
    """The server counts fewer resets than the engine: what the engine stores then is none the less of after them."""
    with serving(tmp_path) as served:
        engine, other = served.engine(), served.engine()
        with held(served):
            for each in (engine, other, engine, other, engine):
                each.manager.reset_cache()
        for each in (engine, other):
            each.step_until(lambda each=each: not each.manager.server._resets_owed)  # type: ignore[misc]
        assert served.count(lambda host: host.epoch) < 5
        before, epoch = engine.begin(), engine.manager.epoch
        engine.store(KEYS)
        assert other.load(KEYS) == len(KEYS)
        other.manager.reset_cache()
        other.step_until(lambda: not other.manager.server._resets_owed)
        engine.store(KEYS, before)
        engine.step_until(lambda: engine.manager.epoch > epoch)
        assert engine.load(KEYS) == other.load(KEYS) == 0


def test_an_engine_finds_its_blocks_after_every_restart_of_a_server_that_it_has_reset(tmp_path: Path) -> None:
    engine = Engine(f"unix:{tmp_path}/cache.sock", "resets", settings=SETTINGS)
    for number in range(4):
        for _ in range(number):
            engine.manager.reset_cache()  # no server runs
        with serving(tmp_path):
            engine.step_until(lambda: engine.manager.is_attached)
            assert engine.load(KEYS) == 0
            engine.store(KEYS)
            assert engine.load(KEYS) == len(KEYS)
        engine.step_until(lambda: not engine.manager.is_attached)
    engine.close()


def test_what_is_asked_after_a_reset_of_another_process_finds_nothing_from_before_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        notes = ResetNotes(f"{tmp_path}/cache.sock", SETTINGS)
        for _ in range(8):
            engine.store(KEYS)
            assert engine.load(KEYS) == len(KEYS)
            notes.note("")
            assert engine.load(KEYS) == 0


def test_a_reset_of_another_process_between_the_wait_for_a_lookup_and_its_answer_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        notes = ResetNotes(f"{tmp_path}/cache.sock", SETTINGS)
        engine.store(KEYS)
        read = CacheServer._read

        def note_and_read(self: CacheServer) -> None:
            monkeypatch.setattr(CacheServer, "_read", read)
            notes.note("")
            read(self)

        request = engine.begin()
        with held(served):
            engine.manager.lookup_many(KEYS, request)
            engine.manager.on_schedule_end()
            monkeypatch.setattr(CacheServer, "_read", note_and_read)
        assert engine.look_up(KEYS, request) == 0


def test_a_reset_while_a_server_makes_the_file_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = reset_path(tmp_path / "cache.sock", "ab" * 16)

    def noted_meanwhile(fd: int, name: str) -> os.stat_result:
        status = check_file(fd, name)
        with path.open("ab") as file:
            file.write(b"r")
        return status

    monkeypatch.setattr("tiered_kv.server.reset_file.check_file", noted_meanwhile)
    file = ResetFile(tmp_path / "cache.sock", "ab" * 16)
    assert file.asked() != file.written
    file.close()


def test_what_is_no_file_keeps_no_reset_waiting(tmp_path: Path) -> None:
    os.mkfifo(reset_path(tmp_path / "cache.sock", "ab" * 16))
    asks = threading.Thread(target=ResetNotes(f"{tmp_path}/cache.sock", None).note, args=("ab" * 16,), daemon=True)
    asks.start()
    asks.join(WAIT_S)
    assert not asks.is_alive()


def test_a_server_that_dies_before_its_tiers_have_a_reset_resets_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, serving(tmp_path, stack_in(tmp_path)) as served:
        store(tmp_path)
        patch.setattr(served.host.manager, "reset_cache", lambda: None)  # as one that is killed now
        patch.setattr(type(served.host.manager), "has_saved_reset", False)
        engine = served.engine()
        engine.manager.reset_cache()
        engine.step_until(lambda: engine.manager.server._resets_owed == 0)
    with serving(tmp_path, stack_in(tmp_path)):
        assert found(tmp_path) == 0


@pytest.mark.one_quick(2)
@pytest.mark.parametrize("damage", [b"", b"odd", b"\0" * 7, b"\xff" * 30])
def test_a_damaged_file_counts_as_a_reset(tmp_path: Path, damage: bytes) -> None:
    with serving(tmp_path, stack_in(tmp_path)) as served:
        store(tmp_path)
        path = reset_path(tmp_path / "cache.sock", served.host.config.identity.digest.hex())
    path.write_bytes(damage)
    with serving(tmp_path, stack_in(tmp_path)):
        assert found(tmp_path) == (0 if damage else len(KEYS))  # an empty file is a new one
        store(tmp_path)
    with serving(tmp_path, stack_in(tmp_path)):
        assert found(tmp_path) == len(KEYS)


def test_a_file_that_others_may_control_counts_as_a_reset_and_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, stack_in(tmp_path)) as served:
        store(tmp_path)
        path = reset_path(tmp_path / "cache.sock", served.host.config.identity.digest.hex())
    other = tmp_path / "another name"
    other.hardlink_to(path)
    for _ in range(2):
        with serving(tmp_path, stack_in(tmp_path)):
            assert found(tmp_path) == 0
            store(tmp_path)
    assert f"cannot write to {path}, which is taken for a reset: " in caplog.text
    assert path.samefile(other)
    other.unlink()
    with serving(tmp_path, stack_in(tmp_path)):
        assert found(tmp_path) == len(KEYS)


def test_a_directory_that_cannot_be_written_to_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ResetFile(tmp_path / "none" / "cache.sock", "ab" * 16)
    assert (file.fd, file.asked(), file.written) == (-1, 0, 0)
    notes = ResetNotes(f"{tmp_path}/none/cache.sock", SETTINGS)
    notes.note("")
    notes.note("")
    assert [each.split(":")[0] for each in caplog.messages] == [
        "a reset that is asked for while no server runs is lost when its process ends",
        "a reset is lost if this process ends while no server runs",
    ]


def test_where_the_service_manager_gives_a_directory_it_keeps_resets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    file = ResetFile(tmp_path / "none" / "cache.sock", "ab" * 16)
    assert file.fd >= 0
    file.close()


def test_only_the_last_file_tells_the_number_of_a_reset(tmp_path: Path) -> None:
    first, second = (ResetFile(tmp_path / name, "ab" * 16) for name in ("a.sock", "b.sock"))
    notes = ResetNotes(f"{tmp_path}/a.sock", None)
    notes.adopt(first.fd)
    notes.note("ab" * 16)
    assert notes.number == first.asked() == 1
    notes.adopt(second.fd)
    assert notes.number == 0
    notes.close()
    reset_path(tmp_path / "b.sock", "ab" * 16).unlink()  # as a directory that ends with its service
    notes = ResetNotes(f"{tmp_path}/b.sock", None)
    notes.adopt(second.fd)
    notes.note("ab" * 16)
    third = ResetFile(tmp_path / "b.sock", "ab" * 16)
    assert third.asked() != third.written
    for each in (first, second, third, notes):
        each.close()
