"""Programs put and get blocks of a host's cache."""

from __future__ import annotations

import asyncio
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiered_kv
from tests.support.faulty import FourMethodTier
from tests.support.host_server import (
    BLOCK_BYTES,
    WAIT_S,
    keys_of,
    server_process,
    serving,
    stack_of,
    unmapping_hangs,
)
from tests.support.stacks import PATIENT
from tiered_kv.base import make_offload_key
from tiered_kv.cli.main import main
from tiered_kv.errors import ConfigError
from tiered_kv.server import connect, protocol, server
from tiered_kv.server.protocol import Hello, Welcome
from tiered_kv.stack.exporters.event_messages import hashes_of
from tiered_kv.testing.control import wait_until

HASHES = [number.to_bytes(16, "big") for number in range(24)]
BLOCKS = np.arange(24 * BLOCK_BYTES, dtype=np.uint32).astype(np.uint8).reshape(24, BLOCK_BYTES)


def test_a_program_gets_what_another_has_put(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    with (
        serving(tmp_path, stack_of(secondary=[nvme])) as served,
        tiered_kv.connect(served.address) as first,
        tiered_kv.connect(served.address) as second,
    ):
        assert first.put(HASHES, BLOCKS, timeout=WAIT_S) == 24
        assert first.flush(WAIT_S)
        assert second.contains(HASHES, WAIT_S) == 24
        assert second.contains([b"absent"]) == 0
        assert second.prefetch(HASHES, WAIT_S) == 24
        assert (second.get(HASHES, timeout=WAIT_S) == BLOCKS).all()
        second.reset_cache()
        wait_until(lambda: first.epoch == 1)
        assert len(first.get(HASHES)) == 0


def test_long_keys_have_their_names_in_events() -> None:
    keys = [make_offload_key(bytes(protocol.KEY_BYTES_MAX) + each, 3) for each in HASHES]
    names = connect.names_of(keys)
    assert not set(names) & set(keys)
    assert hashes_of(names)[3].tolist() == hashes_of(keys)[3].tolist() == list(range(24))


def store_all_but_the_first(stack: connect.HostStack) -> None:
    """Store blocks that have left the 64 rows of the primary tier."""
    assert stack.put(HASHES[1:], BLOCKS[1:]) == 23
    assert stack.flush(WAIT_S)  # blocks that a tier still stores are not evicted
    for number in range(5):  # they evict the first
        assert stack.put([b"%d %14d" % (number, each) for each in range(24)], BLOCKS, timeout=WAIT_S) == 24
    assert stack.flush(WAIT_S)


def test_blocks_behind_a_missing_one_are_not_loaded(tmp_path: Path) -> None:
    memory = {"type": "memory", "capacity": "1MiB", **PATIENT}
    with serving(tmp_path, stack_of(rows=64, secondary=[memory])) as served, tiered_kv.connect(served.address) as stack:
        store_all_but_the_first(stack)
        assert len(stack.get(HASHES, timeout=WAIT_S)) == 0
        assert stack.prefetch([HASHES[1], bytes(16), *HASHES[2:]], timeout=WAIT_S) == 1
        assert stack.flush(WAIT_S)
        assert served.count(lambda host: host.stack.counters()["memory"]["loaded_blocks_total"]) == 1
        assert (stack.get(HASHES[1:9], timeout=WAIT_S) == BLOCKS[1:9]).all()


def test_a_missing_block_ends_the_prefix_for_its_later_parts(tmp_path: Path) -> None:
    memory = {"type": "memory", "capacity": "1MiB", **PATIENT}
    with serving(tmp_path, stack_of(rows=64, secondary=[memory])) as served, tiered_kv.connect(served.address) as stack:
        store_all_but_the_first(stack)
        engine, keys = served.engine(), [make_offload_key(each, 0) for each in HASHES]
        context = engine.begin()
        engine.step_until(lambda: engine.manager.lookup_prefix(keys[:2], context) == [False] * 2)
        engine.step_until(lambda: engine.manager.lookup_prefix(keys, context) == [False] * 24)
        engine.end(context)
        assert stack.flush(WAIT_S)
        assert served.count(lambda host: host.stack.counters()["memory"]["loaded_blocks_total"]) == 0


def test_keys_may_be_longer_than_a_message_allows(tmp_path: Path) -> None:
    hashes = [bytes(protocol.KEY_BYTES_MAX) + each for each in HASHES]
    with serving(tmp_path) as served, tiered_kv.connect(served.address) as stack:
        assert stack.put(hashes, BLOCKS, timeout=WAIT_S) == 24
        assert stack.contains(hashes, WAIT_S) == 24
        assert (stack.get(hashes, timeout=WAIT_S) == BLOCKS).all()
        assert stack.is_attached


def test_neither_side_polls_for_what_the_other_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_TICK_S", WAIT_S)
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    with (
        serving(tmp_path, stack_of(rows=64, secondary=[nvme]), answer_s=2 * WAIT_S) as served,
        tiered_kv.connect(served.address) as stack,
    ):
        assert stack.put(HASHES, BLOCKS, timeout=WAIT_S) == 24
        for number in range(5):  # they evict the first
            assert stack.put([b"%d %d" % (number, each) for each in range(24)], BLOCKS, timeout=WAIT_S) == 24
        assert stack.flush(WAIT_S)
        monkeypatch.setattr(connect, "AWAIT_S", WAIT_S)
        assert (stack.get(HASHES[:8], timeout=WAIT_S) == BLOCKS[:8]).all()


def test_a_put_without_room_does_not_keep_the_server_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, stack_of(16)) as served:
        for number in range(2):  # they have all the rows that a server grants
            engine = served.engine()
            context, keys = engine.begin(), keys_of(4, 100 * number)
            engine.step_until(lambda: engine.manager.prepare_store(keys, context) is not None)  # noqa: B023
        asked = []
        prepare = connect.ProgramManager.prepare_store

        def counted(*arguments: Any) -> Any:  # Any: as `prepare_store`
            asked.append(arguments)
            return prepare(*arguments)

        monkeypatch.setattr(connect.ProgramManager, "prepare_store", counted)
        with tiered_kv.connect(served.address) as stack:
            assert stack.put(keys_of(1, 900), bytes(BLOCK_BYTES), timeout=0.3) == 0
    assert len(asked) < 1000  # 3,000 if each refusal were answered by another question


