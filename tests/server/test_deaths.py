"""Engines and servers are killed and stopped, and send garbage: nothing of the others is lost, wrong, or waits."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.forks import fork
from tests.support.host_server import Engine, Served, keys_of, raw_client, server_process, serving, stack_of
from tiered_kv.server import protocol
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.testing.control import wait_until

ROOT = Path(__file__).parents[2]
KEYS = keys_of(12)
ROWS = 256


@contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program of this project, and kill it at the end."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@contextmanager
def engine_process(served: Served, name: str, seed: int = 1) -> Iterator[subprocess.Popen[str]]:
    with child("-m", "tests.support.host_engine", served.address, name, str(seed)) as process:
        assert line_of(process)
        yield process


def test_rows_of_a_killed_engine_are_free_while_its_forked_child_lives(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from tests.support.host_server import Engine, keys_of
engine = Engine(sys.argv[1], "first")
engine.store(keys_of(12))
engine.look_up(keys_of(12), engine.begin())
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""
    with serving(tmp_path) as served, child("-c", program, served.address) as process:
        forked = int(line_of(process))
        try:
            assert served.rows_in_use()
            process.kill()
            wait_until(lambda: not served.rows_in_use())
            assert served.engine().load(KEYS) == len(KEYS)
            os.kill(forked, 0)  # it lives
        finally:
            os.kill(forked, signal.SIGKILL)


@pytest.mark.slow
def test_an_engine_whose_worker_was_killed_goes_on_and_uses_the_next_one(tmp_path: Path) -> None:
    program = """
