"""Grants: what each process that shares a namespace may yet store, told to the others by the names of small objects.

    PREFIX/NAMESPACE/grants/OWNER-BYTES-SECONDS

OWNER is 16 random digits of one tier in one process, BYTES its grant, SECONDS how long that holds, by the server's
clock, from when the object was written. An owner that was killed is forgotten after that time: it cannot be told from
one that is slow, and may have sent its last store at the end of it. Everything is in the names, so one listing tells
all. How the capacity follows from this: `ledger.py`.

A request to delete may come late: whoever found a grant lapsed sends it later, and the server may carry it out later
still. So that it never meets a grant that holds, **nobody relies on a name again that has lapsed, or that was to be
deleted**. Its owner draws a new OWNER instead.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from dataclasses import dataclass

from tiered_kv.errors import TierUnavailableError
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.listing import Listed, Listing
from tiered_kv_s3.naming import GRANT
from tiered_kv_s3.verdict import Verdict

CLOCKS_S = 10.0
"""How far the clocks of one service's servers may be apart."""
_MARGIN_S = 20.0
"""How late a grant may be renewed, since requests are slow or repeated. Who is later stores nothing until then."""
_LIFETIME_STEP_S = 10
"""Lifetimes are rounded up to it, so that a name does not change with every round."""
_REQUEST_S_MAX = 10.0
_SPENT_MAX = 1000
"""Names to remember before a new OWNER is drawn, which forgets them."""


@dataclass(frozen=True, slots=True)
class OtherGrants:
    """What the others may yet store.

    Args:
        total_bytes: All of it.
        owners: How many they are.
    """

    total_bytes: int
    owners: int


class Grants:
    """This process's grant, and those of the others. One thread, the caretaker's.

    Every method raises `TierUnavailableError` where the server does not do it.

    Args:
        bucket, listing: Where they are.
        prefix: What the names of all grants begin with.
        interval_s: The pause after which the grant is announced again, at most, besides one as long as a round.
    """

    def __init__(self, bucket: Bucket, listing: Listing, prefix: str, interval_s: float) -> None:
        self._bucket = bucket
        self._listing = listing
        self._prefix = prefix
        self._owner = secrets.token_hex(8)
        self._interval_s = interval_s
        self._lifetime_s = 0
        self.allow_for(0.0)
        self._written: dict[str, float] = {}  # names of our own that may be there, and until when they hold at least
        self._spent: set[str] = set()  # those with this OWNER that must not be written again

    def allow_for(self, round_s: float) -> None:
        """Announce what holds until the round after the next begins, if that takes `round_s` as the last one has.

        No longer, since for so long it is kept from the others if this process is killed.
        """
        needed_s = self._interval_s + 2 * round_s + _MARGIN_S
        self._lifetime_s = _LIFETIME_STEP_S * math.ceil(needed_s / _LIFETIME_STEP_S)

    def announce(self, size_bytes: int) -> float:
        """Tell the others of a grant; return until when it holds, in seconds of `time.monotonic()`."""
        name = self._name_for(size_bytes)
        held_until_s = self._written.get(name, math.inf)
        valid_until_s = self._write(name)
        if time.monotonic() >= held_until_s:  # it had lapsed before it was renewed: others may be deleting it
            self._spent.add(name)
            name = self._name_for(size_bytes)
            valid_until_s = self._write(name)
        for former in [each for each in self._written if each != name]:
            self._forget(former, time.monotonic() + _REQUEST_S_MAX)
        return valid_until_s

    def of_others(self, deadline: float) -> OtherGrants:
        """Return what the others have announced, and delete what nobody has renewed for long."""
        by_owner: dict[str, int] = {}
        for page in self._listing.pages(self._prefix, deadline):
            for entry in page:
                said = GRANT.fullmatch(entry.name.removeprefix(self._prefix))
                if said is None or said["owner"] == self._owner:
                    continue
                if _has_lapsed(entry, said):
                    self._bucket.delete(entry.name, deadline)
                else:  # while it is being replaced there are two
                    by_owner[said["owner"]] = by_owner.get(said["owner"], 0) + int(said["bytes"])
        return OtherGrants(sum(by_owner.values()), len(by_owner))

    def give_up(self, deadline: float) -> None:
        """Tell the others that this process stores nothing any more."""
        for name in list(self._written):
            self._forget(name, deadline)

    def _name_for(self, size_bytes: int) -> str:
        """Return a name that nobody has reason to delete."""
        said = f"{size_bytes}-{self._lifetime_s}"
        name = f"{self._prefix}{self._owner}-{said}"
        has_lapsed = time.monotonic() >= self._written.get(name, math.inf)
        if not has_lapsed and name not in self._spent and len(self._spent) < _SPENT_MAX:
            return name
        self._owner = secrets.token_hex(8)
        self._spent.clear()
        return f"{self._prefix}{self._owner}-{said}"

    def _write(self, name: str) -> float:
        """Write a grant; return until when it holds."""
        began_s = time.monotonic()
        valid_until_s = began_s + self._lifetime_s
        self._written.setdefault(name, valid_until_s)  # even if no answer comes it may be there
        verdict = self._bucket.put(name, [b""], began_s + _REQUEST_S_MAX)
        if verdict is not Verdict.DONE:
            raise TierUnavailableError(f"a grant cannot be written: {verdict.reason}", operation="grant")
        self._written[name] = valid_until_s
        return valid_until_s

    def _forget(self, name: str, deadline: float) -> None:
        self._spent.add(name)
        verdict = self._bucket.delete(name, deadline)
        if verdict is not Verdict.DONE:
            raise TierUnavailableError(f"a grant cannot be deleted: {verdict.reason}", operation="grant")
        self._written.pop(name, None)


@dataclass(frozen=True, slots=True)
class KnownGrants:
    """The grants of a namespace at one moment.

    Args:
        owners: How many processes have one that holds.
        lapsed: The names of those that do not hold, and never will again.
    """

    owners: int
    lapsed: frozenset[str]


def known_grants(listing: Listing, prefix: str, deadline: float) -> KnownGrants:
    """Return what is known of all grants.

    Args:
        listing, prefix: As for `Grants`.
        deadline: When to give up, in seconds of `time.monotonic()`.

    Raises:
        TierUnavailableError: The server does not list.
    """
    owners: set[str] = set()
    lapsed: set[str] = set()
    for page in listing.pages(prefix, deadline):
        for entry in page:
            said = GRANT.fullmatch(entry.name.removeprefix(prefix))
            if said is None:
                continue
            if _has_lapsed(entry, said):
                lapsed.add(entry.name)
            else:
                owners.add(said["owner"])
    return KnownGrants(len(owners), frozenset(lapsed))


def _has_lapsed(entry: Listed, said: re.Match[str]) -> bool:
    return entry.age_s > int(said["seconds"]) + CLOCKS_S
