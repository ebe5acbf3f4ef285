"""`tiered-kv record` writes from outside the trace that the stack would write itself."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import yaml
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.support import stacks
from tests.support.server_process import free_port
from tiered_kv.base import make_offload_key
from tiered_kv.cli import record
from tiered_kv.cli.main import main
from tiered_kv.hints import Hints
from tiered_kv.stack.exporters.event_requests import PublishedRequests
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.tiering.recording.requests import AskedRequest
from tiered_kv.tiering.recording.trace_file import TraceFile
from tiered_kv.workload.replay import replay
from tiered_kv.workload.request import Request
from tiered_kv.workload.trace import read_trace

REQUESTS = [
    Request(0, 48, 0, (1, 2, 3), "person", {"priority": 1}),
    Request(1, 64, 0, (1, 2, 3, 4), "person"),
    Request(2, 32, 0, (9, 8)),
]


def settings(tmp_path: Path, **events: Any) -> dict[str, Any]:
    address = f"tcp://127.0.0.1:{free_port()}"
    return stacks.stack_of(blocks=16, record=str(tmp_path / "own"), events={"publish": address, **events})


@pytest.fixture
def file(tmp_path: Path) -> str:
    found = settings(tmp_path, recording="recording")
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(found))
    return str(tmp_path / "stack.yaml")


@pytest.fixture
def stack(file: str) -> Iterator[EngineStack]:
    with open_engine_stack(file) as opened:
        yield opened


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[record._Recording]:
    trace = TraceFile(tmp_path / "trace", 1 << 20, 0, 0.0)
    yield record._Recording(trace)
    trace.close()


def play(stack: EngineStack) -> None:
    replay(stack.manager, stack.kv_view, iter(REQUESTS))


def shape(request: Request) -> object:
    return len(request.hash_ids), request.input_length, bool(request.session), request.hints


def message(number: int, event: object) -> list[bytes]:
    return [b"recording", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [event], 0])]


def asked(**more: object) -> dict[str, object]:
    event = {
        "type": "RequestAsked",
        "source": "a",
        "began_s": 1.5,
        "blocks": bytes(12),
        "block_tokens": 16,
        "session": "",
    }
    return {**event, "block_tokens": 16, "hints": None, **more}


def test_it_has_what_the_stack_records_itself(
    file: str, stack: EngineStack, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_received = threading.Event()
    take = record._Recording.take

    def taking(self: record._Recording, frames: list[bytes]) -> None:
        take(self, frames)
        if self.requests >= 2 * len(REQUESTS):
            raise KeyboardInterrupt  # as Ctrl-C does

    def play_until_received() -> None:  # the socket connects late
        while not is_received.is_set():
            play(stack)
            stack.manager.reset_cache()
            is_received.wait(0.3)

    monkeypatch.setattr(record._Recording, "take", taking)
    thread = threading.Thread(target=play_until_received)
    thread.start()
    trace = tmp_path / "outside"
    try:
        assert main(["record", file, str(trace), "--json", "--for", "60s"]) == 0
    finally:
        is_received.set()
        thread.join()
    answer = json.loads(capsys.readouterr().out)
    found = list(read_trace(trace))
    assert answer == {"trace": str(trace), "requests": len(found), "lost_messages": 0}
    stack.close()
    own = list(read_trace(tmp_path / "own"))
    begin = next(at for at in range(len(own)) if list(map(shape, own[at : at + 3])) == list(map(shape, found[:3])))
    assert list(map(shape, own[begin : begin + len(found)])) == list(map(shape, found))
    ids = [set(each.hash_ids) for each in found[:6]]
    assert len(ids[0] & ids[1]) == 3
    assert found[0].session == found[1].session
    assert not ids[0] & ids[3], "a reset lies between"
    assert not {each for request in own for each in request.hash_ids} & ids[0]
    assert "person" not in trace.read_text() + (tmp_path / "own").read_text()


def test_an_address_where_nothing_answers_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    assert main(["record", address, str(tmp_path / "t"), "--for", "50ms"]) == 2
    assert f"no stack has answered at {address}" in capsys.readouterr().err


def test_a_publisher_that_says_nothing_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")

        def interrupt() -> None:
            publisher.recv()  # the subscription: it comes after the handshake
            signal.raise_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        assert main(["record", f"tcp://127.0.0.1:{port}", str(tmp_path / "t"), "--for", "60s"]) == 0
        thread.join()
    assert "0 requests" in capsys.readouterr().out


def test_blocks_of_a_program_whose_hashes_end_alike_are_told_apart(tmp_path: Path) -> None:
    class Publisher:
        events: ClassVar[list[Any]] = []

        def publish_apart(self, topic: bytes, event: Any) -> bool:
            self.events.append(event)
            return True

    keys = [make_offload_key(b"chat %d, block 12" % number, 0) for number in range(50)]
    request = AskedRequest("a", time.monotonic(), "person", Hints())
    request.use(keys)
    for _ in range(2):
        assert PublishedRequests(Publisher(), "recording", 16).write(request)  # type: ignore[arg-type]  # no sockets
    first, second = Publisher.events
    names = [{event["blocks"][at : at + 8] for at in range(0, 600, 12)} for event in (first, second)]
    assert len(names[0] | names[1]) == 100, "two stacks share no hash"
    assert len({first["session"], second["session"], first["source"], second["source"]}) == 4
    assert b"chat" not in first["blocks"]


def test_missing_messages_are_counted_and_a_new_start_is_another_stack(recording: record._Recording) -> None:
    for number, source in ((1000, "a"), (1001, "a"), (1004, "a"), (9000, "b")):
        recording.take(message(number, asked(source=source)))
    assert (recording.requests, recording.lost) == (4, 2)
    ids = [json.loads(line)["hash_ids"] for line in recording.file._path.read_text().splitlines()]
    assert ids[0] == ids[1] == ids[2] != ids[3]


@given(
    event=st.one_of(
        st.none(),
        st.dictionaries(st.sampled_from(["type", "blocks"]), st.just("RequestAsked")),
        st.sampled_from(["began_s", "blocks", "block_tokens", "session", "hints"]).flatmap(
            lambda name: st.one_of(
                st.none(), st.integers(-2, 1 << 40), st.floats(), st.text(max_size=3), st.binary(min_size=1, max_size=7)
            ).map(lambda value: asked(**{name: value}))
        ),
    )
)
def test_what_is_no_message_of_ours_changes_no_trace(tmp_path_factory: pytest.TempPathFactory, event: object) -> None:
    folder = tmp_path_factory.mktemp("record")
    file = TraceFile(folder / "trace", 1 << 20, 0, 0.0)
    recording = record._Recording(file)
    recording.take(message(1, event))
    recording.take([b"recording", b"12345678", b"no msgpack"])
    recording.take([b"recording"])
    recording.take(message(2, asked()))
    file.close()
    assert len(list(read_trace(folder / "trace"))) == recording.requests >= 1


@pytest.mark.parametrize(
    ("events", "arguments", "problem"),
    [
        (None, [], "publishes no events"),
        ({}, [], "add 'recording: recording'"),
        ({"recording": "recording", "publish": "tcp://*:*"}, [], "give its address"),
        ({"recording": "recording"}, ["--topic", "a"], "a stack's file has the topic"),
        ({"recording": "recording"}, ["--size-max", "1KiB"], "--size-max: expected at least 1MiB"),
        ({"recording": "kv-requests"}, [], "events.recording"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    events: dict[str, Any] | None,
    arguments: list[str],
    problem: str,
) -> None:
    found = settings(tmp_path, **(events or {}))
    if events is None:
        del found["events"]
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(found))
    assert main(["record", str(tmp_path / "stack.yaml"), str(tmp_path / "t"), "--for", "1ms", *arguments]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "t").exists()
