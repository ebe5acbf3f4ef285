"""The request that is being audited: the blocks to compare, and the results."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey, ReqContext, get_offload_group_idx
from tiered_kv.tiering.guarded import GuardedTier


@dataclass(slots=True, eq=False)
class Audited:
    """The request that is being audited.

    Attributes:
        req_id: Its id.
        context: The audit's own towards the tiers, so that their answers outlive the request.
        until_s: When the audit is given up.
        first_key: The first key that was withheld. An engine looks up blocks that it has neither computed nor kept. So
            the blocks that it stores from this key on, in the same group, are computed anew.
        storer: The request that stores `first_key`. A program's `get` and `put` are two requests.
        is_finished: Whether the request has ended; only then may another be the storer.
        is_taking: Whether further blocks are compared.
        taken: Blocks that were considered.
        asked: Blocks that the storer is storing, with the tier that has them; None while that is not known.
        pending: Copies that have been found but not compared.
        compared: Copies that have been.
        different: Keys of those that differ.
        largest: The largest difference so far.
    """

    req_id: str
    context: ReqContext
    until_s: float
    first_key: OffloadKey | None = None
    storer: str | None = None
    is_finished: bool = False
    is_taking: bool = True
    taken: set[OffloadKey] = field(default_factory=set)
    asked: dict[OffloadKey, GuardedTier | None] = field(default_factory=dict)
    pending: int = 0
    compared: int = 0
    different: list[OffloadKey] = field(default_factory=list)
    largest: float = 0.0

    def is_stored_by(self, req_id: str, keys: Collection[OffloadKey]) -> bool:
        """Return whether a request that stores `keys` stores what this one has computed."""
        if not req_id or not self.is_taking or self.first_key is None:
            return False
        if self.storer is None and (req_id == self.req_id or self.is_finished) and self.first_key in keys:
            self.storer = req_id
        return self.storer == req_id

    def computed(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return those of `keys` that were computed anew, and have not been considered before."""
        assert self.first_key is not None
        ordered, group = list(dict.fromkeys(keys)), get_offload_group_idx(self.first_key)
        first = ordered.index(self.first_key) if self.first_key in ordered else 0
        return [key for key in ordered[first:] if get_offload_group_idx(key) == group and key not in self.taken]


def is_chosen(req_id: str, share: float) -> bool:
    """Return whether a request is in the audited share; the same ids always are."""
    return int(log_name(req_id), 16) < share * 2.0**64


def log_name(named: str | bytes) -> str:
    """Return the digest of a request or a block for a log."""
    name = named.encode("utf-8", "surrogatepass") if isinstance(named, str) else named
    return hashlib.blake2b(name, digest_size=8).hexdigest()
