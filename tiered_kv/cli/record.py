"""`tiered-kv record`: writes what the requests of a running stack ask for, as a trace, from the stack's events.

`main` calls `run` on the main thread, which receives and writes. The publisher is not trusted: a message that is not as
`event_requests` writes it is counted and left out. What must stay true: the trace is one of `TraceFile`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tiered_kv.base import OffloadKey
from tiered_kv.cli.arguments import describe_use, file_path, seconds, size
from tiered_kv.cli.output import Status, print_json, print_text
from tiered_kv.config.files import RECORDING_BYTES, RECORDING_BYTES_MIN
from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.stack_config import EventSettings
from tiered_kv.config.units import format_bytes
from tiered_kv.config.validation import validate
from tiered_kv.errors import ConfigError, MissingExtraError, TierUnavailableError
from tiered_kv.hints import Hints
from tiered_kv.stack.exporters.event_messages import ALL_BLOCKS_CLEARED
from tiered_kv.stack.exporters.event_requests import NAME_BYTES, REQUEST_ASKED
from tiered_kv.tiering.recording.requests import AskedRequest
from tiered_kv.tiering.recording.trace_file import REQUEST_KEYS_MAX, TraceFile

DEFAULT_TOPIC: Final = "recording"
MESSAGE_BYTES_MAX: Final = 4 << 20
_ADDRESS = re.compile(r"(tcp|ipc)://\S+")
_EVERYWHERE = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\]):")
_POLL_MS: Final = 200
_TIME_S_MAX: Final = 1e10
"""In the year 2286: a later time is none."""
_SILENT_S: Final = 10.0
"""Seconds without a request after which the command says what may be wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Record which blocks the requests of a running stack ask for, as a trace that 'simulate' and 'replay' read. It "
        "follows the stack's events, which need 'recording: recording' under 'events' in the stack's file. The trace "
        "has no token, no key and no name of a session. It ends with Ctrl-C, or after --for.\n\n"
        "Without events, 'record: PATH' in the stack's file has the stack write the same trace itself."
    )
    parser.add_argument(
        "where", metavar="STACK|ADDRESS", help="the stack's YAML file, or the address of its events: tcp://HOST:PORT"
    )
    parser.add_argument("trace", metavar="TRACE", type=file_path, help="the file to write")
    parser.add_argument("--topic", metavar="TOPIC", help=f"with ADDRESS: events.recording ({DEFAULT_TOPIC})")
    parser.add_argument(
        "--for", metavar="TIME", type=seconds, dest="duration_s", help="end after this time, such as 1h"
    )
    parser.add_argument(
        "--size-max", metavar="SIZE", type=size, default=RECORDING_BYTES, help="limit of TRACE and TRACE.1 (1GiB)"
    )
    describe_use(
        parser,
        ("tiered-kv record stack.yaml trace.jsonl --for 1h", "an hour of the stack of this file"),
        ("tiered-kv record tcp://10.0.0.7:5557 trace.jsonl", "of a stack on another machine, until Ctrl-C"),
        found="messages were lost: the trace lacks requests",
    )


def run(args: argparse.Namespace) -> Status:
    if not all(map(importlib.util.find_spec, ("zmq", "msgspec"))):
        raise MissingExtraError("'record'", "events")
    address, topic = _source(args.where, args.topic)
    path: Path = args.trace
    if args.size_max < RECORDING_BYTES_MIN:
        raise ConfigError(f"expected at least {format_bytes(RECORDING_BYTES_MIN)}", location="--size-max")
    recording = _Recording(TraceFile(path, args.size_max, 0, time.time()))
    try:
        with _subscribed(address, topic) as (socket, has_answered):
            with suppress(KeyboardInterrupt):
                _follow(socket, recording, address, topic, args.duration_s)
            is_alive = bool(recording.requests or recording.lost) or has_answered()
    finally:
        recording.file.close()
    if not is_alive:
        raise TierUnavailableError(f"no stack has answered at {address}: {path} has no request")
    if args.json:
        print_json({"trace": str(path), "requests": recording.requests, "lost_messages": recording.lost})
    else:
        lost = f"; {recording.lost} messages were lost" if recording.lost else ""
        print_text(f"{path}: {recording.requests} requests{lost}")
    return Status.FOUND if recording.lost else Status.OK


