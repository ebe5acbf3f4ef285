"""A tier that gives the tier below it secret names in place of keys: a `WrapperTier`.

In a clone:

    pip install '.[fs]'
    python examples/keyed_names.py

A block's key is a hash of tokens: whoever knows a prompt can compute it, and search the storage for it. A name is a
keyed hash (BLAKE2b, RFC 7693) of a key, which nobody can compute without the secret.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import tiered_kv
from tiered_kv.base import get_offload_group_idx, make_offload_key
from tiered_kv.toolkit import JobMetadata, JobResult, OffloadKey, ReqContext, SecondaryTierFactory, WrapperTier


class KeyedNames(WrapperTier):
    """Gives the tier of the entry `inner` names by `secret`, 64 hexadecimal digits."""

    reports_stored = False

    def __init__(self, spec: object, view: memoryview, tier_type: str, *, secret: str, inner: Mapping[str, object]):
        super().__init__(SecondaryTierFactory.create(spec, view, inner))
        self._mac = hashlib.blake2b(self.tier_spec.namespace_digest, digest_size=32, key=bytes.fromhex(secret))
        self._key_of: dict[int, dict[OffloadKey, OffloadKey]] = {}  # the names of each job in flight

    def name_of(self, key: OffloadKey) -> OffloadKey:
        (mac := self._mac.copy()).update(key)
        return make_offload_key(mac.digest(), get_offload_group_idx(key))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.inner.lookup(self.name_of(key), req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.inner.touch([self.name_of(key) for key in keys], req_context)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._submit(self.inner.submit_store, job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._submit(self.inner.submit_load, job_metadata)

    def _submit(self, submit: Callable[[JobMetadata], None], job: JobMetadata) -> None:
        names = [self.name_of(key) for key in job.keys]
        submit(replace(job, keys=names))  # if it raises, the job is not reported
        self._key_of[job.job_id] = dict(zip(names, job.keys, strict=True))

    def get_finished(self) -> Iterable[JobResult]:
        for result in self.inner.get_finished():
            key_of, names = self._key_of.pop(result.job_id), result.successful_keys
            yield result if names is None else replace(result, successful_keys=[key_of[name] for name in names])

    def take_events(self) -> tuple[()]:
        list(self.inner.take_events())  # the tier's events have names, so none is passed on; its queue stays short
        return ()

    def take_absent(self) -> tuple[()]:
        list(self.inner.take_absent())  # names, too: what the tier lacks is not stored again
        return ()


def main() -> None:
    keys, blocks = [secrets.token_bytes(32) for _ in range(4)], bytes(4 * 4096)
    stack = {"namespace": {"model": "example"}, "block": {"bytes": 4096}, "primary": {"capacity": "64KiB"}}
    with tempfile.TemporaryDirectory() as directory:
        fs = {"type": "fs", "path": directory, "capacity": "1MiB"}
        for secret in ("5a" * 32, "5a" * 32, "a5" * 32):
            entry = {"type": f"{__name__}:KeyedNames", "secret": secret, "inner": fs}
            with tiered_kv.open_stack({**stack, "secondary": [entry]}) as opened:
                print(f"found {len(opened.get(keys))} of 4 blocks, stored {opened.put(keys, blocks)}")
        content = b"".join(path.read_bytes() for path in Path(directory).rglob("*") if path.is_file())
        print(f"the files contain {sum(map(content.count, keys))} keys")


if __name__ == "__main__":
    main()
