"""Whatever a server does, a block is loaded right or is a miss, by the job's deadline, and the reason is counted."""

from __future__ import annotations

import email.utils
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.counters import count_of
from tiered_kv.stack import open_stack
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv.toolkit.codecs import OVERHEAD_BYTES_MAX
from tiered_kv.toolkit.record import digest_of
from tiered_kv_s3.settings import S3Settings

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3 import tier as tier_module
from tiered_kv_s3.tier import S3Tier

pytestmark = pytest.mark.slow

HOUR_S = 3600.0
WAIT_S = 60.0
"""How long a job or a lookup may take, so that what never ends fails a test."""


class Fault(Enum):
    """What the server does to one request instead of serving it."""

    SLOW_DOWN = auto()
    ERROR_500 = auto()
    ERROR_503_CHUNKED = auto()
    RESET = auto()
    CLOSE = auto()
    GARBAGE = auto()
    DENIED = auto()
    NO_BUCKET = auto()
    EXPIRED = auto()
    # For GET only.
    TRUNCATE = auto()
    STALL = auto()
    FLIP = auto()
    LONGER = auto()
    SHORTER = auto()


TRANSIENT = [Fault.SLOW_DOWN, Fault.ERROR_500, Fault.ERROR_503_CHUNKED, Fault.RESET, Fault.CLOSE, Fault.GARBAGE]
ERRORS = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.ERROR_500: (500, "InternalError"),
    Fault.DENIED: (403, "AccessDenied"),
    Fault.NO_BUCKET: (404, "NoSuchBucket"),
    Fault.EXPIRED: (400, "ExpiredToken"),
}


