"""Unusual answers cost no stored block, and the requests end by their deadlines."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.fake_s3 import (
    BLOCK_BYTES,
    EPOCH,
    WAIT_S,
    FakeS3,
    OpenRig,
    Reply,
    Request,
    Then,
    answer,
    error,
    hours_ago,
    open_rig,
    server,
)
from tiered_kv.errors import TierUnavailableError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import ManualClock, wait_until
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.toolkit.objects.naming import Naming
from tiered_kv.toolkit.record import encode_record
from tiered_kv.toolkit.resolver import Addresses, addresses_of
from tiered_kv_s3 import connection as connection_module
from tiered_kv_s3.connection import Endpoint, Patience, Proxy
from tiered_kv_s3.pool import open_connection, tls_context

pytest.importorskip("boto3", reason="boto3 is not installed")

__all__ = ["open_rig", "server"]

PROFILE = {"profile": "kv", "access_key_id": None, "secret_access_key": None}


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for the credentials of `PROFILE`; the environment has none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    return file


@pytest.mark.parametrize("form", ["cut off", "partial", "empty"])
def test_an_answer_of_another_form_deletes_no_block(server: FakeS3, open_rig: OpenRig, form: str) -> None:
    rig = open_rig(attempts=2)
    (key,) = make_keys(1)
    header, payload = encode_record(key, memoryview(bytes(BLOCK_BYTES)), rig.spec.namespace_digest)
    record = header + bytes(payload)
    head = b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % len(record)
    replies: dict[str, Reply] = {
        "cut off": Then(head + record[:-9], "close"),
        "partial": answer(206, record),
        "empty": answer(204),
    }
    reply = replies[form]
    server.reply = lambda request: reply if request.method == "GET" and "/blocks/" in request.target else None
    (result,) = rig.wait([rig.submit_load([key])])
    assert (result.success, result.reason) == (False, "broken")
    assert server.count("DELETE") == 0
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 0


@pytest.mark.parametrize(("age_hours", "renewals"), [(4, 0), (6, 1)])
def test_a_block_that_is_loaded_past_half_its_time_is_renewed_by_a_copy_on_the_server(
    server: FakeS3, open_rig: OpenRig, age_hours: float, renewals: int
) -> None:
    """The mark of the epoch is a day old, and does not expire."""
    rig = open_rig(ttl=10 * 3600)
    (key,) = make_keys(1)
    age = [age_hours]
    header, payload = encode_record(key, memoryview(block_content(key, BLOCK_BYTES)), rig.spec.namespace_digest)
    copied: list[str] = []

    def reply(request: Request) -> bytes:
        if source := request.headers.get("x-amz-copy-source"):
            age[0] = 0.0
            copied.append(f"{request.target} from {source} {request.headers['x-amz-metadata-directive']}")
            return answer(200, b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
        return answer(200, header + bytes(payload), last_modified=hours_ago(age[0]))

    server.reply = reply
    assert rig.load([key]) == {key}
    wait_until(lambda: rig.tier.stats()["renewed_blocks_total"] == renewals, what="the copy")
    rig.tier.shutdown()
    name = Naming("tiered-kv", rig.spec.namespace_digest).block(EPOCH, key)
    assert copied == [f"/bucket/{name} from bucket/{name} replace"] * renewals


def test_credentials_that_may_only_read_need_a_bucket_with_a_mark(server: FakeS3, open_rig: OpenRig) -> None:
    def reply(request: Request) -> bytes | None:
        if request.target.endswith("/epoch") and request.method == "GET":
            return answer(404)
        return error(403, "AccessDenied") if request.method == "PUT" else answer(200)

    server.reply = reply
    server.has_mark = False
    rig = open_rig()
    results = rig.wait([rig.submit_load(make_keys(1)), rig.submit_store(make_keys(1))])
    assert [(result.success, result.reason) for result in results] == [(False, "denied")] * 2
    assert rig.lookup_all(make_keys(2)) == [False, False]
    with pytest.raises(
        TierUnavailableError,
        match=r"/bucket refuses the request to put \(AccessDenied\); give the credentials s3:GetObject",
    ):
        rig.tier.describe()
    server.has_mark = True
    assert rig.lookup_all(make_keys(1)) == [True]


def test_a_server_without_conditional_writes_gets_a_mark(server: FakeS3, open_rig: OpenRig) -> None:
    server.has_mark = False
    server.reply = lambda request: error(501, "NotImplemented") if "if-none-match" in request.headers else None
    assert open_rig().store(make_keys(1)).success
    assert [target for target in server.objects if target.endswith("/epoch")]


def test_credentials_that_have_expired_are_read_anew(server: FakeS3, open_rig: OpenRig, profile: Path) -> None:
    profile.write_text("[kv]\naws_access_key_id = OLD\naws_secret_access_key = old\n")
    valid = "old"

    def reply(request: Request) -> bytes | None:
        return None if f"credential={valid}/" in request.headers["authorization"] else error(400, "ExpiredToken")

    server.reply = reply
    keys = make_keys(2)
    rig = open_rig(**PROFILE)
    assert rig.store(keys).success
    profile.write_text("[kv]\naws_access_key_id = NEW\naws_secret_access_key = new\n")
    valid = "new"
    assert rig.lookup_all(keys) == [True, True], "answers to HEAD have no body that says so"
    assert rig.load(keys) == set(keys)


def test_failed_lookups_are_repeated_in_parallel(server: FakeS3, open_rig: OpenRig) -> None:
    """The server closes the connections of the first eight requests, and answers the repeated ones only together."""
    lock, together = threading.Lock(), threading.Barrier(8)
    failed: set[str] = set()

    def reply(request: Request) -> Reply:
        if request.method != "HEAD":
            return answer(404)
        with lock:
            is_repeated = request.target in failed
            if not is_repeated and len(failed) < 8:
                failed.add(request.target)
                return Then(b"", "close")
        if is_repeated:
            together.wait(WAIT_S)
        return answer(200)

    server.reply = reply
    assert open_rig().lookup_all(make_keys(200)) == [True] * 200


def test_all_addresses_of_a_server_together_get_the_time_of_one_request(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    waited_s: list[float] = []

    class UnansweredSocket(socket.socket):
        """Each attempt to connect takes all of its time, by the test's clock."""

        def connect(self, address: object) -> None:
            timeout_s = self.gettimeout()
            assert timeout_s is not None
            waited_s.append(timeout_s)
            clock.advance(timeout_s)
            raise TimeoutError

    address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 8)
    monkeypatch.setattr(socket, "socket", UnansweredSocket)
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=clock))
    with pytest.raises(TimeoutError):
        open_connection(Endpoint("server", 80, False, "/b"), None, Patience(clock() + 0.5, 0.4))
    assert waited_s == pytest.approx([0.4, 0.1])


