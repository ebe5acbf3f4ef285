"""All that a bucket keeps under a prefix: every version of every object, and the marks of deleted ones.

A bucket without versions answers the same request, with one version of each object, called "null". Few servers do not
know the request; there the plain listing is all there is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tiered_kv.errors import TierUnavailableError
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.listing import PAGE_OBJECTS
from tiered_kv_s3.verdict import Verdict

_XML_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_ENTRY = re.compile(rb"<(Version|DeleteMarker|Contents)>(.*?)</\1>", re.DOTALL)
_KEY = re.compile(rb"<Key>([^<]*)</Key>")
_VERSION = re.compile(rb"<VersionId>([^<]{1,1024})</VersionId>")
_SIZE = re.compile(rb"<Size>(\d{1,18})</Size>")
_LATEST = re.compile(rb"<IsLatest>\s*true\s*</IsLatest>", re.IGNORECASE)
_COMMON = re.compile(rb"<CommonPrefixes>\s*<Prefix>([^<]*)</Prefix>\s*</CommonPrefixes>")
_GOES_ON = b"<IsTruncated>true</IsTruncated>"
_NEXT = {
    "key-marker": re.compile(rb"<NextKeyMarker>([^<]*)</NextKeyMarker>"),
    "version-id-marker": re.compile(rb"<NextVersionIdMarker>([^<]*)</NextVersionIdMarker>"),
}
_NEXT_PLAIN = {"continuation-token": re.compile(rb"<NextContinuationToken>([^<]+)</NextContinuationToken>")}
_ERROR_CODE = re.compile(rb"<Error>.*?<Code>([A-Za-z0-9.]{1,100})</Code>", re.DOTALL)
_ROOTS = (b"<ListVersionsResult", b"<ListBucketResult")
_PAGES_MAX = 10_000_000 // PAGE_OBJECTS


class Known(Enum):
    """Whether versions can be listed."""

    YES = "yes"
    UNKNOWN_HERE = "the server does not list versions"
    DENIED = "versions may not be listed"


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an object.

    Args:
        name: The object's name.
        version: The version's; empty where versions are not known.
        size_bytes: Its length; 0 for the mark of a deletion.
        is_latest: Whether it is what a GET returns, or would.
        is_mark: Whether it is the mark of a deletion.
    """

    name: str
    version: str
    size_bytes: int
    is_latest: bool
    is_mark: bool


class Versions:
    """Lists and deletes versions. One thread.

    Every method raises `TierUnavailableError` where the server does not do it.

    Args:
        bucket: Sends the requests.
        tier: The tier's name, for messages.
    """

    def __init__(self, bucket: Bucket, tier: str) -> None:
        self.known = Known.YES
        """What is known of versions after the first listing."""
        self._bucket = bucket
        self._tier = tier

    def pages(self, prefix: str, deadline: float) -> Iterator[list[Version]]:
        """Yield what the bucket keeps under a prefix, at most `PAGE_OBJECTS` at a time."""
        for text in self._texts({"prefix": prefix}, deadline):
            yield [_version_of(match) for match in _ENTRY.finditer(text)]

    def folders(self, prefix: str, deadline: float) -> list[str]:
        """Return what follows `prefix`, which ends with a slash, up to the next slash, each once."""
        found: set[str] = set()
        for text in self._texts({"prefix": prefix, "delimiter": "/"}, deadline):
            names = [html.unescape(each.decode("utf-8", "replace")) for each in _COMMON.findall(text)]
            found.update(name.removeprefix(prefix).rstrip("/") for name in names)
        return sorted(found)

    def delete(self, versions: Sequence[Version], deadline: float) -> tuple[int, set[str]]:
        """Delete up to `PAGE_OBJECTS` versions; return how many are gone, and the words for why others are not."""
        wanted = "".join(map(_wanted, versions))
        text = f'<Delete xmlns="{_XML_NAMESPACE}"><Quiet>true</Quiet>{wanted}</Delete>'.encode()
        verdict, answer = self._bucket.delete_many(text, deadline)
        if verdict is not Verdict.DONE:
            raise self._error("purge", f"does not delete: {verdict.reason}")
        codes = _ERROR_CODE.findall(answer)
        return len(versions) - answer.count(b"<Error>"), {code.decode() for code in codes}

    def _texts(self, query: dict[str, str], deadline: float) -> Iterator[bytes]:
        """Yield the pages of a listing as they came."""
        following: dict[str, str] = {}
        for _ in range(_PAGES_MAX):
            text = self._page({**query, **following}, deadline)
            yield text
            if _GOES_ON not in text:
                return
            markers = _NEXT if self.known is Known.YES else _NEXT_PLAIN
            found = {name: pattern.search(text) for name, pattern in markers.items()}
            said = {name: html.unescape(match[1].decode("latin-1")) for name, match in found.items() if match}
            if not said or said == following:
                raise self._error("list", "lists a page and does not say how to ask for the next")
            following = said
        raise self._error("list", "lists pages without an end")

    def _page(self, query: dict[str, str], deadline: float) -> bytes:
        if self.known is Known.YES:
            verdict, answer, text = self._bucket.list_page(
                {"versions": "", "max-keys": str(PAGE_OBJECTS), **query}, deadline
            )
            if verdict is Verdict.DONE and answer is not None:
                return self._sound(text)
            if "key-marker" in query or verdict not in _WITHOUT_VERSIONS:
                raise self._error("list", f"cannot be listed: {verdict.reason}")
            self.known = _WITHOUT_VERSIONS[verdict]
        verdict, answer, text = self._bucket.list_page(
            {"list-type": "2", "max-keys": str(PAGE_OBJECTS), **query}, deadline
        )
        if verdict is not Verdict.DONE or answer is None:
            raise self._error("list", f"cannot be listed: {verdict.reason}")
        return self._sound(text)

    def _sound(self, text: bytes) -> bytes:
        if not any(root in text for root in _ROOTS):
            raise self._error("list", "sends no listing as S3 does")
        return text

    def _error(self, operation: str, message: str) -> TierUnavailableError:
        return TierUnavailableError(
            f"the bucket at {self._bucket.authority} {message}", tier=self._tier, operation=operation
        )


_WITHOUT_VERSIONS = {
    Verdict.REFUSED: Known.UNKNOWN_HERE,
    Verdict.ABSENT: Known.UNKNOWN_HERE,
    Verdict.DENIED: Known.DENIED,
}


def _version_of(match: re.Match[bytes]) -> Version:
    kind, text = match[1], match[2]
    key, version, size = _KEY.search(text), _VERSION.search(text), _SIZE.search(text)
    return Version(
        html.unescape(key[1].decode("utf-8", "replace")) if key else "",
        html.unescape(version[1].decode("latin-1")) if version else "",
        int(size[1]) if size else 0,
        kind == b"Contents" or _LATEST.search(text) is not None,
        kind == b"DeleteMarker",
    )


def _wanted(version: Version) -> str:
    identity = f"<VersionId>{html.escape(version.version)}</VersionId>" if version.version else ""
    return f"<Object><Key>{html.escape(version.name)}</Key>{identity}</Object>"