class FaultyServer(ThreadingHTTPServer):
    """Objects in a dictionary, with faults on request. It does not list."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, deque[Fault]] = {"GET": deque(), "PUT": deque(), "HEAD": deque(), "DELETE": deque()}
        """By method; only requests for blocks take one."""
        self.always: dict[str, Fault] = {}
        self.bad_objects: dict[str, Fault] = {}
        """By the end of the path; requests for others are served."""
        self.clock_offset_s = 0.0
        self.region = ""
        """If set, requests signed for others are sent away."""
        self.valid_key_id = ""
        """If set, other keys have expired."""
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of connections that a client broke."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10 * WAIT_S
    server: FaultyServer

    def do_GET(self) -> None:
        fault = self._fault()
        data = self.server.objects.get(self.path)
        if self._refuse(fault):
            return
        if data is None:
            self._error(404, "NoSuchKey")
        elif fault is Fault.FLIP:
            self._answer(200, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        elif fault in (Fault.LONGER, Fault.SHORTER):
            self._answer(200, data + b"x" * (OVERHEAD_BYTES_MAX + 1) if fault is Fault.LONGER else data[:-1])
        elif fault in (Fault.TRUNCATE, Fault.STALL):
            self._answer(200, data[: len(data) // 2], length=len(data))
            self.close_connection = True
            if fault is Fault.STALL:
                self.server.stopping.wait()
        else:
            self._answer(200, data)

    def do_HEAD(self) -> None:
        if not self._refuse(self._fault()):
            self._answer(200 if self.path in self.server.objects else 404, b"")

    def do_PUT(self) -> None:
        fault = self._fault()
        data = self.rfile.read(int(self.headers["content-length"]))
        if not self._refuse(fault):
            self.server.objects[self.path] = data
            self._answer(200, b"")

    def do_DELETE(self) -> None:
        if not self._refuse(self._fault()):
            self.server.objects.pop(self.path, None)
            self._answer(204, b"")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return email.utils.formatdate(time.time() + self.server.clock_offset_s, usegmt=True)

    def _fault(self) -> Fault | None:
        if "/blocks/" not in self.path:
            return None
        if fault := self.server.bad_objects.get(self.path[-32:]):
            return fault
        waiting = self.server.faults[self.command]
        return waiting.popleft() if waiting else self.server.always.get(self.command)

    def _refuse(self, fault: Fault | None) -> bool:
        """Answer with an error, or not at all, if there is cause; return whether there was."""
        authorization = self.headers["authorization"]
        if abs(_signed_s(self.headers["x-amz-date"]) - time.time() - self.server.clock_offset_s) > 900:
            self._error(403, "RequestTimeTooSkewed")
        elif self.server.region and f"/{self.server.region}/s3/" not in authorization:
            self._error(301, "PermanentRedirect", {"x-amz-bucket-region": self.server.region})
        elif self.server.valid_key_id and f"Credential={self.server.valid_key_id}/" not in authorization:
            self._error(400, "ExpiredToken")
        elif fault in ERRORS:
            self._error(*ERRORS[fault])
        elif fault is Fault.ERROR_503_CHUNKED:
            self.wfile.write(b"HTTP/1.1 503 x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n<Code\r\n2\r\n>a\r\n0\r\n\r\n")
        elif fault is Fault.GARBAGE:
            self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
            self.close_connection = True
        elif fault in (Fault.RESET, Fault.CLOSE):
            if fault is Fault.RESET:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
        elif fault is Fault.STALL and self.command == "HEAD":
            self.server.stopping.wait()
            self.close_connection = True
        else:
            return False
        return True

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode(), headers)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _signed_s(timestamp: str) -> float:
    parts = [int(part) for part in re.findall(r"\d\d", timestamp)]
    year, (month, day, hour, minute, second) = parts[0] * 100 + parts[1], parts[2:]
    return email.utils.mktime_tz((year, month, day, hour, minute, second, 0, 1, 0, 0))


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    server = FaultyServer()
    yield server
    server.stop()


MakeRig = Callable[..., TierRig]


@pytest.fixture
def make_rig(server: FaultyServer) -> Iterator[MakeRig]:
    """Opens tiers with so much patience that a slow machine is no fault of the server's.

    Only a server that stalls is given up by time. A test that has one sets `request_timeout`.
    """
    rigs: list[TierRig] = []

    def make(**changes: object) -> TierRig:
        entry = {
            "bucket": "bucket",
            "endpoint_url": server.url,
            "access_key_id": "key-id",
            "secret_access_key": "secret",
            "request_timeout": WAIT_S,
            "job_timeout": 10 * WAIT_S,
            "lookup_timeout": WAIT_S,
            "connections": 2,
            "presence_ttl": 0,
            **changes,
        }
        settings = S3Settings.model_validate({name: value for name, value in entry.items() if value is not None})
        rig = TierRig(
            lambda spec, view: S3Tier(spec, view, "s3", settings),
            num_blocks=64,
            block_bytes=4096,
            wait_s=2 * WAIT_S,
        )
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("fault", TRANSIENT, ids=lambda fault: fault.name)
def test_a_passing_fault_is_retried(server: FaultyServer, make_rig: MakeRig, fault: Fault) -> None:
    rig = make_rig()
    keys = make_keys(2)
    server.faults["PUT"] += [fault]
    assert rig.store(keys).success
    server.faults["HEAD"] += [fault]
    assert all(rig.lookup(key) for key in keys)
    server.faults["GET"] += [fault, fault]
    assert rig.load(keys) == set(keys)
    assert rig.tier.stats()["retried_requests_total"] >= 3


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.STALL, Fault.FLIP], ids=lambda fault: fault.name)
def test_a_body_that_is_cut_off_stalled_or_wrong_is_read_again(
    server: FaultyServer, make_rig: MakeRig, fault: Fault
) -> None:
    stalls = fault is Fault.STALL
    rig = make_rig(request_timeout=0.5, attempts=100) if stalls else make_rig()
    keys = make_keys(2)
    rig.store(keys)
    server.faults["GET"] += [fault]
    assert rig.load(keys) == set(keys)
    asked = count_of(rig.tier.stats(), "requests_total", "get")
    assert asked == 5 or (stalls and asked > 5), "the mark twice, two blocks, one of them again, and what came late"


def test_what_came_as_it_lies_there_is_not_read_again(server: FaultyServer, make_rig: MakeRig) -> None:
    key_1, key_2 = ({"codec": "aes-256-gcm", "encryption": {"keys": {1: digits * 32}}} for digits in ("11", "22"))
    encrypted, plain = make_keys(1, "encrypted"), make_keys(1, "plain")
    assert make_rig(**key_1).store(encrypted).success
    assert make_rig().store(plain).success
    rig = make_rig(**key_2)
    assert rig.load([*encrypted, *plain]) == set()
    assert count_of(rig.tier.stats(), "requests_total", "get") == 3, "the epoch, and two blocks"


LASTING = [
    (Fault.SLOW_DOWN, "slow_down"),
    (Fault.ERROR_500, "unavailable"),
    (Fault.RESET, "broken"),
    (Fault.TRUNCATE, "broken"),
    (Fault.STALL, "timeout"),
    (Fault.DENIED, "denied"),
    (Fault.NO_BUCKET, "no_bucket"),
    (Fault.EXPIRED, "credentials_expired"),
]


@pytest.mark.parametrize(("fault", "reason"), LASTING, ids=lambda value: getattr(value, "name", value))
def test_a_lasting_fault_fails_the_load_with_its_reason_and_ends_with_it(
    server: FaultyServer, make_rig: MakeRig, fault: Fault, reason: str
) -> None:
    stalls = fault is Fault.STALL
    (key,) = make_keys(1)
    assert make_rig().store([key]).success
    rig = make_rig(attempts=3, **({"request_timeout": 0.5} if stalls else {}))
    server.always["GET"] = fault
    (result,) = rig.wait([rig.submit_load([key])])
    assert (result.success, result.reason) == (False, reason)
    server.always.clear()
    if stalls:  # with so short a time-out a slow machine stalls, too
        wait_until(lambda: rig.load([key]) == {key}, what="the end of the fault")
    else:
        assert rig.load([key]) == {key}


def test_bodies_that_stall_are_failures_of_the_bucket_although_it_answers_lookups(
    server: FaultyServer, make_rig: MakeRig
) -> None:
    """As where a network on the way drops long packets."""
    keys = make_keys(2)
    assert make_rig().store(keys).success
    rig = make_rig(attempts=1, request_timeout=2)
    server.always["GET"] = Fault.STALL
    load = rig.submit_load(keys[:1])
    wait_until(
        lambda: count_of(rig.tier.stats(), "requests_total", "get") == 2, what="the requests for the mark and the block"
    )
    assert rig.lookup(keys[1])
    (result,) = rig.wait([load])
    assert (result.success, result.reason) == (False, "timeout")


def test_retries_end_with_the_job(server: FaultyServer, make_rig: MakeRig) -> None:
    """A hundred tries of a request that stalls for half a second, or is told to slow down, take minutes."""
    (key,) = make_keys(1)
    assert make_rig().store([key]).success
    rig = make_rig(attempts=100, job_timeout=0.7, request_timeout=0.5)
    for fault in (Fault.STALL, Fault.SLOW_DOWN):
        server.always["GET"] = fault
        begin = time.monotonic()
        assert rig.load([key]) == set()
        assert time.monotonic() - begin < 15.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(Fault.FLIP, "checksum"), (Fault.LONGER, "bad_length"), (Fault.SHORTER, "bad_length")],
    ids=["flip", "longer", "shorter"],
)
def test_damage_that_stays_is_a_counted_miss_and_deleted(
    server: FaultyServer, make_rig: MakeRig, fault: Fault, reason: str
) -> None:
    rig = make_rig()
    (key,) = make_keys(1)
    rig.store([key])
    server.always["GET"] = fault
    (result,) = rig.wait([rig.submit_load([key])])
    assert (result.success, result.reason) == (False, "checksum")
    assert rig.tier.stats()["corrupt_blocks_total"] == {reason: 1}
    assert not rig.lookup(key)
    assert not any("/blocks/" in name for name in server.objects)
    server.always.clear()
    assert rig.store([key]).success
    assert rig.load([key]) == {key}


def test_a_store_that_is_refused_is_not_answered_as_there(server: FaultyServer, make_rig: MakeRig) -> None:
    rig = make_rig(presence_ttl=60)
    keys = make_keys(2)
    server.always["PUT"] = Fault.DENIED
    (result,) = rig.wait([rig.submit_store(keys)])
    assert (result.success, result.reason, rig.succeeded(result)) == (False, "denied", set())
    assert not any(rig.lookup(key) for key in keys)


def test_lookups_that_fail_are_misses_that_the_breaker_sees(server: FaultyServer, make_rig: MakeRig) -> None:
    rig = make_rig(attempts=2)
    keys = make_keys(2)
    rig.store(keys)
    server.always["HEAD"] = Fault.ERROR_500
    assert not any(rig.lookup(key) for key in keys)
    assert rig.tier.lookup_failures >= 2
    server.always.clear()
    assert all(rig.lookup(key) for key in keys)


@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.STALL, Fault.DENIED], ids=lambda fault: fault.name)
def test_one_object_that_always_fails_costs_its_own_blocks_and_opens_no_breaker(
    server: FaultyServer, fault: Fault
) -> None:
    """Ten prompts of eight blocks, more than the primary tier has; the fourth block of one of them is bad."""
    prompts = [make_keys(8, f"prompt {number}") for number in range(10)]
    blocks = np.zeros((8, 512), np.uint8)
    entry = {
        "type": "s3",
        "bucket": "bucket",
        "endpoint_url": server.url,
        "access_key_id": "key-id",
        "secret_access_key": "secret",
        "request_timeout": "1s",
        "lookup_timeout": "10s",
        "job_timeout": "10s",
        "attempts": 2,
        "presence_ttl": 0,
    }
    stack_file = {
        "version": 1,
        "namespace": {"model": "m", "revision": "r", "dtype": "d"},
        "block": {"bytes": 512, "tokens": 16},
        "primary": {"capacity": 8 * 512},
        "secondary": [entry],
    }
    with open_stack(stack_file) as stack:
        for keys in prompts:
            assert stack.put(keys, blocks, timeout=WAIT_S) == 8
            assert stack.flush(WAIT_S)
        server.bad_objects[digest_of(prompts[5][3]).hex()] = fault
        found = sum(stack.get(keys, blocks, WAIT_S) for _ in range(5) for keys in prompts)
        assert found >= 0.9 * 5 * (9 * 8 + 3)
        counters = stack.counters()["s3"]
        assert (counters["breaker_opened_total"], counters["tier"]["unanswered_blocks_total"] > 0) == (0, True)
        server.always["HEAD"] = server.always["GET"] = fault
        server.bad_objects.clear()

        def has_opened() -> bool:
            for keys in prompts:
                stack.get(keys, blocks, WAIT_S)
            return count_of(stack.counters(), "s3", "breaker_opened_total") > 0

        wait_until(has_opened, what="the breaker's opening where nothing is answered")


def test_a_clock_that_is_wrong_is_corrected_by_the_server_s(server: FaultyServer, make_rig: MakeRig) -> None:
    server.clock_offset_s = HOUR_S
    rig = make_rig()
    keys = make_keys(2)
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)
    assert rig.tier.stats()["retried_requests_total"] <= 2, "once known, the server's time is kept to"


def test_a_bucket_in_another_region_is_followed_there(server: FaultyServer, make_rig: MakeRig) -> None:
    server.region = "eu-west-1"
    rig = make_rig(region="us-east-1")
    keys = make_keys(2)
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)


def test_credentials_that_expired_are_read_anew(
    server: FaultyServer, make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    file.write_text("[kv]\naws_access_key_id = OLD\naws_secret_access_key = old\n")
    rig = make_rig(profile="kv", access_key_id=None, secret_access_key=None)
    keys = make_keys(2)
    assert rig.store(keys).success
    server.valid_key_id = "NEW"
    (result,) = rig.wait([rig.submit_load(keys)])
    assert (result.success, result.reason) == (False, "credentials_expired")
    file.write_text("[kv]\naws_access_key_id = NEW\naws_secret_access_key = new\n")
    wait_until(lambda: rig.load(keys) == set(keys), pause_s=0.1, what="the use of the new credentials")


def test_without_a_server_everything_is_a_miss_and_nothing_waits(make_rig: MakeRig) -> None:
    with socket.socket() as silent:  # which has its port, so that nobody else's server gets it, and does not listen
        silent.bind(("127.0.0.1", 0))
        rig = make_rig(attempts=2, endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        keys = make_keys(4)
        (result,) = rig.wait([rig.submit_store(keys)])
        assert (result.success, result.reason) == (False, "unavailable")
        assert not any(rig.lookup(key) for key in keys)
        assert rig.load(keys) == set()


def test_shutdown_ends_transfers_that_hang(
    server: FaultyServer, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_SHUTDOWN_S", WAIT_S)  # then the threads that are left did not come late
    rig = make_rig(request_timeout=5 * WAIT_S)
    assert isinstance(rig.tier, S3Tier)
    (key,) = make_keys(1)
    rig.store([key])
    server.always["GET"] = Fault.STALL
    rig.submit_load([key])
    wait_until(lambda: count_of(rig.tier.stats(), "requests_total", "get") == 3, what="the transfer that hangs")
    rig.tier.shutdown()
    assert not any(thread.is_alive() for thread in rig.tier._worker_threads)
