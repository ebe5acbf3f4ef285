"""Listings, deletes and copies through boto3: the sweeper's threads, `S3Tier.describe` and the commands call them.

boto3 has no deadlines. Timeouts and attempts bound each request, and the callers stop between requests. If less time is
left than all attempts may take, a request gets a client with shorter timeouts or fewer attempts.

A server that does not know a request gets an older request with the same effect: single deletes instead of many at
once, version 1 of a listing, the objects instead of their versions.
"""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import re
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.objects.store import DELETED_AT_ONCE, Listed, ObjectControl
from tiered_kv.toolkit.objects.verdict import BucketError, Verdict
from tiered_kv.toolkit.resolver import causes_of, words_of
from tiered_kv_s3.access import BucketAccess, library_errors
from tiered_kv_s3.connection import Credentials
from tiered_kv_s3.pages import POSITIONS
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import seconds_of, verdict_of_error

PAGE_OBJECTS: Final = 1000  # objects in one page of a listing; S3's limit
LISTED_MIN: Final = 100  # a smaller page is not divided when its listing takes too long
PARALLEL_DELETES: Final = 8
_ATTEMPTS_MAX: Final = 3
_CREDENTIALS_S: Final = 10.0
_RENEWED_S_MAX: Final = 60.0  # the age of an object that has just been copied
_PAUSE_S: Final = 1.0  # the most between two of three attempts, on average
_STEP_S: Final = 0.25  # the time left is rounded up to such steps: another step needs another client, some 15 ms
_UNKNOWN: Final = frozenset({400, 403, 404, 405, 411, 415, 422, 501})
"""Statuses by which servers refuse a request that they do not know; S3 also answers 403 if a right is missing."""
_LATE: Final = frozenset({Verdict.TIMEOUT, "RequestTimeout", "GatewayTimeout", "504"})
_BY_CLASS: Final = {
    "ReadTimeoutError": Verdict.TIMEOUT,
    "ConnectTimeoutError": Verdict.UNAVAILABLE,
    "EndpointConnectionError": Verdict.UNAVAILABLE,
    "ConnectionClosedError": Verdict.BROKEN,
    "ResponseParserError": Verdict.BROKEN,
}
"""Verdicts by the class name of an exception of boto3."""
NO_OBJECT: Final = frozenset({"NoSuchKey", "NoSuchVersion", "404"})
"""Error codes for a missing object; the last one is of an answer without a code."""
_IGNORED: Final = "ignored"
_NO_NEXT_PAGE: Final = "NoNextPage"
_CODE = re.compile(r"[A-Za-z0-9.]{1,100}")


