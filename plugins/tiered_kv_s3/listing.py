"""What is in the bucket, page by page, and deleting many objects at once.

By our own requests: boto3 spends 40 times as much interpreter time on a page as the regular expressions below, most
of it on dates, knows no deadline, and signs deletes with checksums that older servers do not know.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from tiered_kv.errors import TierUnavailableError
from tiered_kv_s3.bucket import Bucket, seconds_of
from tiered_kv_s3.connection import Answer
from tiered_kv_s3.verdict import Verdict

PAGE_OBJECTS = 1000
"""Objects in one page of a listing, and in one request to delete; what S3 allows."""

_XML_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_KEY = re.compile(rb"<Key>([^<]*)</Key>")
_SIZE = re.compile(rb"<Size>(\d{1,18})</Size>")
_DATE = re.compile(rb"<LastModified>([^<]{1,40})</LastModified>")
_GOES_ON = b"<IsTruncated>true</IsTruncated>"
_NEXT = re.compile(rb"<NextContinuationToken>([^<]+)</NextContinuationToken>")


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing shows it.

    Args:
        name: Its name.
        size_bytes: Its length.
        age_s: Seconds since it was written, by the server's clock.
    """

    name: str
    size_bytes: int
    age_s: float


class Listing:
    """Lists and deletes objects. Any thread may call.

    Every method raises `TierUnavailableError` where the server does not do it.

    Args:
        name: The bucket's name.
        bucket: Sends the requests.
        tier: The tier's name, for messages.
    """

    def __init__(self, name: str, bucket: Bucket, tier: str) -> None:
        self._name = name
        self._bucket = bucket
        self._tier = tier

    def pages(self, prefix: str, deadline: float) -> Iterator[list[Listed]]:
        """Yield the objects whose names begin with `prefix`, at most `PAGE_OBJECTS` at a time, until the deadline."""
        query = {"list-type": "2", "max-keys": str(PAGE_OBJECTS), "prefix": prefix}
        while True:
            answer, text = self._page(query, deadline)
            try:
                page = _parse(answer, text)
            except ValueError:
                raise self._error("list", "sends no listing as S3 does") from None
            yield page
            following = _NEXT.search(text)
            if following is None:
                if _GOES_ON in text:
                    raise self._error("list", "lists a first page and does not say how to ask for the next")
                return
            query["continuation-token"] = html.unescape(following[1].decode("latin-1"))

    def probe(self, prefix: str, deadline: float) -> None:
        """Do nothing but find out whether the bucket can be listed."""
        self._page({"list-type": "2", "max-keys": "1", "prefix": prefix}, deadline)

    def delete(self, names: Sequence[str], deadline: float) -> int:
        """Delete objects and return how many the server says are gone; those that were not there are gone too."""
        deleted = 0
        for start in range(0, len(names), PAGE_OBJECTS):
            batch = names[start : start + PAGE_OBJECTS]
            wanted = "".join([f"<Object><Key>{html.escape(name)}</Key></Object>" for name in batch])
            text = f'<Delete xmlns="{_XML_NAMESPACE}"><Quiet>true</Quiet>{wanted}</Delete>'.encode()
            verdict, answer = self._bucket.delete_many(text, deadline)
            if verdict is not Verdict.DONE:
                raise self._error("delete", f"does not delete: {verdict.reason}")
            deleted += len(batch) - answer.count(b"<Error>")
        return deleted

    def _page(self, query: dict[str, str], deadline: float) -> tuple[Answer, bytes]:
        verdict, answer, text = self._bucket.list_page(query, deadline)
        if verdict is not Verdict.DONE or answer is None:
            raise self._error("list", f"cannot be listed: {verdict.reason}")
        return answer, text

    def _error(self, operation: str, message: str) -> TierUnavailableError:
        where = f"bucket '{self._name}' at {self._bucket.authority}"
        return TierUnavailableError(f"{where} {message}", tier=self._tier, operation=operation)


def _parse(answer: Answer, text: bytes) -> list[Listed]:
    """Return the objects of a page.

    Raises:
        ValueError: It is no page of a listing.
    """
    if b"<ListBucketResult" not in text:
        raise ValueError("no listing")
    now_s = seconds_of(answer.headers.get("date", "")) or time.time()
    return [
        Listed(
            html.unescape(key.decode()),
            int(size),
            now_s - _seconds_of(date.decode()),
        )
        for key, size, date in zip(_KEY.findall(text), _SIZE.findall(text), _DATE.findall(text), strict=True)
    ]


def _seconds_of(date: str) -> float:
    """Return a listing's date as seconds since 1970.

    Raises:
        ValueError: It is none.
    """
    try:
        return datetime.fromisoformat(date).timestamp()
    except OverflowError as error:
        raise ValueError(f"no date: {error}") from None
