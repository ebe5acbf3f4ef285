"""Listings, deletes and renewals by obstore: the sweeper's threads, `check` and the commands call them.

Each request is a coroutine that is cancelled at its deadline, and after `request_timeout`. What must stay true: an
object counts as deleted if it is missing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import obstore
from obstore.store import AzureStore

from tiered_kv.toolkit.objects.store import Listed, ObjectControl
from tiered_kv.toolkit.objects.verdict import RETRYABLE, BucketError, Verdict
from tiered_kv_object.client import ObjectClient, Opened

PAGE_OBJECTS: Final = 1000
_PARALLEL_DELETES: Final = 8
_GONE: Final = frozenset({Verdict.DONE, Verdict.ABSENT})
_RENEWED_S_MAX: Final = 60.0  # the age of an object that has just been copied


class ObstoreControl(ObjectControl):
    """Lists, deletes and copies objects. Any thread may call."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client
        self.deadline = math.inf

    def listed(self, prefix: str) -> Iterator[list[Listed]]:
        stream: Any = None  # Any: obstore's, of which each page is one request
        after: str | None = None

        async def next_page(opened: Opened) -> Sequence[Any]:
            nonlocal stream
            if stream is None:
                stream = obstore.list(opened.store, prefix, offset=after, chunk_size=PAGE_OBJECTS)
            try:
                return await anext(stream)
            except StopAsyncIteration:
                return ()
            except BaseException:  # the next attempt goes on behind the last page
                stream = None
                raise

        while page := self._client.call("list", next_page, self._deadline()):
            if after is not None and page[0]["path"] <= after:  # a listing without end
                raise self._client.error("list", "NoNextPage", "the server answers with the same page again")
            yield [Listed(self._client.age_s(each), each["path"], each["size"]) for each in page]
            after = page[-1]["path"]

    def folders(self, prefix: str) -> list[str]:
        async def folders(opened: Opened) -> Any:  # Any: obstore's dictionary
            return await obstore.list_with_delimiter_async(opened.store, prefix)

        found = self._client.call("list", folders, self._deadline())
        return [each.rpartition("/")[2] for each in found["common_prefixes"]] if found else []

    def delete(self, names: Sequence[str]) -> dict[int, str]:
        verdicts = [Verdict.UNASKED] * len(names)

        def left() -> list[int]:
            return [at for at, verdict in enumerate(verdicts) if verdict not in _GONE]

        async def delete_left(opened: Opened) -> Verdict:
            await self._delete_each(opened, names, left(), verdicts)
            return next((verdicts[at] for at in left() if verdicts[at] in RETRYABLE), Verdict.DONE)

        deadline, retries = self._deadline(), self._client.retries
        verdict = retries.run("delete", lambda: self._client.request(None, delete_left, deadline), deadline)
        if verdict is not Verdict.DONE and len(left()) == len(names):
            raise self._client.error("delete", verdict)
        for refusal in {verdicts[at] for at in left()} - RETRYABLE:
            self._client.failures.note("delete", refusal, retries.words.get(refusal, ""))
        return {at: str(verdicts[at]) for at in left()}

    async def _delete_each(
        self, opened: Opened, names: Sequence[str], left: Sequence[int], verdicts: list[Verdict]
    ) -> None:
        """Delete the objects at the positions `left`, and put each verdict into its place.

        Azure takes many names at once; with a missing one among them it raises, and deletes the others all the same.
        GCS gets a request for each name in any case.
        """
        if isinstance(opened.store, AzureStore) and len(left) > 1:
            try:
                await obstore.delete_async(opened.store, [names[at] for at in left])
            except Exception:  # obstore's, which have no common class: each object's own request tells
                pass
            else:
                for at in left:
                    verdicts[at] = Verdict.DONE
                return
        room = asyncio.Semaphore(_PARALLEL_DELETES)

        async def delete(at: int) -> None:
            async with room:
                try:
                    await obstore.delete_async(opened.store, names[at])
                    verdicts[at] = Verdict.DONE
                except Exception as error:  # obstore's, which have no common class
                    verdicts[at] = self._client.verdict_on(error, opened)

        await asyncio.gather(*(delete(at) for at in left))

    def read(self, name: str, bytes_max: int) -> tuple[float, bytes]:
        async def read(opened: Opened) -> tuple[float, bytes]:
            result = await obstore.get_async(opened.store, name)
            is_long = result.meta["size"] > bytes_max
            return self._client.age_s(result.meta), b"" if is_long else bytes(await result.bytes_async())

        return self._client.call("get", read, self._deadline()) or (math.inf, b"")

    def write(self, name: str, data: bytes) -> None:
        async def write(opened: Opened) -> bool:
            await obstore.put_async(opened.store, name, data, use_multipart=False)
            written_s = (await obstore.head_async(opened.store, name))["last_modified"].timestamp()
            self._client.skew_s = time.time() - written_s
            return True

        if self._client.call("put", write, self._deadline()) is None:
            raise self._client.error("put", Verdict.NO_BUCKET)

    def age_s(self, name: str) -> float | None:
        async def head(opened: Opened) -> float:
            return self._client.age_s(await obstore.head_async(opened.store, name))

        return self._client.call("head", head, self._deadline())

    def renew(self, name: str) -> bool:
        async def copy(opened: Opened) -> float:
            await obstore.copy_async(opened.store, name, name)
            return self._client.age_s(await obstore.head_async(opened.store, name))

        age_s = self._client.call("copy", copy, self._deadline())
        if age_s is not None and age_s > min((self._client.settings.ttl or math.inf) / 2, _RENEWED_S_MAX):
            words = "the server made the copy, and left the object as old as it was"
            self._client.failures.note("copy", "NotRenewed", words)
            raise self._client.error("copy", "NotRenewed", words)
        return age_s is not None

    def not_deleted(self) -> BucketError:
        words = "the server confirmed to have deleted objects that it still lists"
        self._client.failures.note("delete", "NotDeleted", words)
        return self._client.error("delete", "NotDeleted", words)

    def close(self) -> None:
        self._client.close()

    def _deadline(self) -> float:
        settings = self._client.settings
        return min(self.deadline, time.monotonic() + settings.attempts * (settings.request_timeout + 1.0))