def test_a_put_that_a_server_does_not_answer_counts_no_block(tmp_path: Path) -> None:
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_go_on.wait()

    with serving(tmp_path, answer_s=1.0) as served, tiered_kv.connect(served.address) as stack:
        served.server.call_soon(hold)
        assert is_held.wait(WAIT_S), "it would answer before that"
        try:
            assert stack.put(HASHES, BLOCKS, timeout=WAIT_S) == 0
        finally:
            may_go_on.set()


def test_no_call_waits_while_the_memory_of_a_dead_server_is_unmapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
    with stack, unmapping_hangs(monkeypatch):
        assert len(stack.get(HASHES)) == 0


def test_an_asyncio_program_awaits_the_calls(tmp_path: Path) -> None:
    async def use(address: str) -> int:
        async with tiered_kv.AsyncStack(tiered_kv.connect(address)) as stack:
            await stack.put(HASHES, BLOCKS)
            found = await asyncio.gather(*(stack.get(HASHES, timeout=WAIT_S) for _ in range(4)))
            return sum(len(each) for each in found)

    with serving(tmp_path) as served:
        assert asyncio.run(use(served.address)) == 4 * 24


@pytest.mark.parametrize("other", [{"namespace": {"model": "other"}}, {"block": {"bytes": 2 * BLOCK_BYTES}}])
def test_a_program_uses_no_server_of_another_namespace(
    tmp_path: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
    with stack:
        wait_until(lambda: not stack.is_attached or not stack.put(HASHES, BLOCKS))
        with serving(tmp_path, stack_of(**other)):
            wait_until(lambda: stack.contains(HASHES) or stack.is_attached or "connect anew" in caplog.text)
            assert not stack.is_attached
            assert stack.put(HASHES, BLOCKS) == 0
        with serving(tmp_path):
            wait_until(lambda: stack.put(HASHES, BLOCKS) == 24)


def test_a_program_stores_all_it_says_after_a_larger_server_has_gone(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
    with stack, serving(tmp_path, stack_of(rows=64)):
        wait_until(lambda: stack.put(HASHES, BLOCKS) == 24)
        assert stack.contains(HASHES, WAIT_S) == 24


def test_without_a_server_nothing_is_found_and_nothing_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(tiered_kv.TierUnavailableError, match="No such file or directory; start 'tiered-kv serve"):
        tiered_kv.connect(f"unix:{tmp_path}/none.sock")
    assert not caplog.records  # the error says it all
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
        stack.put(HASHES, BLOCKS)
    with stack:
        wait_until(lambda: not stack.put(HASHES, BLOCKS))
        assert len(stack.get(HASHES)) == 0
        with serving(tmp_path):
            wait_until(lambda: stack.put(HASHES, BLOCKS) == 24)
            assert (stack.get(HASHES, timeout=WAIT_S) == BLOCKS).all()
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert any("every block is a miss" in each for each in told)
    assert any("attached to the host's cache" in each for each in told)


@pytest.mark.parametrize("given", [{"namespace": {"model": "m"}}, {"block": {"bytes": BLOCK_BYTES}}])
def test_a_program_gives_namespace_and_block_together(tmp_path: Path, given: Any) -> None:
    with serving(tmp_path) as served, pytest.raises(ConfigError, match="give namespace and block together"):
        tiered_kv.connect(served.address, **given)


def test_a_server_that_cannot_open_its_stack_leaves_no_socket(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("primary: {capacity: 1MiB}\nnamespace: {model: m}\n")
    assert main(["serve", str(tmp_path / "stack.yaml"), "--socket", str(tmp_path / "cache.sock")]) == 2
    assert not (tmp_path / "cache.sock").exists()


class Hanging(FourMethodTier):
    """Is being opened."""

    def __init__(self, *_: object, **__: object) -> None:
        print("opening", flush=True)
        time.sleep(WAIT_S)


@pytest.mark.slow
def test_a_server_that_is_ended_while_it_opens_its_stack_leaves_no_socket(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(json.dumps(stack_of(secondary=[{"type": f"{__name__}:Hanging"}])))
    command = [sys.executable, "-m", "tiered_kv", "serve", f"{tmp_path}/stack.yaml", "--socket", f"{tmp_path}/a.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "opening\n"
        assert (tmp_path / "a.sock").is_socket()
        process.terminate()
        # The second, if its main thread is held up for so long that another thread ends it.
        assert process.wait(WAIT_S) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert not (tmp_path / "a.sock").exists()


def test_a_refusal_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file: dict[str, object] = {"primary": {"capacity": "1MiB"}}
    with serving(tmp_path, file) as served, pytest.raises(ConfigError, match="2 settings cannot be used"):
        tiered_kv.connect(served.address, namespace={"model": "m", "odd": 1}, block={"bytes": -1})
    (said,) = [each for each in caplog.messages if "loses its connection" in each]
    assert re.search(r"2 settings cannot be used: .*odd.*block.bytes|2 settings .*block.bytes.*odd", said)
    assert "\n" not in said


@pytest.mark.slow
def test_what_is_put_while_a_server_is_stopped_is_there_when_it_goes_on(tmp_path: Path) -> None:
    with server_process(tmp_path) as process, tiered_kv.connect(f"unix:{tmp_path}/cache.sock") as stack:
        assert stack.put(HASHES[:8], BLOCKS[:8]) == 8
        process.send_signal(signal.SIGSTOP)
        assert stack.put(HASHES[8:16], BLOCKS[8:16]) == 8, "it has granted rows"
        assert stack.contains(HASHES[:16], timeout=WAIT_S) == 0  # after a second
        assert stack.put(HASHES[16:], BLOCKS[16:]) == 0
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: stack.is_attached or stack.contains(HASHES))
        assert (stack.get(HASHES, timeout=WAIT_S) == BLOCKS[:16]).all()


def test_a_server_takes_no_path_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "stack.yaml", "--socket", str(tmp_path)]) == 2
    assert f"cannot listen at {tmp_path}: it is no socket; give another path" in capsys.readouterr().err


def test_a_server_without_the_directory_of_its_socket_says_to_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("version: 1\nprimary: {capacity: 1MiB}\n")
    assert main(["serve", str(stack), "--socket", f"{tmp_path}/missing/cache.sock"]) == 2
    assert f"there is no directory {tmp_path}/missing; make it, or give another path" in capsys.readouterr().err


def test_a_program_without_calls_lets_the_memory_of_its_server_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.server.idle._PAUSE_S", 0.01)
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
    with stack:
        wait_until(lambda: not stack.region.array.size)


@contextmanager
def older_server(path: Path, welcome: dict[str, object]) -> Iterator[None]:
    """Answer each HELLO with `welcome`, as a server of another release."""
    body, over = json.dumps(welcome).encode(), threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(0.05)
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            while not over.is_set():
                with suppress(TimeoutError), listener.accept()[0] as sock:
                    sock.recv(1 << 16)
                    sock.send(protocol.HEADER.pack(protocol.WELCOME, 0, 0, 0, len(body)) + body)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            path.unlink()


@pytest.mark.parametrize(
    ("welcome", "message"),
    [
        ({"version": protocol.VERSION}, r"does not say instance, namespace, .*: upgrade the server"),
        ({"version": protocol.VERSION_MIN - 1}, r"speaks version 0, this process 1 to 1: upgrade the server"),
    ],
)
def test_a_server_of_another_release_is_an_error_that_says_what_to_do(
    tmp_path: Path, welcome: dict[str, object], message: str
) -> None:
    with older_server(tmp_path / "cache.sock", welcome), pytest.raises(ConfigError, match=message):
        tiered_kv.connect(f"unix:{tmp_path}/cache.sock")


def test_a_server_serves_a_newer_client_and_refuses_an_older_one(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert served.engine(version=protocol.VERSION + 1).store(keys_of(4)) == keys_of(4)
        with pytest.raises(ConfigError, match="version 0, the server 1 to 1: upgrade tiered-kv in the engine's"):
            served.engine(version=protocol.VERSION_MIN - 1)


@pytest.mark.parametrize("is_newer", [False, True])
def test_an_engine_goes_on_with_misses_while_a_server_of_another_release_is_there(
    tmp_path: Path, is_newer: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.sock"
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
        assert stack.put(HASHES, BLOCKS, timeout=WAIT_S) == 24
    with stack:
        with ExitStack() as there, monkeypatch.context() as replaced:
            if is_newer:
                replaced.setattr(protocol, "VERSION_MIN", protocol.VERSION + 1)  # it has left ours behind
                there.enter_context(serving(tmp_path))
            else:
                path.unlink()
                there.enter_context(older_server(path, {"version": protocol.VERSION_MIN - 1}))
            wait_until(lambda: not stack.put(HASHES, BLOCKS) and "upgrade" in caplog.text)
            assert stack.contains(HASHES) == 0
        with serving(tmp_path):
            wait_until(lambda: stack.put(HASHES, BLOCKS) == 24)
            assert (stack.get(HASHES, timeout=WAIT_S) == BLOCKS).all()


@pytest.mark.parametrize("is_early", [False, True])
def test_a_refusal_is_told_also_if_the_server_has_not_read_who_asks(
    tmp_path: Path, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, to_json = threading.Event(), protocol.to_json

    def late(fields: Hello | Welcome) -> bytes:
        closed.wait(WAIT_S)
        return to_json(fields)

    if is_early:
        monkeypatch.setattr(protocol, "to_json", late)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(WAIT_S)
        listener.bind(str(tmp_path / "cache.sock"))
        listener.listen()

        def refuse() -> None:
            with listener.accept()[0] as sock:
                if not is_early:
                    select.select([sock], [], [], WAIT_S)
                sock.send(protocol.HEADER.pack(protocol.REFUSED, 0, 0, 0, 3) + b"why")
            closed.set()

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(ConfigError, match="refuses this process: why"):
            tiered_kv.connect(f"unix:{tmp_path}/cache.sock")
        thread.join()
