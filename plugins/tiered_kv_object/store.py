"""Requests for the bucket's objects by obstore, repeated within a deadline.

The tier's workers call it, several at once. A request ends by its deadline with a `Verdict`. obstore never holds a
row: it copies the pieces of an object when a PUT begins, and `get` copies what it returned into the row.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import obstore

from tiered_kv.toolkit.objects.settings import HEADS_IN_FLIGHT_MAX
from tiered_kv.toolkit.objects.store import ObjectStore, Sink
from tiered_kv.toolkit.objects.verdict import FAILURES, RETRYABLE, Verdict
from tiered_kv_object.client import ObjectClient, Opened


class ObstoreStore(ObjectStore):
    """The requests for one bucket. Any thread may call."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client
        self._retries = client.retries
        self._counters = client.failures.counters
        self._ttl_s = client.settings.ttl or math.inf

    @property
    def heard_s(self) -> float:
        return self._client.heard_s

    def put(
        self, name: str, pieces: Sequence[bytes | memoryview], deadline: float, *, only_if_absent: bool = False
    ) -> Verdict:
        how: Any = {"mode": "create" if only_if_absent else "overwrite", "use_multipart": False}

        def put(opened: Opened) -> Verdict:
            obstore.put(opened.store, name, list(pieces), **how)
            return Verdict.DONE

        async def put_async(opened: Opened) -> Verdict:
            await obstore.put_async(opened.store, name, list(pieces), **how)
            return Verdict.DONE

        def attempt() -> Verdict:
            self._counters.add("requests_total", "put")
            verdict = self._client.request(put, put_async, deadline)
            return Verdict.NO_BUCKET if verdict is Verdict.ABSENT else verdict  # no object is needed to write one

        return self._retries.run("put", attempt, deadline)

    def get(
        self,
        name: str,
        sink: Sink,
        bytes_max: int,
        deadline: float,
        *,
        expires: bool = True,
        on_age: Callable[[float], None] = lambda age_s: None,
    ) -> Verdict:
        ttl_s = self._ttl_s if expires else math.inf

        def begin(meta: Any) -> Sequence[memoryview] | Verdict:  # Any: obstore's dictionary
            if self._client.age_s(meta) > ttl_s:
                return Verdict.EXPIRED
            parts = sink(meta["size"])
            return Verdict.OVERSIZED if parts is None else parts

        def end(parts: Sequence[memoryview], data: Any, meta: Any) -> Verdict:  # Any: obstore's buffer
            rest = memoryview(data)
            if len(rest) != meta["size"] or self._retries.closing.is_set():
                return Verdict.BROKEN
            for part in parts:
                part[:], rest = rest[: len(part)], rest[len(part) :]
            on_age(self._client.age_s(meta))
            return Verdict.DONE

        def get(opened: Opened) -> Verdict:
            result = obstore.get(opened.store, name)
            parts = begin(result.meta)
            return parts if isinstance(parts, Verdict) else end(parts, result.bytes(), result.meta)

        async def get_async(opened: Opened) -> Verdict:
            result = await obstore.get_async(opened.store, name)
            parts = begin(result.meta)
            return parts if isinstance(parts, Verdict) else end(parts, await result.bytes_async(), result.meta)

        def attempt() -> Verdict:
            self._counters.add("requests_total", "get")
            return self._client.request(get, get_async, deadline)

        return self._retries.run("get", attempt, deadline)

    def delete(self, name: str, deadline: float) -> Verdict:
        def delete(opened: Opened) -> Verdict:
            obstore.delete(opened.store, name)
            return Verdict.DONE

        async def delete_async(opened: Opened) -> Verdict:
            await obstore.delete_async(opened.store, name)
            return Verdict.DONE

        def attempt() -> Verdict:
            self._counters.add("requests_total", "delete")
            return self._client.request(delete, delete_async, deadline)

        verdict = self._retries.run("delete", attempt, deadline)
        return Verdict.DONE if verdict is Verdict.ABSENT else verdict

    def head_all(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        """See `ObjectStore`. Failed requests are tried again in the first half of the time."""
        begun_s = time.monotonic()
        # Two requests in a row for an object may stall before the deadline.
        stall_s = min(self._client.settings.request_timeout, max(0.0, deadline - begun_s) / 2)
        verdicts = [Verdict.UNASKED] * len(names)
        waiting = list(range(len(names)))
        for attempt in self._retries.attempts((begun_s + deadline) / 2):
            self._counters.add("retried_requests_total", count=len(waiting) if attempt else 0)
            self._head_each(names, waiting, verdicts, stall_s, deadline)
            self._counters.add("slow_down_answers_total", count=verdicts.count(Verdict.SLOW_DOWN))
            waiting = [at for at, verdict in enumerate(verdicts) if verdict in RETRYABLE]
            if not waiting:
                break
        for verdict in FAILURES.intersection(verdicts):
            self._client.failures.note("head", verdict, self._retries.words.get(verdict, ""))
        return verdicts

    def _head_each(
        self, names: Sequence[str], waiting: Sequence[int], verdicts: list[Verdict], stall_s: float, deadline: float
    ) -> None:
        """Ask for the `waiting` names until the deadline, some at a time, and put each verdict into its place."""

        async def head(opened: Opened, at: int, room: asyncio.Semaphore) -> None:
            async with room:
                self._counters.add("requests_total", "head")
                verdicts[at] = Verdict.TIMEOUT  # an answer replaces it
                try:
                    async with asyncio.timeout(stall_s):
                        meta = await obstore.head_async(opened.store, names[at])
                    is_old = self._client.age_s(meta) > self._ttl_s
                    verdicts[at] = Verdict.EXPIRED if is_old else Verdict.DONE
                except TimeoutError:
                    pass
                except Exception as error:  # obstore's, which have no common class
                    verdicts[at] = self._client.verdict_on(error, opened)

        async def head_each(opened: Opened) -> Verdict:
            room = asyncio.Semaphore(HEADS_IN_FLIGHT_MAX)
            await asyncio.gather(*(head(opened, at, room) for at in waiting))
            return Verdict.TIMEOUT if {verdicts[at] for at in waiting} <= {Verdict.TIMEOUT} else Verdict.DONE

        self._client.request(None, head_each, deadline)

    def sentence(self, verdict: Verdict, operation: str) -> str:
        return self._client.sentence(verdict, self._retries.words.get(verdict, ""), operation)

    def close(self) -> None:
        self._client.close()
