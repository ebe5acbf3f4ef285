"""The processes of a namespace agree that one of them sweeps: listings cost money, and all would list the same.

The object `sweep` names the process that swept last; the object's age tells when. While it is younger than `_FRESH`
of the interval, the sweeper's thread of any other process does not sweep. If the named process ends, the object becomes
old, and another process takes over. Now and then two sweep at once, which does no harm.

    tiered-kv sweep 1 PROCESS DELETED_S USED_BYTES

PROCESS is random. DELETED_S is the age at which sweeps delete blocks to keep the `capacity`; `inf` if no sweep does so
soon. The other processes renew used blocks by this age. USED_BYTES is the size of all blocks after the sweep.
"""

from __future__ import annotations

import math
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tiered_kv.toolkit.objects.store import ObjectControl
from tiered_kv.toolkit.objects.verdict import BucketError

MARK_BYTES_MAX: Final = 128
_FORM: Final = re.compile(rb"tiered-kv sweep 1 ([0-9a-f]{16}) (inf|\d{1,10}) (\d{1,18})\n")
_FRESH: Final = 0.75
"""Part of the interval in which a sweep of another process is enough."""
_AHEAD_S: Final = 60.0  # how far a server's clocks may differ


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep: DELETED_S and USED_BYTES, as above."""

    deleted_s: float = math.inf
    used_bytes: int = 0


class SweepRight:
    """One process's right to sweep. Only the sweeper's thread uses it."""

    def __init__(self, control: ObjectControl, name: str, interval_s: float) -> None:
        self._control = control
        self._name = name
        self._interval_s = interval_s
        self._process = secrets.token_hex(8)

    def take(self, last: Swept) -> Swept | None:
        """Return None if this process sweeps now, else the result of another's sweep.

        If the object cannot be read or written, each process sweeps.
        """
        swept = self.others()
        if swept is None:
            self.end(last)
        return swept

    def others(self) -> Swept | None:
        """Return the result of another process's sweep; None if there was none of late."""
        with suppress(BucketError):
            age_s, data = self._control.read(self._name, MARK_BYTES_MAX)
            found = _FORM.fullmatch(data)
            is_fresh = -_AHEAD_S <= age_s < _FRESH * self._interval_s
            if found is not None and is_fresh and found[1].decode() != self._process:
                return Swept(float(found[2]), int(found[3]))
        return None

    def end(self, swept: Swept) -> None:
        """Write the result of a sweep. Before a sweep, write the last result, so that no other process sweeps."""
        deleted = "inf" if swept.deleted_s == math.inf else str(max(0, round(swept.deleted_s)))
        with suppress(BucketError):
            self._control.write(
                self._name, f"tiered-kv sweep 1 {self._process} {deleted} {swept.used_bytes}\n".encode()
            )

    def leave(self) -> None:
        """Let another process sweep: this one has failed."""
        with suppress(BucketError):
            self._control.delete([self._name])