def _source(where: str, topic: str | None) -> tuple[str, str]:
    """Return the address and the topic of a stack's recording."""
    if _ADDRESS.fullmatch(where):
        return where, topic or DEFAULT_TOPIC
    if topic is not None:
        raise ConfigError("a stack's file has the topic: leave this out", location="--topic")
    raw = from_source(where, lambda raw: fill_variables({"events": raw.get("events")}, os.environ))
    if raw["events"] is None:
        raise ConfigError(
            f'{where} publishes no events: add \'events: {{publish: "tcp://127.0.0.1:5557", recording: '
            f"{DEFAULT_TOPIC}}}', or 'record: PATH', with which the stack writes the trace itself",
            location="events",
        )
    settings = validate(EventSettings, raw["events"], ("events",))
    if settings.recording is None:
        raise ConfigError(f"add 'recording: {DEFAULT_TOPIC}' in {where}", location="events.recording")
    address = _EVERYWHERE.sub("tcp://127.0.0.1:", settings.publish)
    if address.endswith(":*"):
        raise ConfigError("the port is any free one: give its address in place of the file", location="events.publish")
    return address, settings.recording


@contextmanager
def _subscribed(address: str, topic: str) -> Iterator[tuple[Any, Callable[[], bool]]]:  # Any: a zmq.Socket
    """Yield a socket that follows a topic, and a function that says whether a publisher has ever answered there."""
    import zmq

    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.ipv6 = "[" in address
        socket.maxmsgsize = MESSAGE_BYTES_MAX
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        # A publisher that has nothing to say has shaken hands, too.
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to '{address}': {error.strerror}") from error
        yield socket, lambda: bool(monitor.poll(0))
    finally:
        context.destroy(linger=0)


def _follow(socket: Any, recording: _Recording, address: str, topic: str, duration_s: float | None) -> None:
    end_s = None if duration_s is None else time.monotonic() + duration_s
    silent_s = time.monotonic() + _SILENT_S
    while end_s is None or time.monotonic() < end_s:
        if socket.poll(_POLL_MS):
            recording.take(socket.recv_multipart())
        elif not recording.requests and time.monotonic() > silent_s:
            silent_s = float("inf")
            print_text(
                f"no request yet from {address}: does a stack publish there, with 'recording: {topic}' under 'events'?",
                sys.stderr,
            )


class _Recording:
    """The trace, and what became of the messages. One thread calls."""

    def __init__(self, file: TraceFile) -> None:
        import msgspec

        self.file = file
        self._decode = msgspec.msgpack.Decoder().decode
        self._error: type[Exception] = msgspec.MsgspecError
        self._numbers = itertools.count()
        self._source = ""
        """The stack that sent the last message; empty before the first."""
        self._next = 0
        """The number that its next message should have."""
        self.requests = self.lost = 0

    def take(self, frames: list[bytes]) -> None:
        """Write what a message says. What cannot be read counts as lost, as do missing messages before it."""
        try:
            _, number, payload = frames
            (event,) = self._decode(payload)[1]
            kind, source = event["type"], str(event["source"])
            request = _request(next(self._numbers), event) if kind == REQUEST_ASKED else None
            block_tokens = _whole(event["block_tokens"]) if request is not None else 0
        except (ValueError, TypeError, KeyError, IndexError, self._error):
            self.lost += 1
            return
        at = int.from_bytes(number, "big")
        is_same = source == self._source  # otherwise another stack has been opened at the address
        self.lost += max(0, at - self._next) if is_same else 0
        if kind == ALL_BLOCKS_CLEARED or not is_same:
            self.file.reset()
        self._source, self._next = source, at + 1
        if request is not None:
            self.file.block_tokens = block_tokens
            self.requests += self.file.write(request)


def _request(number: int, event: Mapping[str, Any]) -> AskedRequest:  # Any: of a message
    blocks, session, hints = event["blocks"], event["session"], event["hints"]
    if not isinstance(blocks, bytes) or len(blocks) % NAME_BYTES or len(blocks) > NAME_BYTES * REQUEST_KEYS_MAX:
        raise ValueError("expected the names of blocks")
    began_s = event["began_s"]
    if not (isinstance(session, str) and isinstance(began_s, float) and 0.0 <= began_s < _TIME_S_MAX):
        raise ValueError("expected a session and a time")
    request = AskedRequest(str(number), began_s, session, Hints() if hints is None else Hints.parse(hints))
    request.use([OffloadKey(blocks[at : at + NAME_BYTES]) for at in range(0, len(blocks), NAME_BYTES)])
    return request


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError("expected a number of tokens")
    return value
