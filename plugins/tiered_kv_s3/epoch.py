"""The object that keeps a namespace's epoch mark. The rules are in `tiered_kv.toolkit.epoch`."""

from __future__ import annotations

from tiered_kv.toolkit.epoch import MARK_BYTES_MAX
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.verdict import BucketError, Verdict


class EpochObject:
    """An `EpochStore`; every method raises `BucketError` if the request fails or its time is over."""

    def __init__(self, bucket: Bucket, name: str, tier: str) -> None:
        self._bucket = bucket
        self._name = name
        self._tier = tier

    def read(self, deadline: float) -> bytes | None:
        verdict, data = self._bucket.read(self._name, MARK_BYTES_MAX, deadline)
        if verdict is Verdict.ABSENT:
            return None
        self._check(verdict, "get", Verdict.OVERSIZED)  # a damaged mark: no bytes
        return data

    def create(self, data: bytes, deadline: float) -> None:
        verdict = self._bucket.put(self._name, [data], deadline, only_if_absent=True)
        if verdict is Verdict.REFUSED:  # a server without conditional writes
            verdict = self._bucket.put(self._name, [data], deadline)
        self._check(verdict, "put", Verdict.PRESENT)

    def write(self, data: bytes, deadline: float) -> None:
        self._check(self._bucket.put(self._name, [data], deadline), "put")

    def _check(self, verdict: Verdict, operation: str, also_good: Verdict = Verdict.DONE) -> None:
        if verdict not in (Verdict.DONE, also_good):
            raise BucketError(self._bucket.sentence(verdict, operation), verdict, tier=self._tier, operation="epoch")
