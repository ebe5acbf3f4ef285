"""Listings, deletes and copies through boto3: work that runs once a minute or by hand.

boto3 has no deadlines: timeouts and attempts bound each request, and the callers stop between requests.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tiered_kv_s3.account import Account, library_errors
from tiered_kv_s3.bucket import seconds_of
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.signer import Credentials
from tiered_kv_s3.verdict import BucketError, Verdict

PAGE_OBJECTS = 1000
"""Objects in one page of a listing, and in one request to delete; S3's limit."""
_ATTEMPTS_MAX = 3
_CREDENTIALS_S = 10.0
_WITHOUT_VERSIONS = frozenset({"AccessDenied", "NotImplemented", "MethodNotAllowed"})
_CODE = re.compile(r"[A-Za-z0-9.]{1,100}")


class Listed(NamedTuple):
    """An object in a listing; its age is by the server's clock. The oldest is the greatest."""

    age_s: float
    name: str
    size_bytes: int


class Control:
    """Lists, deletes and copies objects. Any thread may call.

    Every method raises `BucketError` if the request fails.
    """

    def __init__(self, account: Account, settings: S3Settings, tier: str) -> None:
        self._account = account
        self._settings = settings
        self._bucket = settings.bucket
        self._tier = tier
        self.without_versions = ""
        """S3's error code once it has refused to list versions."""
        self._lock = threading.Lock()  # guards the two below; held while boto3 makes the client
        self._credentials: Credentials | None = None
        self._client: Any = None  # Any: boto3 makes its class at run time

    def listed(self, prefix: str) -> Iterator[list[Listed]]:
        """Yield the objects whose names begin with `prefix`, a page at a time."""
        for page in self._pages("list_objects_v2", prefix):
            now_s = seconds_of(page["ResponseMetadata"]["HTTPHeaders"].get("date", "")) or time.time()
            yield [
                Listed(now_s - each["LastModified"].timestamp(), each["Key"], each["Size"])
                for each in page.get("Contents", ())
            ]

    def versions(self, prefix: str, deadline: float) -> Iterator[list[tuple[Mapping[str, Any], bool]]]:
        """Yield boto3's entries for the versions under a prefix, and whether each is a delete marker.

        The markers of a page come first. Yields the objects if the server cannot list versions.
        """
        operation = "list_objects_v2" if self.without_versions else "list_object_versions"
        try:
            for page in self._pages(operation, prefix):
                if time.monotonic() >= deadline:
                    raise self._error("timeout", "list")
                markers = [(each, True) for each in page.get("DeleteMarkers", ())]
                yield markers + [(each, False) for each in (*page.get("Versions", ()), *page.get("Contents", ()))]
        except BucketError as error:
            if self.without_versions or error.reason not in _WITHOUT_VERSIONS:
                raise
            self.without_versions = error.reason
            yield from self.versions(prefix, deadline)

    def delete(self, objects: Sequence[Mapping[str, Any]]) -> set[str]:
        """Delete up to `PAGE_OBJECTS` objects or versions; return S3's error codes for those that it did not delete.

        Args:
            objects: For each its "Key", and for a version its "VersionId"; other entries of a listing are ignored.
        """
        named = [{key: each[key] for key in ("Key", "VersionId") if key in each} for each in objects]
        wanted = {"Objects": named, "Quiet": True}
        answer = self._call("delete", lambda client: client.delete_objects(Bucket=self._bucket, Delete=wanted))
        return {str(each.get("Code", "unknown")) for each in answer.get("Errors", ())}

    def renew(self, name: str) -> None:
        """Set an object's age to 0, by a copy onto itself on the server."""
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
                MetadataDirective="REPLACE",  # without a change S3 refuses a copy onto itself
                ContentType="application/octet-stream",
                **{name: value for name, value in given.items() if value},
            ),
        )

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _pages(self, operation: str, prefix: str) -> Iterator[Mapping[str, Any]]:
        parameters = {"Bucket": self._bucket, "Prefix": prefix}
        pages = self._call("list", lambda client: iter(client.get_paginator(operation).paginate(**parameters)))
        while (page := self._call("list", lambda _: next(pages, None))) is not None:
            yield page

    def _call(self, operation: str, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._boto3())
        except library_errors() as error:
            failure = self._error(_code_of(error), operation)
        raise failure  # outside the handler: the cause may quote secrets

    def _error(self, code: str, operation: str) -> BucketError:
        message = f"bucket '{self._bucket}' refuses or does not answer"
        return BucketError(message, code, tier=self._tier, operation=operation)

    def _boto3(self) -> Any:
        """Return a client with the current credentials."""
        credentials = self._account.credentials(time.monotonic() + _CREDENTIALS_S)  # not under the lock: it may wait
        with self._lock:
            if self._client is None or self._credentials != credentials:
                self._client = self._account.client(credentials, min(self._settings.attempts, _ATTEMPTS_MAX))
                self._credentials = credentials
            return self._client


def _code_of(error: Exception) -> str:
    """Return S3's error code, or the exception's class; not its text, which may quote secrets."""
    if any(words in str(error) for words in ("CERTIFICATE_VERIFY_FAILED", "doesn't match")):  # the latter is urllib3's
        return Verdict.UNTRUSTED
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
    return str(code) if _CODE.fullmatch(str(code)) else type(error).__name__