class Control(ObjectControl):
    """Lists, deletes and copies objects. Any thread may call.

    Every method raises `BucketError` if the request fails. If a listing has no sizes, a block counts `record_bytes`.
    """

    def __init__(self, access: BucketAccess, settings: S3Settings, tier: str, record_bytes: int = 0) -> None:
        self._access = access
        self._settings = settings
        self._bucket = settings.bucket
        self._tier = tier
        self._record_bytes = record_bytes
        self.without_versions = ""
        """S3's error code after it refused to list versions; `_IGNORED` if it listed only objects; else empty."""
        self.skew_s = 0.0
        """How far this machine's clock is ahead of the server's, as of the last answer; to a second or so."""
        self._names_at_once, self._page_objects = DELETED_AT_ONCE, PAGE_OBJECTS
        self._deletes_singly = self._lists_by_version_1 = False
        self._closing = threading.Event()
        self.deadline = math.inf
        """The deadline of requests that begin from now on, in seconds of `time.monotonic()`."""
        self._lock = threading.Lock()  # guards the two below; held while boto3 makes the client
        self._made_for: tuple[Credentials, float, int] | None = None
        self._client: Any = None  # Any: boto3 makes its class at run time

    def listed(self, prefix: str) -> Iterator[list[Listed]]:
        for page in self._object_pages(prefix):
            now_s = seconds_of(page["ResponseMetadata"]["HTTPHeaders"].get("date", "")) or time.time()
            yield [
                Listed(age_s(each, now_s), each["Key"], each.get("Size", self._record_bytes))
                for each in page.get("Contents", ())
            ]

    def folders(self, prefix: str) -> list[str]:
        request = operator.methodcaller("list_objects_v2", Bucket=self._bucket, Prefix=prefix, Delimiter="/")
        found = self._call("list", request).get("CommonPrefixes", ())
        return [each["Prefix"].removeprefix(prefix).rstrip("/") for each in found]

    def versions(self, prefix: str) -> Iterator[list[tuple[Mapping[str, Any], bool]]]:
        """Yield boto3's entries for the versions under a prefix, and whether each is a delete marker.

        The markers of a page come first. Yields the objects if the server cannot list versions, or lists none although
        there are objects.
        """
        found = False
        try:
            can_list = self.without_versions in ("", _IGNORED)
            for page in self._pages("list_object_versions", prefix) if can_list else ():
                markers = [(each, True) for each in page.get("DeleteMarkers", ())]
                entries = markers + [(each, False) for each in page.get("Versions", ())]
                found |= bool(entries)
                yield entries
        except BucketError as error:
            if error.status not in _UNKNOWN or found:
                raise
            self.without_versions = error.reason
        if found:
            return
        for page in self._object_pages(prefix):
            if page.get("Contents"):
                self.without_versions = self.without_versions or _IGNORED
                yield [(each, False) for each in page["Contents"]]

    def delete(self, names: Sequence[str]) -> dict[int, str]:
        return self.delete_versions([{"Key": name} for name in names])

    def delete_versions(self, objects: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Delete objects or versions; return S3's error code for each that it did not delete, by its position.

        An object has its "Key", a version its "VersionId" too; other entries of a listing are ignored.
        """
        named = [{key: each[key] for key in ("Key", "VersionId") if key in each} for each in objects]
        refusals: dict[int, str] = {}
        done = 0
        while done < len(named):
            batch, begin_s = named[done : done + self._names_at_once], time.monotonic()
            try:
                codes = self._delete_singly(batch) if self._deletes_singly else self._delete_together(batch)
            except BucketError as error:
                if not self._is_late(error) or len(batch) == 1:
                    raise
                self._names_at_once = max(1, len(batch) // 10)  # the server needs time for each name
                continue
            refusals |= {done + at: code for at, code in enumerate(codes) if code}
            done += len(batch)
            if time.monotonic() - begin_s < self._settings.request_timeout / 8:
                self._names_at_once = min(2 * self._names_at_once, DELETED_AT_ONCE)
        return refusals

    def keeps_versions(self) -> bool:
        """Return whether deleted objects stay in the bucket as versions, as far as the server tells."""
        return bool(self._settings_of("get_bucket_versioning").get("Status") == "Enabled")

    def locks_objects(self) -> bool:
        """Return whether the bucket has object lock, as far as the server tells."""
        found = self._settings_of("get_object_lock_configuration").get("ObjectLockConfiguration", {})
        return bool(found.get("ObjectLockEnabled") == "Enabled")

    def _settings_of(self, method: str) -> Mapping[str, Any]:
        with suppress(BucketError):
            answer: Mapping[str, Any] = self._call(
                "versioning", operator.methodcaller(method, Bucket=self._bucket), has_other=True
            )
            return answer
        return {}

    def not_deleted(self) -> BucketError:
        return self._error("delete", "NotDeleted", "the server confirmed to have deleted objects that it still lists")

    def read(self, name: str, bytes_max: int) -> tuple[float, bytes]:
        failures: tuple[type[Exception], ...] = (*library_errors(), OSError)
        try:
            found = self._call("get", lambda client: client.get_object(Bucket=self._bucket, Key=name))
            with found["Body"] as body:
                return self._age_s(found), body.read(bytes_max)
        except BucketError as error:
            if error.reason not in NO_OBJECT:
                raise
            return math.inf, b""
        except failures:
            raise self._error("get", Verdict.BROKEN) from None

    def write(self, name: str, data: bytes) -> None:
        self._call("put", lambda client: client.put_object(Bucket=self._bucket, Key=name, Body=data))

    def age_s(self, name: str) -> float | None:
        try:
            return self._age_s(self._call("head", lambda client: client.head_object(Bucket=self._bucket, Key=name)))
        except BucketError as error:
            if error.reason not in NO_OBJECT:
                raise
            return None

    def renew(self, name: str) -> bool:
        try:
            self._renew(name)
        except BucketError as error:
            if error.reason not in NO_OBJECT:
                raise
            return False
        return True

    def _renew(self, name: str) -> None:
        given = {
            "StorageClass": self._settings.storage_class,
            "ServerSideEncryption": self._settings.server_encryption,
            "SSEKMSKeyId": self._settings.kms_key_id,
        }
        self._call(
            "copy",
            lambda client: client.copy_object(
                Bucket=self._bucket,
                Key=name,
                CopySource={"Bucket": self._bucket, "Key": name},
                MetadataDirective="REPLACE",  # S3 refuses a copy of an object onto itself that changes nothing
                ContentType="application/octet-stream",
                **{name: value for name, value in given.items() if value},
            ),
        )
        head = self._call("copy", lambda client: client.head_object(Bucket=self._bucket, Key=name))
        if self._age_s(head) > min((self._settings.ttl or math.inf) / 2, _RENEWED_S_MAX):
            raise self._error("copy", "NotRenewed", "the server made the copy, and left the object as old as it was")

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _age_s(self, answer: Mapping[str, Any]) -> float:
        now_s = seconds_of(answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")) or time.time()
        return age_s(answer, now_s)

    # Listings.

    def _object_pages(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        last = ""
        if not self._lists_by_version_1:
            try:
                for page in self._pages("list_objects_v2", prefix):
                    yield page
                    last = page["Contents"][-1]["Key"] if page.get("Contents") else last
                return
            except BucketError as error:
                if error.status not in _UNKNOWN - {403, 404} and error.reason != _NO_NEXT_PAGE:
                    raise
            self._lists_by_version_1 = True
        yield from self._pages("list_objects", prefix, {"Marker": last} if last else {})

    def _pages(
        self, operation: str, prefix: str, position: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the pages of a listing, also of a server that does not say where the next one begins."""
        while True:
            limit = {"MaxKeys": self._page_objects} if self._page_objects < PAGE_OBJECTS else {}
            request = operator.methodcaller(operation, Bucket=self._bucket, Prefix=prefix, **position, **limit)
            try:
                page = self._call("list", request, has_other=operation == "list_object_versions")
            except BucketError as error:
                if not self._is_late(error) or self._page_objects < LISTED_MIN:
                    raise
                self._page_objects //= 10  # the server needs time for each object
                continue
            following = POSITIONS[operation](page) if page.get("IsTruncated") else {}
            if following and following == position:
                raise self._error("list", _NO_NEXT_PAGE, "the server answers with the same page again")
            yield page
            if not following:
                return
            position = following

    # Deletes.

    def _delete_together(self, named: Sequence[Mapping[str, str]]) -> list[str]:
        """Return an error code for each; empty for deleted ones."""
        wanted = {"Objects": named, "Quiet": True}
        try:
            request = operator.methodcaller("delete_objects", Bucket=self._bucket, Delete=wanted)
            answer = self._call("delete", request, has_other=True)
        except BucketError as error:
            if error.status not in _UNKNOWN or error.reason in _LATE or any(first := self._delete_singly(named[:1])):
                raise
            self._deletes_singly = True  # the server does not know the request for several
            return first + self._delete_singly(named[1:])
        refused: dict[tuple[str, str], str] = {}  # error codes by name and version
        for each in answer.get("Errors", ()):
            code = _valid_code(each.get("Code"))
            if code in NO_OBJECT:
                continue
            self._access.failures.note("delete", code, str(each.get("Message", "")))
            refused[each.get("Key", ""), each.get("VersionId", "")] = code
        names = [(each["Key"], each.get("VersionId", "")) for each in named]
        codes = [refused.get((key, version)) or refused.get((key, "")) for key, version in names]
        # An error for a name that was not asked for: any object may be left.
        otherwise = next(iter(refused.values())) if sum(map(bool, codes)) < len(refused) else ""
        return [code or otherwise for code in codes]

    def _delete_singly(self, named: Sequence[Mapping[str, str]]) -> list[str]:
        def delete(each: Mapping[str, str]) -> str:
            try:
                self._call("delete", lambda client: client.delete_object(Bucket=self._bucket, **each))
            except BucketError as error:
                return "" if error.reason in NO_OBJECT else error.reason
            return ""

        return [each.result() for each in run_all(delete, named, "tiered-kv-s3-delete", PARALLEL_DELETES)]

    # Requests.

    def _is_late(self, error: BucketError) -> bool:
        """Return whether a smaller request might be answered in time, and there is time for it."""
        return error.reason in _LATE and not self._closing.is_set() and time.monotonic() < self.deadline

    def _call(self, operation: str, call: Callable[[Any], Any], *, has_other: bool = False) -> Any:
        """Return the result of boto3's `call`; with `has_other`, there is another request with the same effect."""
        try:
            answer = call(self._boto3())
            headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            if (date := seconds_of(headers.get("date", ""))) is not None:
                self.skew_s = time.time() - date
            return answer
        except library_errors() as error:
            code, words, status = _code_words_and_status(error)
        # Raised outside the handler, without a cause: the cause may quote secrets.
        used = self._made_for
        until_s = min(time.monotonic() + _CREDENTIALS_S, self.deadline)
        if status in (401, 403) and used is not None and self._access.renew(used[0], until_s, are_expired=False):
            return self._call(operation, call, has_other=has_other)
        raise self._error(operation, code, words, status, has_other=has_other)

    def _error(
        self, operation: str, code: str, words: str = "", status: int = 0, *, has_other: bool = False
    ) -> BucketError:
        level = logging.INFO if has_other and status in _UNKNOWN else logging.WARNING
        if code in NO_OBJECT and operation != "list":
            message = self._access.sentence(code, words)
        else:
            message = self._access.failures.note(operation, code, words, level)
        return BucketError(message, code, tier=self._tier, operation=operation, status=status)

    def _boto3(self) -> Any:
        # Not under the lock: this call may wait.
        credentials = self._access.credentials(min(time.monotonic() + _CREDENTIALS_S, self.deadline))
        wanted = credentials, *self._limits()
        with self._lock:
            if self._made_for != wanted:  # the earlier client is not closed: a thread may use it
                self._client = self._access.client(*wanted)
                self._client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
                self._made_for = wanted
            return self._client

    def _limits(self) -> tuple[float, int]:
        """Return the timeout of an attempt of a request that begins now, and how many there may be."""
        timeout_s, attempts = self._settings.request_timeout, min(self._settings.attempts, _ATTEMPTS_MAX)
        left_s = self.deadline - time.monotonic()
        if left_s >= attempts * (timeout_s + _PAUSE_S):
            return timeout_s, attempts
        left_s = max(1, math.ceil(left_s / _STEP_S)) * _STEP_S
        return min(timeout_s, left_s), max(1, int(left_s / (timeout_s + _PAUSE_S)))


def age_s(entry: Mapping[str, Any], now_s: float) -> float:
    """Return an object's age; 0 if the server does not say when it was written."""
    return now_s - entry["LastModified"].timestamp() if "LastModified" in entry else 0.0


def _add_md5(request: Any, **_: object) -> None:  # Any: botocore's own class
    """Give a request the header Content-MD5, which boto3 replaced with checksums that older servers do not know."""
    digest = hashlib.md5(request.body, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = b64encode(digest).decode()


def _code_words_and_status(error: Exception) -> tuple[str, str, int]:
    """Return S3's error code or a verdict, the server's or the system's message, and the HTTP status of the answer.

    The text of boto3's exception is not used: it may quote secrets.
    """
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        of_system = (each for each in causes_of(error) if isinstance(each, OSError))
        cause = next((each for each in of_system if each.strerror or isinstance(each, ssl.SSLError)), None)
        words = "" if cause is None else words_of(cause)
        if any(each in str(error) for each in ("CERTIFICATE_VERIFY_FAILED", "doesn't match")):  # the latter: urllib3's
            return Verdict.UNTRUSTED, words, 0
        name = type(error).__name__
        return _BY_CLASS.get(name, name if cause is None else verdict_of_error(cause)), words, 0
    found = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return _valid_code(found.get("Code"), type(error).__name__), str(found.get("Message", "")), status


def _valid_code(code: object, otherwise: str = "unknown") -> str:
    return str(code) if _CODE.fullmatch(str(code or "")) else otherwise
