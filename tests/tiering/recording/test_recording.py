"""A recording says what requests asked for, so that a simulation of it hits what was hit; and it tells nobody more."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support import stacks
from tests.support.stacks import manager_of
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.config.files import RecordSettings
from tiered_kv.config.stack_config import load_config
from tiered_kv.errors import ConfigError
from tiered_kv.hints import HINTS_KEY, SESSION_KEY, Hints
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import EngineStack, open_engine_stack, open_stack
from tiered_kv.tiering.recording import recorder as recorder_module
from tiered_kv.tiering.recording import requests as requests_module
from tiered_kv.tiering.recording.recorder import Recorder, open_trace
from tiered_kv.tiering.recording.requests import HOLD_S, KEYS_MAX, AskedRequest, OpenRequests
from tiered_kv.tiering.recording.trace_file import REQUEST_KEYS_MAX, TraceFile, check_place
from tiered_kv.workload.replay import replay
from tiered_kv.workload.request import ChatWorkload, Request, block_key
from tiered_kv.workload.simulation import simulate, with_tier
from tiered_kv.workload.trace import LINE_BYTES_MAX, read_trace

CHATS = list(ChatWorkload(chats=60, turns=5, active_chats=15, turn_blocks=3).requests())
MEMORY = {"type": "memory", "capacity": "768KiB"}
NO_HINTS = Hints()


def keys_of(*numbers: int) -> list[OffloadKey]:
    return [block_key(number) for number in numbers]


def asked(req_id: str, began_s: float = 0.0, *, keys: Sequence[OffloadKey] = (), session: str = "") -> AskedRequest:
    request = AskedRequest(req_id, began_s, session, NO_HINTS)
    if keys:
        request.use(keys)
    return request


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def file(path: Path) -> Iterator[TraceFile]:
    opened = TraceFile(path, 1 << 20, 16, 0.0)
    yield opened
    opened.close()


def recorded(stack: EngineStack, *requests: tuple[list[OffloadKey], dict[str, Any] | None]) -> None:
    """Let an engine's requests load what is there and store the rest, one after the other."""
    for number, (keys, params) in enumerate(requests):
        context = ReqContext(f"request-{number}", params)
        manager = stack.manager
        manager.on_new_request(context)
        hits = manager.lookup_many(keys, context).count(True)
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
        output = manager.prepare_store(keys[hits:], context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        manager.on_schedule_end()


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What was measured.


@pytest.mark.one_quick(2)
@pytest.mark.parametrize("audit", [0.0, 0.01])
def test_a_simulation_of_a_recording_hits_what_was_hit(path: Path, audit: float) -> None:
    config = load_config(stacks.stack_of(MEMORY, blocks=128, record=str(path), audit=audit))
    with open_engine_stack(config) as stack:
        manager = stack.manager

        def end_jobs(_: object) -> None:  # each job within its step, as in the simulation: so no speed counts
            assert manager.drain_jobs(60.0)

        real = replay(manager, stack.kv_view, iter(CHATS), on_progress=end_jobs)
    requests = list(read_trace(path))
    simulated = simulate(config, requests)
    assert simulated.requests == real.requests == len(requests) == len(CHATS)
    assert simulated.blocks == real.blocks
    assert 0.3 < real.hit_rate < 0.9
    assert abs(simulated.hit_rate - real.hit_rate) <= (0.01 if not audit else 0.05)
    twice = with_tier(config, "cpu", capacity=2 * config.primary.capacity)
    assert simulate(twice, requests).hit_rate > simulated.hit_rate


def test_a_recording_has_the_blocks_the_hints_and_the_sessions_of_a_load(path: Path) -> None:
    sent = [
        Request(0, 48, 0, (1, 2, 3), "a", {"priority": 1, "skip": "store"}),
        Request(1, 64, 0, (1, 2, 3, 4), "a", {"ttl": 0}),
        Request(2, 32, 0, (9, 8), "b", None),
    ]
    with open_engine_stack(stacks.stack_of(blocks=16, record=str(path))) as stack:
        replay(stack.manager, stack.kv_view, iter(sent))
    found = list(read_trace(path))
    assert [len(each.hash_ids) for each in found] == [3, 4, 2]
    assert [each.input_length for each in found] == [48, 64, 32]
    assert found[1].hash_ids[:3] == found[0].hash_ids
    assert found[0].session == found[1].session != found[2].session != ""
    given_hints = [Hints.parse(each.hints or {}) for each in found]
    assert given_hints == [Hints(1, skips_store=True), Hints(ttl_s=0), NO_HINTS]
    assert [each.timestamp_ms for each in found] == sorted(each.timestamp_ms for each in found)


def test_the_blocks_of_a_program_are_noted_once_though_it_puts_what_it_has_got(path: Path) -> None:
    blocks = bytes(4 * 4096)
    hashes = [b"%d" % number for number in range(4)]
    with open_stack(stacks.stack_of(blocks=16, record=str(path))) as stack:
        assert stack.put(hashes[:2], blocks[: 2 * 4096]) == 2
        assert len(stack.get(hashes)) == 2
        assert stack.put(hashes, blocks) == 4
        assert stack.prefetch(hashes) == 4
    assert [len(line["hash_ids"]) for line in written(path)] == [2, 2, 2]


def test_after_a_reset_the_same_blocks_are_others(path: Path) -> None:
    with open_engine_stack(stacks.stack_of(blocks=16, record=str(path))) as stack:
        recorded(stack, (keys_of(1, 2), None))
        stack.manager.reset_cache()
        recorded(stack, (keys_of(1, 2), None))
    first, second = (set(line["hash_ids"]) for line in written(path))
    assert not first & second


def test_requests_are_counted(path: Path) -> None:
    with open_engine_stack(stacks.stack_of(blocks=16, record=str(path))) as stack:
        recorded(stack, (keys_of(1, 2), None), (keys_of(1), None))
        end_s = time.monotonic() + 60.0
        while not (found := count_of(stack.counters()["cpu"], "recorded_requests_total")) and time.monotonic() < end_s:
            time.sleep(0.01)
    assert found == 2
    assert len(written(path)) == 2


# What it keeps to itself.


def test_a_trace_has_no_key_no_request_and_no_session_by_name(path: Path) -> None:
    keys = [make_offload_key(b"prompt of a person %d" % number, 0) for number in range(3)]
    with open_engine_stack(stacks.stack_of(blocks=16, record=str(path))) as stack:
        recorded(stack, (keys, {SESSION_KEY: "person-17", HINTS_KEY: {"priority": 1}, "prompt": "secret"}))
    text = path.read_text()
    assert json.loads(text)["session"]
    for secret in ("person", "prompt", "secret", "request-0", *(key.hex() for key in keys)):
        assert secret not in text


def test_two_recordings_share_no_id(path: Path) -> None:
    ids = []
    for name in ("first", "second"):
        record = str(path.with_name(name))
        with open_engine_stack(stacks.stack_of(blocks=16, record=record)) as stack:
            recorded(stack, (keys_of(1, 2, 3), {SESSION_KEY: "a"}))
        (line,) = written(Path(record))
        ids.append({*line["hash_ids"], line["session"]})
    assert len(ids[0] | ids[1]) == 8


def test_only_its_user_reads_it(path: Path, file: TraceFile) -> None:
    assert path.stat().st_mode & 0o077 == 0


# The file.


@given(whole=st.integers(1, 3), share=st.floats(0.0, 1.0, exclude_max=True))
def test_a_trace_that_ends_in_the_middle_of_a_line_is_read_up_to_it(
    tmp_path_factory: pytest.TempPathFactory, whole: int, share: float
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    file = TraceFile(folder / "trace", 1 << 20, 16, 0.0)
    for number in range(4):
        assert file.write(asked(str(number), keys=keys_of(*range(number, 2 * number + 2))))
    file.close()
    lines = (folder / "trace").read_bytes().splitlines(keepends=True)
    cut = int(share * len(lines[whole]))
    (folder / "cut").write_bytes(b"".join(lines[:whole]) + lines[whole][:cut])
    is_whole = cut == len(lines[whole]) - 1  # only the end of the line is missing
    assert len(list(read_trace(folder / "cut"))) == whole + is_whole


def test_the_two_files_keep_to_the_size_and_have_the_last_requests(path: Path, file: TraceFile) -> None:
    for number in range(400):
        assert file.write(asked(str(number), number, keys=keys_of(*range(number, number + 200))))
    older = path.with_name("trace.jsonl.1")
    assert path.stat().st_size + older.stat().st_size <= 1 << 20
    both = path.with_name("both")
    both.write_bytes(older.read_bytes() + path.read_bytes())
    found = [each.timestamp_ms for each in read_trace(both)]
    assert found == [1000 * number for number in range(400 - len(found), 400)]
    assert len(found) >= 100


def test_an_earlier_recording_is_kept_beside_the_new_one(path: Path) -> None:
    for number in range(3):
        file = TraceFile(path, 1 << 20, 16, 0.0)
        file.write(asked("a", float(number), keys=keys_of(1)))
        file.close()
    assert [line["timestamp"] for line in written(path)] == [2000]
    assert [line["timestamp"] for line in written(path.with_name("trace.jsonl.1"))] == [1000]


def test_a_line_that_no_reader_takes_is_not_written(file: TraceFile, path: Path) -> None:
    longest = [make_offload_key(number.to_bytes(4, "big"), 0) for number in range(REQUEST_KEYS_MAX)]
    assert file.write(asked("a", keys=longest))
    assert not file.write(asked("b", keys=[*longest, block_key(1)]))
    assert path.stat().st_size <= LINE_BYTES_MAX
    assert len(next(read_trace(path)).hash_ids) == REQUEST_KEYS_MAX


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_full_disk_costs_lines_and_never_a_trace(
    path: Path, file: TraceFile, monkeypatch: pytest.MonkeyPatch, can_cut: bool
) -> None:
    assert file.write(asked("a", keys=keys_of(1, 2)))
    write, room = os.write, [10]

    def filling(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(fd, data[: room[0]])
        room[0] -= taken
        return taken

    def failing(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as full:
        full.setattr(os, "write", filling)
        if not can_cut:
            full.setattr(os, "ftruncate", failing)
        for name in ("b", "c"):
            with pytest.raises(OSError, match="No space"):
                file.write(asked(name, keys=keys_of(3, 4)))
    assert file.write(asked("d", 7.0, keys=keys_of(5)))
    assert [each.timestamp_ms for each in read_trace(path)] == ([0, 7000] if can_cut else [7000])
    if not can_cut:
        assert [each.timestamp_ms for each in read_trace(path.with_name("trace.jsonl.1"))] == [0]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.1"])
def test_a_file_that_is_no_trace_is_not_touched(path: Path, name: str) -> None:
    path.write_text('{"timestamp":0}\n')
    path.with_name(name).write_text("a letter\n")
    with pytest.raises(ConfigError, match="no recorded trace"):
        TraceFile(path, 1 << 20, 16, 0.0)
    assert path.with_name(name).read_text() == "a letter\n"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "No such device"),
        (lambda path: path.symlink_to("elsewhere"), "symbolic links"),
    ],
    ids=["folder", "fifo", "link"],
)
def test_what_is_no_file_is_refused(path: Path, make: Callable[[Path], object], problem: str) -> None:
    make(path)
    with pytest.raises(ConfigError, match=rf"record\.path.*{problem}"):
        open_engine_stack(stacks.stack_of(blocks=16, record=str(path)))


def test_two_stacks_never_record_into_one_file(path: Path) -> None:
    settings = stacks.stack_of(blocks=16, record=str(path))
    with open_engine_stack(settings) as stack:
        recorded(stack, (keys_of(1), None))
        with pytest.raises(ConfigError, match="another process records"):
            open_engine_stack(settings)
    assert len(written(path)) == 1
    open_engine_stack(settings).close()


KILLED = """
import os, sys
from tests.tiering.recording.test_recording import keys_of, recorded
from tests.support import stacks
from tiered_kv.stack.open import open_engine_stack
stack = open_engine_stack(stacks.stack_of(blocks=64, record=sys.argv[1]))
for number in range(10**6):
    recorded(stack, (keys_of(*range(number % 7 + 1)), None))
    if os.path.getsize(sys.argv[1]) > 5000:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_trace_that_can_be_read(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=Path(__file__).parents[3], timeout=300)
    assert done.returncode == -9
    assert sum(1 for _ in read_trace(path)) > 10


# The queue, and the order.


def test_requests_come_in_the_order_of_their_begins() -> None:
    requests = OpenRequests()
    for name in "abc":
        requests.begin(asked(name))
        requests.use(name, keys_of(1))
    requests.end("b")
    requests.end("c")
    assert requests.take(1.0) is None
    requests.end("a")
    assert [request.req_id for request in iter(lambda: requests.take(1.0), None)] == ["a", "b", "c"]


def test_a_request_that_runs_long_is_written_with_what_it_has_used() -> None:
    requests = OpenRequests()
    requests.begin(asked("long"))
    requests.use("long", keys_of(1, 2))
    requests.begin(asked("b", 1.0))
    requests.end("b")
    assert requests.take(HOLD_S) is None
    found = requests.take(HOLD_S + 1.0)
    assert found is not None
    requests.use("long", keys_of(3))
    assert found.keys == keys_of(1, 2)
    second = requests.take(HOLD_S + 1.0)
    assert second is not None
    assert second.req_id == "b"


def test_requests_that_never_end_take_no_more_than_the_limit() -> None:
    requests = OpenRequests()
    part = keys_of(*range(1000))
    for number in range(KEYS_MAX // 1000 + 100):
        requests.begin(asked(str(number)))
        requests.use(str(number), part)
        while requests.take(0.0) is not None:
            pass
    assert requests.drop_running() <= KEYS_MAX // 1000


def test_a_request_that_names_its_keys_in_each_step_keeps_them_once() -> None:
    request = asked("a")
    for _ in range(1000):
        request.use(keys_of(*range(100)))
    assert request.size <= 2048
    assert request.keys == keys_of(*range(100))


def test_a_full_queue_loses_whole_requests_and_counts_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "QUEUE_CALLS_MAX", 40)
    may_write, is_writing = threading.Event(), threading.Event()
    write = TraceFile.write

    def blocked(self: TraceFile, request: AskedRequest) -> bool:
        is_writing.set()
        assert may_write.wait(60.0)
        return write(self, request)

    monkeypatch.setattr(TraceFile, "write", blocked)
    recorder = Recorder(open_trace(RecordSettings(path=str(path)), 16))

    def run(first: int, last: int) -> None:
        for number in range(first, last):
            recorder.begin(str(number), "", NO_HINTS, time.monotonic())
            for part in range(3):
                recorder.use(str(number), keys_of(10 * number + part))
            recorder.end(str(number))

    run(0, 1)
    assert is_writing.wait(60.0)
    began_s = time.thread_time()
    run(1, 500)
    assert time.thread_time() - began_s < 5.0
    may_write.set()
    end_s = time.monotonic() + 60.0
    while recorder.has_work and time.monotonic() < end_s:
        time.sleep(0.01)
    run(500, 504)
    recorder.close()
    lines = written(path)
    assert all(len(line["hash_ids"]) == 3 for line in lines)
    assert len(lines) + recorder.lost_requests == 504
    assert 5 <= len(lines) < 50


def test_a_request_whose_last_calls_were_lost_is_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "INTERVAL_S", 3600.0)  # the thread takes all calls at the end
    recorder = Recorder(open_trace(RecordSettings(path=str(path)), 16))
    recorder.begin("whole", "", NO_HINTS, time.monotonic())
    recorder.use("whole", keys_of(1))
    recorder.end("whole")
    recorder.begin("part", "", NO_HINTS, time.monotonic())
    recorder.use("part", keys_of(2))
    monkeypatch.setattr(recorder_module, "QUEUE_CALLS_MAX", 0)
    recorder.use("part", keys_of(3))
    recorder.close()
    assert [len(line["hash_ids"]) for line in written(path)] == [1]
    assert recorder.lost_requests == 1


def test_a_request_is_whole_though_its_calls_waited_long_in_the_queue(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "INTERVAL_S", 3600.0)
    monkeypatch.setattr(requests_module, "HOLD_S", 0.0)
    recorder = Recorder(open_trace(RecordSettings(path=str(path)), 16))
    began_s = time.monotonic() - 1000.0
    for name in ("a", "b"):
        recorder.begin(name, "", NO_HINTS, began_s)
    for number in range(100):
        recorder.use("a", keys_of(number))
    recorder.end("b")
    recorder.use("a", keys_of(100))
    recorder.end("a")
    recorder.close()
    assert [len(line["hash_ids"]) for line in written(path)] == [101]


# The settings.


def test_a_path_is_short_for_the_settings(path: Path) -> None:
    short = load_config(stacks.stack_of(record=str(path))).record
    assert short == RecordSettings(path=str(path), size_max=1 << 30)
    with pytest.raises(ConfigError, match=r"record\.size_max"):
        load_config(stacks.stack_of(record={"path": str(path), "size_max": "1KiB"}))


def test_a_server_of_several_namespaces_refuses_to_record(tmp_path: Path) -> None:
    from tiered_kv.server.namespaces import Namespaces

    settings = {"primary": {"capacity": "1MiB"}, "record": str(tmp_path / "trace")}
    with pytest.raises(ConfigError, match="record: only one stack"):
        Namespaces(settings, 2)
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(settings))
    Namespaces(tmp_path / "stack.yaml", 1)


def test_nothing_is_recorded_without_the_setting(tmp_path: Path) -> None:
    with open_stack(stacks.stack_of(blocks=16)) as stack:
        assert not any("record" in name for name in stack.counters()["cpu"])
        assert type(manager_of(stack)).__name__ == "TieringOffloadingManager"
        assert not any("record" in thread.name for thread in threading.enumerate())


def test_a_check_says_whether_a_trace_can_be_written(tmp_path: Path, path: Path) -> None:
    check_place(path)
    with pytest.raises(ConfigError, match="make the folder"):
        check_place(tmp_path / "absent" / "trace")
    path.write_text("a letter")
    with pytest.raises(ConfigError, match="no recorded trace"):
        check_place(path)
