"""Servers that speak S3's protocol in another way: the tier works where boto3 works, and says what a server refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_s3 import FakeS3, OpenRig, Reply, Request, Then, answer, error, open_rig, server
from tests.support.stacks import stack_of
from tiered_kv.base import OffloadKey
from tiered_kv.cli import main
from tiered_kv.counters import count_of
from tiered_kv.stack import open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv.tiering.administration import Verification
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv.toolkit.resolver import Addresses, addresses_of
from tiered_kv_s3 import pool
from tiered_kv_s3.administration import S3Administration
from tiered_kv_s3.settings import S3Settings

pytest.importorskip("boto3", reason="boto3 is not installed")

__all__ = ["open_rig", "server"]

BLOCK_BYTES = 512
BLOCKS = 12
KEPT = 8
"""Blocks that the capacity allows."""
WAIT_S = 60.0
PATIENCE = {"job_timeout": WAIT_S, "request_timeout": WAIT_S, "lookup_timeout": WAIT_S}

Served = Callable[[Request], bytes]
Odd = Callable[[Request, Served], Reply]
ODD: dict[str, Odd] = {}
"""By name: how a server answers, from the request and a bucket's usual answer."""


def odd(row: Odd) -> Odd:
    ODD[row.__name__] = row
    return row


def parts_of(reply: bytes) -> tuple[bytes, bytes]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return head, body


def without(head: bytes, *names: bytes) -> bytes:
    return b"\r\n".join(line for line in head.split(b"\r\n") if line.lower().partition(b":")[0] not in names)


def is_listing(request: Request) -> bool:
    return request.method == "GET" and "prefix=" in request.target


def names_in(request: Request) -> int:
    return request.body.count(b"<Key>")


