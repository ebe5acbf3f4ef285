"""Where the mark of a namespace's epoch is kept: one small object. The rules are in `tiered_kv.toolkit.epoch`."""

from __future__ import annotations

from tiered_kv.errors import TierUnavailableError
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.verdict import Verdict

_GIVEN_UP = b"too long for a mark"


class MarkError(TierUnavailableError):
    """The mark cannot be read or written.

    Args:
        message, tier: As in `TierError`.
        verdict: Why.
    """

    def __init__(self, message: str, verdict: Verdict, *, tier: str) -> None:
        super().__init__(f"{message}: {verdict.reason}", tier=tier, operation="epoch")
        self.verdict = verdict


class MarkObject:
    """Reads and writes the object; an `EpochStore`. Any thread may call.

    Every method raises `MarkError` where the server does not do it by the deadline.

    Args:
        bucket: Where the object is.
        name: Its name.
        tier: The tier's name, for messages.
    """

    def __init__(self, bucket: Bucket, name: str, tier: str) -> None:
        self._bucket = bucket
        self._name = name
        self._tier = tier

    def read(self, deadline: float) -> bytes | None:
        data = bytearray()

        def sink(size_bytes: int) -> list[memoryview] | None:
            data[:] = bytes(size_bytes) if size_bytes <= MARK_BYTES_MAX else _GIVEN_UP
            return [memoryview(data)] if size_bytes <= MARK_BYTES_MAX else None

        verdict = self._bucket.get(self._name, sink, deadline, expires=False)
        if verdict is Verdict.ABSENT:
            return None
        if verdict not in (Verdict.DONE, Verdict.OVERSIZED):
            raise MarkError(f"the object {self._name} cannot be read", verdict, tier=self._tier)
        return bytes(data)

    def create(self, data: bytes, deadline: float) -> None:
        verdict = self._bucket.put(self._name, [data], deadline, only_if_absent=True)
        if verdict is Verdict.REFUSED:  # a server that knows no conditions; who is written over shares with nobody
            verdict = self._bucket.put(self._name, [data], deadline)
        if verdict is not Verdict.PRESENT:
            self._check_written(verdict)

    def write(self, data: bytes, deadline: float) -> None:
        self._check_written(self._bucket.put(self._name, [data], deadline))

    def _check_written(self, verdict: Verdict) -> None:
        if verdict is not Verdict.DONE:
            raise MarkError(f"the object {self._name} cannot be written", verdict, tier=self._tier)
