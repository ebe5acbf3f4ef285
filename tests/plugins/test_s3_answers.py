"""Answers that are not those of a plain S3: what comes of them costs no stored block, and ends by the deadline."""

from __future__ import annotations

import email.utils
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiered_kv.counters import count_of
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.rig import TierRig, block_content, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv.toolkit.epoch import EpochMark
from tiered_kv.toolkit.record import encode_record
from tiered_kv.toolkit.resolver import Addresses, addresses_of
from tiered_kv_s3 import connection as connection_module
from tiered_kv_s3.connection import Connection, Patience
from tiered_kv_s3.endpoint import Endpoint, Proxy, tls_context
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import Verdict

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3.tier import S3Tier

Answerer = Callable[[str, str, dict[str, str], bytes], bytes]
"""From method, target, headers and body to the bytes of an answer; no bytes close the connection."""

BLOCK_BYTES = 4096
WAIT_S = 60.0
"""How long a job or a lookup may take, so that what never ends fails a test."""


EPOCH = "00000000000000aa"


class ScriptedServer:
    """Answers each request with what the test's function returns, but for the mark of the epoch, which is a day old."""

    def __init__(self) -> None:
        self.answer: Answerer = lambda method, target, headers, body: answer(404)
        self.seen: list[tuple[str, str]] = []
        self.has_mark = True
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def stop(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listening.close()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reading:
            try:
                while line := reading.readline():
                    method, target, _ = line.decode().split()
                    headers = dict(
                        field.decode().strip().lower().split(": ", 1) for field in iter(reading.readline, b"\r\n")
                    )
                    body = reading.read(int(headers.get("content-length", "0")))
                    self.seen.append((method, target))
                    asks_for_mark = self.has_mark and method == "GET" and target.endswith("/epoch")
                    said = mark_answer() if asks_for_mark else self.answer(method, target, headers, body)
                    if not said:
                        return
                    connection.sendall(said)
                    if method == "CONNECT":  # there is nothing behind the tunnel
                        return
            except OSError:
                return


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", f"date: {email.utils.formatdate(usegmt=True)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error(status: int, code: str) -> bytes:
    return answer(status, f"<Error><Code>{code}</Code></Error>".encode())


def mark_answer() -> bytes:
    return answer(200, EpochMark(0, EPOCH).encode(), last_modified=hours_ago(24))


def hours_ago(hours: float) -> str:
    return email.utils.formatdate(time.time() - hours * 3600, usegmt=True)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def open_rig(server: ScriptedServer) -> Iterator[Callable[..., TierRig]]:
    """Opens tiers with so much patience that a slow machine makes no answer of theirs another."""
    rigs: list[TierRig] = []

    def open_one(**changes: object) -> TierRig:
        entry = {
            "bucket": "bucket",
            "endpoint_url": server.url,
            "access_key_id": "id",
            "secret_access_key": "secret",
            "connections": 4,
            "job_timeout": 10 * WAIT_S,
            "request_timeout": WAIT_S,
            "lookup_timeout": WAIT_S,
            **changes,
        }
        settings = S3Settings.model_validate({name: value for name, value in entry.items() if value is not None})
        rigs.append(
            TierRig(
                lambda spec, view: S3Tier(spec, view, "s3", settings),
                num_blocks=256,
                block_bytes=BLOCK_BYTES,
                wait_s=2 * WAIT_S,
            )
        )
        return rigs[-1]

    yield open_one
    for rig in rigs:
        rig.close()


def ask(rig: TierRig, count: int) -> list[bool]:
    """Look many keys up for one request."""
    return rig.lookup_all(make_keys(count))


@pytest.mark.parametrize("strange", ["chunked", "partial", "unlike"])
def test_an_answer_of_another_form_deletes_no_block_and_makes_no_epoch(
    server: ScriptedServer, open_rig: Callable[..., TierRig], strange: str
) -> None:
    rig = open_rig(attempts=2)
    (key,) = make_keys(1)
    header, payload = encode_record(key, memoryview(bytes(BLOCK_BYTES)), rig.spec.namespace_digest)
    record = header + bytes(payload)

    def reply(method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        if method != "GET" or "/blocks/" not in target:
            return answer(404)
        if strange == "partial":
            return answer(206, record)
        if strange == "unlike":
            return answer(204)
        return b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % len(record) + record + b"\r\n0\r\n\r\n"

    server.answer = reply
    (result,) = rig.wait([rig.submit_load([key])])
    assert (result.success, result.reason) == (False, "no_length" if strange == "chunked" else "broken")
    assert not [method for method, _ in server.seen if method == "DELETE"]
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 0


def test_the_epoch_does_not_grow_too_old(server: ScriptedServer, open_rig: Callable[..., TierRig]) -> None:
    server.answer = lambda method, target, headers, body: answer(200 if method == "PUT" else 404)
    assert open_rig(ttl=3600).store(make_keys(2)).success, "a namespace that was reset a day ago can be used"
    assert any(f"/blocks/{EPOCH}/" in target for method, target in server.seen if method == "PUT")


@pytest.mark.parametrize(("age_hours", "renewals"), [(4, 0), (6, 1)])
def test_a_block_that_is_loaded_past_half_its_time_is_renewed_by_a_copy_on_the_server(
    server: ScriptedServer, open_rig: Callable[..., TierRig], age_hours: float, renewals: int
) -> None:
    rig = open_rig(ttl=10 * 3600)
    (key,) = make_keys(1)
    header, payload = encode_record(key, memoryview(block_content(key, BLOCK_BYTES)), rig.spec.namespace_digest)
    copied: list[str] = []

    def reply(method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        if "x-amz-copy-source" in headers:
            copied.append(f"{target} from {headers['x-amz-copy-source']} {headers['x-amz-metadata-directive']}")
            return answer(200, b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
        return answer(200, header + bytes(payload), last_modified=hours_ago(age_hours))

    server.answer = reply
    assert rig.load([key]) == {key}
    wait_until(lambda: rig.tier.stats()["renewed_blocks_total"] == renewals, what="the copy")
    rig.tier.shutdown()
    name = Naming("tiered-kv", rig.spec.namespace_digest).block(EPOCH, key)
    assert copied == [f"/bucket/{name} from bucket/{name} replace"] * renewals


def test_who_may_not_write_finds_nothing_in_a_bucket_without_a_mark_and_learns_why(
    server: ScriptedServer, open_rig: Callable[..., TierRig]
) -> None:
    def reply(method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        if "list-type" in target:
            return answer(200, b"<ListBucketResult></ListBucketResult>")
        if target.endswith("/epoch") and method == "GET":
            return answer(404)
        return error(403, "AccessDenied") if method == "PUT" else answer(200)

    server.answer = reply
    server.has_mark = False
    rig = open_rig()
    results = rig.wait([rig.submit_load(make_keys(1)), rig.submit_store(make_keys(1))])
    assert [(result.success, result.reason) for result in results] == [(False, "denied")] * 2
    assert ask(rig, 2) == [False, False]
    with pytest.raises(TierUnavailableError, match="/epoch cannot be written: denied"):
        rig.tier.describe()
    server.has_mark = True
    assert ask(rig, 1) == [True], "what it may read it finds"


def test_lookups_learn_that_credentials_have_expired(
    server: ScriptedServer, open_rig: Callable[..., TierRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    file.write_text("[kv]\naws_access_key_id = OLD\naws_secret_access_key = old\n")
    valid = "OLD"

    def reply(method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        if f"credential={valid}/".lower() in headers["authorization"]:
            return answer(200) if "/blocks/" in target else answer(404)
        return answer(400) if method == "HEAD" else error(400, "ExpiredToken")

    server.answer = reply
    rig = open_rig(profile="kv", access_key_id=None, secret_access_key=None, presence_ttl=0)
    assert ask(rig, 2) == [True, True]
    file.write_text("[kv]\naws_access_key_id = NEW\naws_secret_access_key = new\n")
    valid = "NEW"
    assert ask(rig, 2) == [True, True], "nothing but HEAD was asked, whose answers have no body"


def test_connections_that_are_closed_between_requests_cost_no_lookups_their_speed(
    server: ScriptedServer, open_rig: Callable[..., TierRig]
) -> None:
    """A server that closes connections after some requests each, as nginx does.

    Eight requests are not answered, and asked again. They get no answer until all eight are there: one at a time they
    would wait for ever.
    """
    lock = threading.Lock()
    asked: Counter[str] = Counter()
    again = 0
    side_by_side = threading.Event()

    def reply(method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        nonlocal again
        with lock:
            asked[target] += 1
            closes = 100 <= asked.total() < 108
            again += asked[target] > 1
            has_to_wait = asked[target] > 1
            if again == 8:
                side_by_side.set()
        if has_to_wait:
            side_by_side.wait(WAIT_S)
        return b"" if closes else answer(200)

    server.answer = reply
    rig = open_rig()
    assert isinstance(rig.tier, S3Tier)
    names = [f"block {number}" for number in range(200)]
    assert rig.tier._bucket.are_there(names, time.monotonic() + 2 * WAIT_S) == [Verdict.DONE] * 200
    assert side_by_side.is_set(), "they were asked again one at a time"


@pytest.mark.parametrize("region", ["Frankfurt!", "eu west"])
def test_a_region_that_is_none_is_a_refusal(
    server: ScriptedServer, open_rig: Callable[..., TierRig], region: str
) -> None:
    server.answer = lambda method, target, headers, body: answer(301, x_amz_bucket_region=region)
    rig = open_rig()
    (failed,) = rig.wait([rig.submit_load(make_keys(1))])
    assert failed.reason == "refused"
    with pytest.raises(TierUnavailableError, match="refuse"):
        rig.tier.describe()


def test_all_addresses_of_a_server_together_get_the_time_of_one_request(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    waited_s: list[float] = []

    class UnansweredSocket(socket.socket):
        """A socket whose attempts to connect take all the time that they are given, by the test's clock."""

        def connect(self, address: object) -> None:
            timeout_s = self.gettimeout()
            assert timeout_s is not None, "it would wait for ever"
            waited_s.append(timeout_s)
            clock.advance(timeout_s)
            raise TimeoutError

    address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 8)
    monkeypatch.setattr(socket, "socket", UnansweredSocket)
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=clock))
    with pytest.raises(TimeoutError):
        Connection(Endpoint("server", 80, False, "/b"), None, Patience(clock() + 0.5, 0.4))
    assert waited_s == pytest.approx([0.4, 0.1])


def test_the_look_up_of_a_name_keeps_the_deadline_and_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    may_answer = threading.Event()
    look_up = socket.getaddrinfo

    def hang(host: str, port: int, **more: int) -> Addresses:
        if not more.get("flags"):
            asked.append(host)
            assert may_answer.wait(WAIT_S)
            host = "127.0.0.1"
        return look_up(host, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            addresses_of("bucket.invalid", 80, 0.01)
    assert asked == ["bucket.invalid"]
    may_answer.set()
    assert addresses_of("bucket.invalid", 80, WAIT_S)[0][4] == ("127.0.0.1", 80)
    wait_until(lambda: not any("lookup" in thread.name for thread in threading.enumerate()), what="the threads' end")


def test_a_name_that_is_none_is_a_server_without_an_address() -> None:
    with pytest.raises(OSError, match="is no name"):
        addresses_of("a" * 64 + ".invalid", 80, WAIT_S)


def test_the_proxy_of_the_environment_is_used_and_no_proxy_is_heeded(
    server: ScriptedServer, open_rig: Callable[..., TierRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url.replace("//", "//user:pass%20word@"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    authorizations: set[str] = set()

    def reply(method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        authorizations.add(headers.get("proxy-authorization", ""))
        return answer(200 if method == "PUT" else 404)

    server.answer = reply
    assert open_rig().store(make_keys(1)).success
    assert authorizations == {""}
    assert open_rig(endpoint_url="http://bucket.invalid:9000").store(make_keys(1)).success
    assert server.seen[-1][1].startswith("http://bucket.invalid:9000/bucket/tiered-kv/")
    assert authorizations == {"", "basic dxnlcjpwyxnzihdvcmq="}, "the server of this test lowers headers"


def test_tls_goes_through_a_tunnel_of_the_proxy(server: ScriptedServer) -> None:
    host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
    endpoint = Endpoint("bucket.invalid", 443, True, "/b", Proxy(host, port, "Proxy-Authorization: Basic eA==\r\n"))
    patience = Patience(time.monotonic() + WAIT_S, WAIT_S)
    server.answer = lambda method, target, headers, body: answer(403)
    with pytest.raises(ConnectionRefusedError):
        Connection(endpoint, tls_context(None), patience)
    server.answer = lambda method, target, headers, body: answer(200)
    with pytest.raises(OSError, match=r"(?i)ssl|eof|closed|reset"):  # of the TLS handshake
        Connection(endpoint, tls_context(None), patience)
    assert server.seen == [("CONNECT", "bucket.invalid:443")] * 2


CREDENTIAL_PROGRAM = """
import datetime, json, pathlib, sys, time
hang = pathlib.Path(sys.argv[1])
while hang.exists():
    time.sleep(0.02)
expires = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=300)
print(json.dumps({"Version": 1, "AccessKeyId": "id", "SecretAccessKey": "s", "Expiration": expires.isoformat()}))
"""


@pytest.mark.slow
def test_a_provider_of_credentials_that_hangs_holds_nothing_up(
    server: ScriptedServer, open_rig: Callable[..., TierRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    hang, program = tmp_path / "hang", tmp_path / "program.py"
    program.write_text(CREDENTIAL_PROGRAM)
    config = tmp_path / "config"
    config.write_text(f"[profile kv]\ncredential_process = {sys.executable} {program} {hang}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    server.answer = lambda method, target, headers, body: answer(200 if method == "PUT" else 404)
    changes = {"profile": "kv", "access_key_id": None, "secret_access_key": None}
    rig = open_rig(**changes)
    assert rig.store(make_keys(2)).success
    hang.touch()
    try:
        for number in range(4):  # they last for five minutes more, and the provider would like to renew them
            assert rig.store(make_keys(2, f"later-{number}")).success
        newcomer = open_rig(**changes)
        # Whoever waited for the provider would wait until the rig gives up.
        (result,) = newcomer.wait([newcomer.submit_store(make_keys(2), deadline=time.monotonic() + 0.5)])
        assert not result.success
    finally:
        hang.unlink()
    wait_until(lambda: newcomer.store(make_keys(2)).success, what="its recovery")