@odd
def chunked_bodies(request: Request, served: Served) -> Reply:
    head, body = parts_of(served(request))
    if request.method == "HEAD" or head.startswith(b"HTTP/1.1 204"):
        return served(request)
    chunks = [body[at : at + 300] for at in range(0, len(body), 300)]
    coded = b"".join(b"%X;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = without(head, b"content-length") + b"\r\nTransfer-Encoding: chunked\r\nTrailer: x-amz-checksum-crc32"
    return head + b"\r\n\r\n" + coded + b"0\r\nx-amz-checksum-crc32: AAAAAA==\r\n\r\n"


@odd
def http_1_0_without_lengths(request: Request, served: Served) -> Reply:
    head, body = parts_of(served(request))
    return Then(without(head, b"content-length").replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n\r\n" + body, "close")


@odd
def closed_connections(request: Request, served: Served) -> Reply:
    head, body = parts_of(served(request))
    return Then(head + b"\r\nConnection: close\r\n\r\n" + body, "close")


@odd
def untidy_heads(request: Request, served: Served) -> Reply:
    head, body = parts_of(served(request))
    lines = [line.replace(b": ", b":\t  ") + b" " for line in head.split(b"\r\n")[1:]]
    first = head.split(b"\r\n")[0].rpartition(b" ")[0]  # without words after the status
    return b"\n".join([first, *lines, b"X-Long: a", b"  and more", b"", b""]) + body


@odd
def interim_answers(request: Request, served: Served) -> Reply:
    first = b"HTTP/1.1 100 Continue\r\n\r\n" if request.body else b""
    return first + served(request)


@odd
def no_dates(request: Request, served: Served) -> Reply:
    head, body = parts_of(served(request))
    return without(head, b"date", b"last-modified") + b"\r\n\r\n" + body


@odd
def bare_listings(request: Request, served: Served) -> Reply:
    """Neither sizes nor dates."""
    reply = served(request)
    if not is_listing(request):
        return reply
    return answer(200, re.sub(rb"<(Size|LastModified)>[^<]*</\1>", b"", parts_of(reply)[1]))


@odd
def listings_in_a_namespace(request: Request, served: Served) -> Reply:
    reply = served(request)
    if not is_listing(request):
        return reply
    text = parts_of(reply)[1].replace(b"Result>", b'Result xmlns="http://s3.amazonaws.com/doc/2006-03-01/">', 1)
    return answer(200, b'<?xml version="1.0" encoding="UTF-8"?>\n' + text)


@odd
def encoded_names(request: Request, served: Served) -> Reply:
    reply = served(request)
    if not is_listing(request) or "encoding-type=url" not in request.target:
        return reply
    text = re.sub(rb"<Key>.*?</Key>", lambda found: found[0].replace(b"/t", b"%2Ft"), parts_of(reply)[1])
    return answer(200, text.replace(b"<IsTruncated>", b"<EncodingType>url</EncodingType><IsTruncated>", 1))


@odd
def pages_without_a_token(request: Request, served: Served) -> Reply:
    reply = served(request)
    if not is_listing(request):
        return reply
    return answer(200, re.sub(rb"<Next\w+>[^<]*</Next\w+>", b"", parts_of(reply)[1]))


@odd
def listings_of_version_1(request: Request, served: Served) -> Reply:
    """What version 2 and the versions have is ignored."""
    if not is_listing(request):
        return served(request)
    target = re.sub("(continuation-token|start-after|key-marker|versions)=?[^&]*", "", request.target)
    text = parts_of(served(Request("GET", target, request.headers, b"")))[1]
    return answer(200, re.sub(rb"<Next\w+>[^<]*</Next\w+>", b"", text))


@odd
def no_listings_of_version_2(request: Request, served: Served) -> Reply:
    return error(400, "InvalidArgument") if "list-type=2" in request.target else served(request)


def without_versions(reply: Reply) -> Odd:
    return lambda request, served: reply if "versions" in request.target else served(request)


ODD["versions_not_implemented"] = without_versions(error(501, "NotImplemented"))
ODD["versions_not_allowed"] = without_versions(answer(405, b"<html>Method Not Allowed</html>"))
ODD["versions_as_an_empty_page"] = without_versions(answer(200, b"<ListBucketResult/>"))


def without_deleting_many(reply: Reply) -> Odd:
    return lambda request, served: reply if request.method == "POST" else served(request)


ODD["no_multi_delete"] = without_deleting_many(error(501, "NotImplemented"))
ODD["multi_delete_not_allowed"] = without_deleting_many(error(405, "MethodNotAllowed"))
ODD["multi_delete_as_another_request"] = without_deleting_many(answer(404, b"<html>Not Found</html>"))


@odd
def deletes_that_need_md5(request: Request, served: Served) -> Reply:
    wanted = base64.b64encode(hashlib.md5(request.body).digest()).decode().lower()
    if request.method == "POST" and request.headers.get("content-md5", "") != wanted:
        return error(400, "MissingContentMD5")
    return served(request)


@odd
def stores_that_need_md5(request: Request, served: Served) -> Reply:
    """As a bucket with a default retention."""
    wanted = base64.b64encode(hashlib.md5(request.body).digest()).decode().lower()
    if request.method == "PUT" and request.body and request.headers.get("content-md5", "") != wanted:
        text = b"Content-MD5 OR x-amz-checksum- HTTP header is required for requests with Object Lock parameters"
        return answer(400, b"<Error><Code>InvalidRequest</Code><Message>" + text + b"</Message></Error>")
    return served(request)


@odd
def stores_that_need_signed_bodies(request: Request, served: Served) -> Reply:
    found = request.headers.get("x-amz-content-sha256", "")
    if request.method == "PUT" and request.body and found != hashlib.sha256(request.body).hexdigest():
        return error(400, "XAmzContentSHA256Mismatch")
    return served(request)


@odd
def no_conditional_writes(request: Request, served: Served) -> Reply:
    return error(501, "NotImplemented") if "if-none-match" in request.headers else served(request)


@odd
def deleted_objects_are_missing(request: Request, served: Served) -> Reply:
    """As Google's; it deletes one at a time."""
    if request.method == "POST":
        return error(400, "InvalidArgument")
    if request.method == "DELETE" and request.headers.get("x-seen") is None and "/0000000000000000/" in request.target:
        return error(404, "NoSuchKey")
    return served(request)


@odd
def another_region(request: Request, served: Served) -> Reply:
    if "/eu-west-9/" in request.headers.get("authorization", ""):
        return served(request)
    body = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-9</Region></Error>"
    return answer(400, body) if request.method == "GET" else answer(301, body, x_amz_bucket_region="eu-west-9")


def at_first(reply: Reply, method: str) -> Callable[[], Odd]:
    """Give `reply` to the first request of a method for a block or for several."""

    def make() -> Odd:
        seen: list[str] = []

        def row(request: Request, served: Served) -> Reply:
            is_first = request.method == method and (method == "POST" or "/blocks/" in request.target) and not seen
            seen.extend([request.target] * is_first)
            return reply if is_first else served(request)

        return row

    return make


AT_FIRST: dict[str, Callable[[], Odd]] = {
    "store_that_fails_with_status_200": at_first(answer(200, b"<Error><Code>InternalError</Code></Error>"), "PUT"),
    "load_that_fails_with_status_200": at_first(answer(200, b"<Error><Code>InternalError</Code></Error>"), "GET"),
    "delete_that_fails_with_status_200": at_first(answer(200, b"<Error><Code>SlowDown</Code></Error>"), "POST"),
    "slow_down_in_html": at_first(answer(503, b"<html>Service Unavailable</html>"), "PUT"),
}


@pytest.fixture
def odd_server(request: pytest.FixtureRequest, server: FakeS3) -> FakeS3:
    """A server that is odd from the first request on, with an empty bucket and short pages."""
    row = ODD[request.param] if request.param in ODD else AT_FIRST[request.param]()
    server.has_mark = False
    server.page_objects = 5
    server.reply = lambda asked: row(asked, server.served)
    return server


def config_of(server: FakeS3, **changes: object) -> dict[str, object]:
    entry = {**server.entry, **PATIENCE, "sweep_interval": "50ms", **changes}
    return stack_of({"capacity": KEPT * (BLOCK_BYTES + HEADER_BYTES), **entry}, blocks=BLOCKS, block_bytes=BLOCK_BYTES)


def content(keys: list[OffloadKey]) -> np.ndarray:
    return np.stack([np.frombuffer(hashlib.sha512(key).digest() * 8, np.uint8) for key in keys])


def stored_in(server: FakeS3) -> set[str]:
    return {target for target in server.objects if "/blocks/" in target}


QUICK = ("chunked_bodies", "deletes_that_need_md5", "no_multi_delete")
ROWS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*ODD, *AT_FIRST)]