import signal, sys
from tiered_kv.server.attach import Attachment
from tiered_kv.server.protocol import Hello
from tiered_kv.server.worker import HostWorker
from tiered_kv.worker.handlers import WorkerHandlers
worker = HostWorker(Attachment(sys.argv[1], Hello("engine", "worker")), lambda _: WorkerHandlers(None, None))
signal.pause()
"""
    with serving(tmp_path) as served:
        engine = served.engine("engine", workers=1)
        lease = engine.begin()
        for _ in range(2):
            with child("-c", program, served.address) as process:
                engine.step_until(lambda: engine.manager.is_attached)
                engine.store(KEYS)
                assert engine.load(KEYS) == len(KEYS)
                assert engine.look_up(KEYS, lease) == len(KEYS)
                process.kill()
                engine.step_until(lambda: not engine.manager.is_attached)
                assert engine.load(KEYS) == 0
                assert served.count(lambda host: host.leases) == len(KEYS)


@pytest.mark.slow
def test_an_engine_that_is_stopped_keeps_its_rows(tmp_path: Path) -> None:
    with serving(tmp_path) as served, engine_process(served, "first") as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T")
        held = served.rows_in_use()
        other = served.engine()
        for first in range(1000, 1100, 10):
            other.store(keys_of(10, first))
        other.close()
        served.engines.remove(other)
        wait_until(lambda: served.count(lambda host: len(host.sessions)) == 1)
        assert served.rows_in_use() == held
        served.disconnect("scheduler")  # as one that leaves too much unread
        assert served.rows_in_use() == held
        process.send_signal(signal.SIGCONT)
        assert all(line_of(process) for _ in range(20))  # it would end at a wrong byte
        wait_until(lambda: served.count(lambda host: len(host.sessions)) == 1)
        wait_until(lambda: len(served.server._processes.connected) == 1)


@pytest.mark.slow
def test_each_silence_of_a_server_is_logged_when_it_begins_and_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with server_process(tmp_path) as process:
        engine = Engine(f"unix:{tmp_path}/cache.sock", "first")
        engine.store(KEYS)
        for number in (1, 2):
            process.send_signal(signal.SIGSTOP)
            context = engine.begin()
            engine.manager.prefetch(KEYS, context)
            engine.step_until(lambda: not engine.manager.is_attached)
            engine.end(context)
            lines = [each for each in caplog.messages if "does not answer: every block is a miss" in each]
            assert len(lines) == number
            process.send_signal(signal.SIGCONT)
            engine.step_until(lambda: engine.manager.is_attached)
            assert len([each for each in caplog.messages if "answers again after" in each]) == number
        engine.close()


@pytest.mark.slow
def test_an_engine_goes_on_while_the_server_is_stopped(tmp_path: Path) -> None:
    with server_process(tmp_path) as process:
        engine = Engine(f"unix:{tmp_path}/cache.sock", "first")
        engine.store(KEYS)
        assert engine.load(KEYS) == len(KEYS)
        process.send_signal(signal.SIGSTOP)
        context = engine.begin()
        engine.manager.prefetch(KEYS, context)
        assert engine.look_up(KEYS, context) == 0  # after a second
        engine.end(context)
        began_s = time.thread_time()
        for _ in range(50):
            assert engine.load(keys_of(5, first=300)) == 0  # at once
        assert time.thread_time() - began_s < 1
        process.send_signal(signal.SIGCONT)
        engine.step_until(lambda: engine.manager.is_attached)
        assert engine.load(KEYS) == len(KEYS)
        engine.close()


def test_a_forked_child_changes_nothing_for_its_parent(tmp_path: Path) -> None:
    with server_process(tmp_path):
        engine = Engine(f"unix:{tmp_path}/cache.sock", "first")
        engine.store(KEYS)
        pid = fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        assert engine.load(KEYS) == len(KEYS)
        engine.close()


def rows_with_two_uses(host: ServedStack) -> int:
    uses = [row for session in host.sessions.values() for row in session.granted]
    uses += [block.block_id for block in host.manager.primary.blocks.values()]
    return len(uses) - len(set(uses)) + max(0, len(uses) + host.manager.primary.backend.get_num_free_blocks() - ROWS)


numbers = itertools.count()
garbage = st.tuples(
    st.integers(0, 80), st.integers(0, 15), st.integers(0, 600), st.integers(0, 5), st.binary(max_size=200)
)
requests = st.sampled_from([1, 1, 1, 2])
rows = st.lists(st.integers(24, 59), min_size=1, max_size=3)
"""Most were granted to the client, some to the honest engine."""


def of_rows(code: int, *, with_keys: bool = False) -> st.SearchStrategy[Any]:
    """Return messages of a form that the server takes, with rows that the client may not hold."""
    return st.builds(
        lambda number, held, first: (
            code,
            0,
            len(held),
            number,
            b"".join(keys_of(len(held), first) if with_keys else []) + protocol.pack_rows(held),
        ),
        requests,
        rows,
        st.integers(100, 120),  # none of `KEYS`: whoever was granted rows may store any bytes
    )


messages = st.one_of(
    st.builds(lambda number: (protocol.BEGIN, 0, 0, number, protocol.BEGUN.pack(0, 1) + b"r"), requests),
    st.builds(
        lambda number, flags, count, first: (
            protocol.ACQUIRE,
            flags,
            count,
            number,
            b"".join(keys_of(count, first)),
        ),
        requests,
        st.sampled_from([0, protocol.AHEAD, protocol.ONLY_KNOWN, protocol.ONLY_STORED]),
        st.integers(1, 12),
        st.integers(0, 20),
    ),
    st.builds(lambda number: (protocol.GRANT, 0, 0, number, b""), st.integers(0, 300)),
    st.builds(lambda number: (protocol.END, 0, 0, number, b""), requests),
    of_rows(protocol.RELEASE),
    of_rows(protocol.RETURN),
    of_rows(protocol.COMMIT, with_keys=True),
)
OPENING = [(protocol.BEGIN, 0, 0, 1, protocol.BEGUN.pack(0, 1) + b"r"), (protocol.GRANT, 0, 0, 32, b"")]


@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    role=st.sampled_from(["scheduler", "scheduler", "scheduler", "worker", None]),
    sent=st.lists(messages, max_size=12),
    then=st.lists(st.tuples(st.one_of(garbage, messages), st.sampled_from([None, 0, 1 << 31])), max_size=4),
    last=st.binary(min_size=1, max_size=2000),
)
def test_a_client_that_sends_garbage_harms_nobody(
    garbage_server: tuple[Served, Engine],
    role: str | None,
    sent: list[Any],
    then: list[tuple[Any, int | None]],
    last: bytes,
) -> None:
    served, honest = garbage_server
    with (
        raw_client(served, f"garbage-{next(numbers)}", role) as sock,
        suppress(BrokenPipeError, ConnectionResetError),  # the server has closed the connection
    ):
        for (code, flags, items, number, body), size in [*((each, None) for each in [*OPENING, *sent]), *then]:
            sock.send(protocol.HEADER.pack(code, flags, items, number, len(body) if size is None else size) + body)
        sock.send(last)

    def end_the_others(_: ServedStack) -> int:
        for process in list(served.server._processes):
            if process.session is None or process.session.name.startswith("garbage"):
                os.eventfd_write(process.pidfd, 1)
        return len(served.server._processes)

    assert not served.count(rows_with_two_uses)
    honest.step_until(lambda: honest.manager.is_attached)
    wait_until(lambda: served.count(end_the_others) == 1)
    assert (
        honest.load(KEYS) == len(KEYS) or honest.manager.epoch > 0
    )  # it may reset the namespace: then no block is left
    if honest.manager.epoch:
        honest.store(KEYS)


@pytest.fixture
def garbage_server(tmp_path: Path) -> Iterator[tuple[Served, Engine]]:
    with serving(tmp_path, stack_of(ROWS), never_ends=True) as served:
        honest = served.engine()
        honest.store(KEYS)
        yield served, honest
