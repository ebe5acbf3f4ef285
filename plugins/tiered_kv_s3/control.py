"""The control plane: what happens once a minute or by hand, through boto3. Payloads go through `bucket.py`.

boto3 knows no deadline: each request is bounded by its time-outs and attempts, and the callers stop between requests.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.errors import TierUnavailableError
from tiered_kv_s3.account import Account, library_errors
from tiered_kv_s3.bucket import seconds_of
from tiered_kv_s3.settings import S3Settings

PAGE_OBJECTS = 1000
"""Objects in one page of a listing, and in one request to delete; what S3 allows."""
_ATTEMPTS_MAX = 3
_CODE = re.compile(r"[A-Za-z0-9.]{1,100}")


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing shows it.

    Args:
        name: Its name.
        size_bytes: Its length.
        written_s: When it was written, in seconds since 1970, by the server's clock.
    """

    name: str
    size_bytes: int
    written_s: float


class Control:
    """Lists, deletes and copies objects. Any thread may call.

    Every method raises `TierUnavailableError` where the server does not do it.

    Args:
        account: Makes boto3's client.
        settings: The tier's YAML entry.
        tier: The tier's name, for messages.
    """

    def __init__(self, account: Account, settings: S3Settings, tier: str) -> None:
        self._account = account
        self._settings = settings
        self._bucket = settings.bucket
        self._tier = tier
        self._lock = threading.Lock()  # guards the client; held while boto3 makes it
        self._client: Any = None  # Any: boto3 makes its class when it is asked for one

    def pages(self, prefix: str) -> Iterator[tuple[float, list[Listed]]]:
        """Yield the server's time and the objects whose names begin with `prefix`, a page at a time."""
        for page in self._paginated("list_objects_v2", Prefix=prefix):
            now_s = _date_of(page)
            yield (
                now_s,
                [
                    Listed(each["Key"], each["Size"], each["LastModified"].timestamp())
                    for each in page.get("Contents", ())
                ],
            )

    def folders(self, prefix: str) -> list[str]:
        """Return what follows `prefix`, which ends with a slash, up to the next slash, each once."""
        found: list[str] = []
        for page in self._paginated("list_objects_v2", Prefix=prefix, Delimiter="/"):
            found += [each["Prefix"].removeprefix(prefix).rstrip("/") for each in page.get("CommonPrefixes", ())]
        return found

    def versions(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        """Yield pages of all versions and delete markers under a prefix, as boto3 gives them."""
        yield from self._paginated("list_object_versions", Prefix=prefix)

    def probe(self, prefix: str) -> None:
        """Do nothing but find out whether the bucket can be listed."""
        self._call("list", lambda client: client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=1))

    def delete(self, objects: Sequence[Mapping[str, str]]) -> tuple[int, set[str]]:
        """Delete up to `PAGE_OBJECTS` objects or versions; return how many are gone, and why others are not.

        Args:
            objects: For each its "Key", and its "VersionId" if it is one of many.
        """
        wanted = {"Objects": list(objects), "Quiet": True}
        answer = self._call("delete", lambda client: client.delete_objects(Bucket=self._bucket, Delete=wanted))
        errors = answer.get("Errors", [])
        return len(objects) - len(errors), {str(each.get("Code", "unknown")) for each in errors}

    def renew(self, name: str) -> None:
        """Make an object as young as one that was just stored, by a copy onto itself on the server."""
        settings = self._settings
        headers = {
            "StorageClass": settings.storage_class,
            "ServerSideEncryption": settings.server_encryption,
            "SSEKMSKeyId": settings.kms_key_id,
        }
        given = {header: value for header, value in headers.items() if value}
        self._call(
            "copy",
            lambda client: client.copy_object(
                Bucket=self._bucket,
                Key=name,
                CopySource={"Bucket": self._bucket, "Key": name},
                MetadataDirective="REPLACE",  # without a change S3 refuses a copy onto itself
                ContentType="application/octet-stream",
                **given,
            ),
        )

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _paginated(self, operation: str, **parameters: str) -> Iterator[Mapping[str, Any]]:
        pages = self._call("list", lambda client: iter(self._pages_of(client, operation, parameters)))
        while (page := self._call("list", lambda _: next(pages, None))) is not None:
            yield page

    def _pages_of(self, client: Any, operation: str, parameters: Mapping[str, str]) -> Any:
        return client.get_paginator(operation).paginate(Bucket=self._bucket, **parameters)

    def _call(self, operation: str, call: Any) -> Any:
        """Return what boto3 answers to one request."""
        try:
            return call(self._boto3())
        except library_errors() as error:
            why = _code_of(error)
        raise TierUnavailableError(
            f"bucket '{self._bucket}' refuses or does not answer: {why}", tier=self._tier, operation=operation
        )

    def _boto3(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._account.client(min(self._settings.attempts, _ATTEMPTS_MAX))
            return self._client


def _date_of(page: Mapping[str, Any]) -> float:
    """Return the server's time when it answered, or ours where it does not tell."""
    said = page["ResponseMetadata"]["HTTPHeaders"].get("date", "")
    return seconds_of(said) or time.time()


def _code_of(error: Exception) -> str:
    """Return S3's word for what is wrong, or the kind of failure; no text, which may quote what is secret."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
    return str(code) if _CODE.fullmatch(str(code)) else type(error).__name__