@pytest.mark.parametrize("odd_server", ROWS, indirect=True)
def test_every_operation_works_on_an_odd_server(odd_server: FakeS3, tmp_path: Path) -> None:
    keys = make_keys(BLOCKS)
    unlimited = config_of(odd_server, capacity=None)
    with open_stack(unlimited) as stack:
        assert stack.put(keys, content(keys), timeout=WAIT_S) == BLOCKS
        assert stack.flush(WAIT_S)
    assert len(stored_in(odd_server)) == BLOCKS
    with open_stack(unlimited) as stack:
        found = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        assert stack.get(keys, found, timeout=WAIT_S) == BLOCKS
        assert (found == content(keys)).all()
        assert count_of(stack.counters(), "s3", "tier", "corrupt_blocks_total") == 0
        digest = stack.config.identity.digest.hex()
    limited = config_of(odd_server)
    with open_stack(limited) as stack:
        stack.put(make_keys(1, "one more"), content(make_keys(1, "one more")), timeout=WAIT_S)
        wait_until(lambda: len(stored_in(odd_server)) <= KEPT, what="a sweep")
    file = tmp_path / "stack.yaml"
    file.write_text(json.dumps(limited))
    assert main(["check", str(file)]) == 0
    settings = S3Settings.model_validate(limited["secondary"][0])  # type: ignore[index]
    with closing(S3Administration(settings)) as administration:
        verification = Verification(BLOCK_BYTES)
        deadline = time.monotonic() + WAIT_S
        (namespace,) = administration.survey(deadline).namespaces
        administration.verify(digest, verification, deadline)
        assert (namespace.blocks, verification.blocks, verification.ok) == (KEPT, KEPT, True)
        purged = administration.purge(digest, deadline)
        assert (purged.blocks, purged.left, stored_in(odd_server)) == (KEPT, (), set())
        assert administration.survey(deadline).namespaces == ()


def words(status: int, code: str, message: str) -> bytes:
    return answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


def logged(caplog: pytest.LogCaptureFixture, operation: str) -> list[str]:
    return [text for text in caplog.messages if f"request to {operation} failed" in text]


REFUSED_ONE = (
    b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code><Message>it is retained</Message></Error>"
    b"</DeleteResult>"
)