def test_the_look_up_of_a_name_ends_by_the_deadline_and_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_invalid_name_has_no_address() -> None:
    with pytest.raises(OSError, match="is no name"):
        addresses_of("a" * 64 + ".invalid", 80, WAIT_S)


def test_the_environment_sets_the_proxy(server: FakeS3, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url.replace("//", "//user:pass%20word@"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert open_rig().store(make_keys(1)).success
    assert not any("proxy-authorization" in request.headers for request in server.seen)
    assert open_rig(endpoint_url="http://bucket.invalid:9000").store(make_keys(1)).success
    assert server.seen[-1].target.startswith("http://bucket.invalid:9000/bucket/tiered-kv/")
    assert server.seen[-1].headers["proxy-authorization"] == "basic dxnlcjpwyxnzihdvcmq=", "this server lowers headers"


def test_tls_goes_through_a_tunnel_of_the_proxy(server: FakeS3) -> None:
    host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
    endpoint = Endpoint("bucket.invalid", 443, True, "/b", Proxy(host, port, "Proxy-Authorization: Basic eA==\r\n"))
    patience = Patience(time.monotonic() + WAIT_S, WAIT_S)
    server.reply = lambda request: answer(403)
    with pytest.raises(ConnectionRefusedError):
        open_connection(endpoint, tls_context(None), patience)
    server.reply = lambda request: Then(answer(200), "close")  # there is nothing behind the tunnel
    with pytest.raises(OSError, match=r"(?i)ssl|eof|closed|reset"):  # of the TLS handshake
        open_connection(endpoint, tls_context(None), patience)
    assert [(each.method, each.target) for each in server.seen] == [("CONNECT", "bucket.invalid:443")] * 2


CREDENTIAL_PROGRAM = """
import datetime, json, pathlib, sys, time
hang = pathlib.Path(sys.argv[1])
while hang.exists():
    time.sleep(0.02)
expires = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=300)
print(json.dumps({"Version": 1, "AccessKeyId": "id", "SecretAccessKey": "s", "Expiration": expires.isoformat()}))
"""


@pytest.mark.slow
def test_a_hanging_provider_of_credentials_delays_nothing(
    server: FakeS3, open_rig: OpenRig, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv_s3.access.REFRESH_S", 0.0)
    hang, program = tmp_path / "hang", tmp_path / "program.py"
    program.write_text(CREDENTIAL_PROGRAM)
    config = tmp_path / "config"
    config.write_text(f"[profile kv]\ncredential_process = {sys.executable} {program} {hang}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    rig = open_rig(**PROFILE)
    assert rig.store(make_keys(2)).success
    hang.touch()
    try:
        for number in range(4):  # the credentials last for five minutes more, and the provider wants to renew them
            assert rig.store(make_keys(2, f"later-{number}")).success
        newcomer = open_rig(**PROFILE)
        (result,) = newcomer.wait([newcomer.submit_store(make_keys(2), deadline=time.monotonic() + 0.5)])
        assert not result.success
    finally:
        hang.unlink()
    wait_until(lambda: newcomer.store(make_keys(2)).success, what="its recovery")


@pytest.mark.parametrize(
    ("status", "code"),
    [(507, "XMinioStorageFull"), (400, "XMinioAdminBucketQuotaExceeded"), (403, "QuotaExceeded"), (507, "Other")],
)
def test_a_full_server_stores_nothing_and_goes_on_serving(
    server: FakeS3, open_rig: OpenRig, status: int, code: str
) -> None:
    rig = open_rig()
    before, after = make_keys(1, "before"), make_keys(1, "after")
    assert rig.store(before).success
    puts = server.count("PUT")
    server.reply = lambda request: error(status, code) if request.method == "PUT" else None
    result = rig.store(after)
    assert (result.success, result.reason) == (False, "no_space")
    assert server.count("PUT") == puts + 1  # another attempt would not help
    assert f"has no room left ({code}" in str(rig.tier.explain_failure("no_space"))
    assert rig.load(before) == set(before)
