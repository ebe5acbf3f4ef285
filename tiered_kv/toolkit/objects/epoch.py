"""The object that keeps a namespace's epoch mark.

The tier's workers and the commands call it, through `tiered_kv.toolkit.epoch.Epoch`. What must stay true: a request
that fails raises, so that no process takes a mark for missing that the server did not show.
"""

from __future__ import annotations

from tiered_kv.toolkit.epoch import MARK_BYTES_MAX
from tiered_kv.toolkit.objects.store import ObjectControl, ObjectStore
from tiered_kv.toolkit.objects.verdict import BucketError, Verdict


class EpochObject:
    """The object with an epoch's mark, as an `EpochStore`. Methods raise `BucketError` if a request fails."""

    def __init__(self, store: ObjectStore, name: str, tier: str) -> None:
        self._store = store
        self._name = name
        self._tier = tier

    def read(self, deadline: float) -> bytes | None:
        verdict, data = self._store.read(self._name, MARK_BYTES_MAX, deadline)
        if verdict is Verdict.ABSENT:
            return None
        self._check(verdict, "get", Verdict.OVERSIZED)  # a damaged mark: no bytes
        return data

    def create(self, data: bytes, deadline: float) -> None:
        verdict = self._store.put(self._name, [data], deadline, only_if_absent=True)
        if verdict is Verdict.REFUSED:  # a server without conditional writes
            verdict = self._store.put(self._name, [data], deadline)
        self._check(verdict, "put", Verdict.PRESENT)

    def write(self, data: bytes, deadline: float) -> None:
        self._check(self._store.put(self._name, [data], deadline), "put")

    def _check(self, verdict: Verdict, operation: str, also_good: Verdict = Verdict.DONE) -> None:
        if verdict not in (Verdict.DONE, also_good):
            raise BucketError(self._store.sentence(verdict, operation), verdict, tier=self._tier, operation="epoch")


class RemovableObject(EpochObject):
    """An epoch's mark that a purge deletes, by the requests that delete blocks: some servers know no others."""

    def __init__(self, store: ObjectStore, name: str, tier: str, control: ObjectControl) -> None:
        super().__init__(store, name, tier)
        self._control = control

    def remove(self, deadline: float) -> None:
        for code in self._control.delete([self._name]).values():
            raise BucketError(f"the server refuses to delete it: {code}", code, tier=self._tier, operation="epoch")