@pytest.mark.parametrize("reply", [words(403, "AccessDenied", "it is retained"), answer(200, REFUSED_ONE)])
def test_a_bucket_that_refuses_deletes_says_so_in_the_log_the_counters_check_and_purge(
    server: FakeS3, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, reply: bytes
) -> None:
    server.reply = lambda request: reply if request.method in ("POST", "DELETE") else None
    keys = make_keys(BLOCKS)
    with open_stack(config_of(server)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)

        def failed(times: int) -> bool:
            return count_of(stack.counters(), "s3", "tier", "failed_sweeps_total") >= times

        wait_until(lambda: failed(2), what="two sweeps")
        assert count_of(stack.counters(), "s3", "tier", "failed_requests_total", "delete", "AccessDenied") >= 2
    (text,) = logged(caplog, "delete")
    assert "AccessDenied" in text
    assert "it is retained" in text
    file = tmp_path / "stack.yaml"
    file.write_text(json.dumps(config_of(server)))
    assert main(["check", str(file)]) == 1
    assert "AccessDenied" in capsys.readouterr().out
    assert main(["purge", str(file), "--yes"]) == 1
    assert "AccessDenied" in capsys.readouterr().out


def test_a_copy_that_leaves_an_object_as_old_as_it_was_is_no_renewal(
    server: FakeS3, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(2)
    with open_stack(config_of(server, capacity=None)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)
    written_s = time.time() - 6 * 3600
    server.written_s = dict.fromkeys(server.objects, written_s)
    copied = answer(200, b"<CopyObjectResult><LastModified>2999-01-01T00:00:00Z</LastModified></CopyObjectResult>")
    server.reply = lambda request: copied if "x-amz-copy-source" in request.headers else None
    with open_stack(config_of(server, capacity=None, ttl="10h")) as stack:
        assert stack.get(keys, np.zeros((2, BLOCK_BYTES), np.uint8), timeout=WAIT_S) == 2
        wait_until(lambda: count_of(stack.counters(), "s3", "tier", "failed_renewals_total") == 2, what="the copies")
        assert count_of(stack.counters(), "s3", "tier", "renewed_blocks_total") == 0
    assert len(logged(caplog, "copy")) == 1


def test_the_first_refusal_of_each_operation_is_logged_with_the_words_of_the_server(
    server: FakeS3, caplog: pytest.LogCaptureFixture
) -> None:
    skewed = words(403, "RequestTimeTooSkewed", "The difference to the current time is too large, said secret &amp; id")
    server.reply = lambda request: skewed
    keys = make_keys(4)
    with open_stack(config_of(server)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)
        wait_until(lambda: count_of(stack.counters(), "s3", "failed_blocks_total", "store", "denied"))
    assert [text for text in logged(caplog, "put") if "RequestTimeTooSkewed: The difference" in text]
    assert len(caplog.messages) == len(set(caplog.messages))
    assert "secret" not in caplog.text


def test_a_server_that_needs_time_for_each_name_gets_fewer_names_at_once(server: FakeS3) -> None:
    keys = make_keys(BLOCKS)
    with open_stack(config_of(server, capacity=None)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)
        digest = stack.config.identity.digest.hex()
    many = Then(b"", "stall")
    server.reply = lambda request: many if request.body.count(b"<Key>") > 5 else None
    entry = config_of(server, request_timeout="200ms", attempts=1)["secondary"]
    settings = S3Settings.model_validate(entry[0])  # type: ignore[index]
    with closing(S3Administration(settings)) as administration:
        purged = administration.purge(digest, time.monotonic() + WAIT_S)
    assert (purged.blocks, purged.left, stored_in(server)) == (BLOCKS, (), set())


def test_connections_that_do_not_open_cost_no_answer_of_the_others(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(14)
    opened = 0
    rig = open_rig(presence_ttl=0)
    assert rig.store(keys[:BLOCKS]).success
    rig = open_rig(presence_ttl=0)
    assert not rig.lookup(make_keys(1, "another")[0]), "it has read the mark, with one connection"
    with ExitStack() as waiting, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        for _ in range(4):  # from now on it answers nobody
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())

        def every_other(host: str, port: int, timeout_s: float) -> Addresses:
            nonlocal opened
            opened += 1
            return addresses_of(host, full.getsockname()[1] if opened % 2 else port, timeout_s)

        monkeypatch.setattr(pool, "addresses_of", every_other)
        assert rig.lookup_all(keys) == [True] * BLOCKS + [False] * 2
    assert opened > 1
    assert rig.tier.stats()["unanswered_lookups_total"] == 0
