"""Ways in which servers that speak S3's protocol differ, as answers of `FakeS3`; boto3 works with each of them."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable

from tests.support.fake_s3 import Reply, Request, Then, answer, error

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


def of_listings(change: Callable[[bytes], bytes], asked: str = "") -> Odd:
    """Change the bodies of listings that are asked for with `asked`."""

    def row(request: Request, served: Served) -> Reply:
        reply = served(request)
        return answer(200, change(parts_of(reply)[1])) if is_listing(request) and asked in request.target else reply

    return row


def _encoded(body: bytes) -> bytes:
    text = re.sub(rb"<Key>.*?</Key>", lambda found: found[0].replace(b"/t", b"%2Ft"), body)
    return text.replace(b"<IsTruncated>", b"<EncodingType>url</EncodingType><IsTruncated>", 1)


_XML, _XMLNS = b'<?xml version="1.0" encoding="UTF-8"?>\n', b'Result xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
ODD |= {
    "listings_without_sizes_and_dates": of_listings(
        lambda body: re.sub(rb"<(Size|LastModified)>[^<]*</\1>", b"", body)
    ),
    "listings_in_a_namespace": of_listings(lambda body: _XML + body.replace(b"Result>", _XMLNS, 1)),
    "encoded_names": of_listings(_encoded, "encoding-type=url"),
    "pages_without_a_token": of_listings(lambda body: re.sub(rb"<Next\w+>[^<]*</Next\w+>", b"", body)),
}


def refusing(is_refused: Callable[[Request], bool], reply: Reply) -> Odd:
    return lambda request, served: reply if is_refused(request) else served(request)


def asks_for_versions(request: Request) -> bool:
    return "versions" in request.target


def deletes_many(request: Request) -> bool:
    return request.method == "POST"


ODD |= {
    "no_listings_of_version_2": refusing(
        lambda request: "list-type=2" in request.target, error(400, "InvalidArgument")
    ),
    "no_conditional_writes": refusing(lambda request: "if-none-match" in request.headers, error(501, "NotImplemented")),
    "versions_not_implemented": refusing(asks_for_versions, error(501, "NotImplemented")),
    "versions_not_allowed": refusing(asks_for_versions, answer(405, b"<html>Method Not Allowed</html>")),
    "versions_as_an_empty_page": refusing(asks_for_versions, answer(200, b"<ListBucketResult/>")),
    "no_single_delete": refusing(lambda request: request.method == "DELETE", error(501, "NotImplemented")),
    "no_multi_delete": refusing(deletes_many, error(501, "NotImplemented")),
    "multi_delete_not_allowed": refusing(deletes_many, error(405, "MethodNotAllowed")),
    "multi_delete_as_another_request": refusing(deletes_many, answer(404, b"<html>Not Found</html>")),
}


@odd
def listings_of_version_1(request: Request, served: Served) -> Reply:
    """What version 2 and the versions have is ignored."""
    if not is_listing(request):
        return served(request)
    target = re.sub("(continuation-token|start-after|key-marker|versions)=?[^&]*", "", request.target)
    text = parts_of(served(Request("GET", target, request.headers, b"")))[1]
    return answer(200, re.sub(rb"<Next\w+>[^<]*</Next\w+>", b"", text))


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
def deleted_objects_are_missing(request: Request, served: Served) -> Reply:
    """As Google's; it deletes one at a time."""
    if request.method == "POST":
        return error(400, "InvalidArgument")
    if request.method == "DELETE" and request.headers.get("x-seen") is None and "/0000000000000000/" in request.target:
        return error(404, "NoSuchKey")
    return served(request)


@odd
def objects_missing_in_a_multi_delete(request: Request, served: Served) -> Reply:
    missing = re.findall(rb"<Key>[^<]*/0{16}/[^<]*</Key>", request.body) if request.method == "POST" else []
    errors = b"".join(b"<Error>%b<Code>NoSuchKey</Code></Error>" % name for name in missing)
    return answer(200, b"<DeleteResult>" + errors + b"</DeleteResult>") if errors else served(request)


@odd
def objects_missing_without_a_code(request: Request, served: Served) -> Reply:
    """Nor does it delete several at once."""
    if request.method == "POST":
        return error(501, "NotImplemented")
    is_missing = request.method == "DELETE" and "/0000000000000000/" in request.target
    return answer(404) if is_missing else served(request)


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
