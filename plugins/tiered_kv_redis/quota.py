"""A namespace's quota, and the thread that keeps its account with the other processes.

A transfer thread takes bytes from the process's own grants, and goes to the server for a further one only when they
are used up. The keeper's thread tells the others that this process lives, gives back what it does not use, surveys, and
evicts what was used longest ago when the quota is nearly full. After a survey everybody rests, for so long that all
surveys together take a small share of the time (`rest.py`); what was found before is used up meanwhile, and what is
known to be wrong in the account, grants of the dead included, is put right after the rest.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from tiered_kv.errors import ConfigError
from tiered_kv_redis.account import Account, LostAccountError, Statement
from tiered_kv_redis.counters import Counters
from tiered_kv_redis.grants import GRANTS_MIN, Grants, QuotaLimits
from tiered_kv_redis.node import NodeDownError
from tiered_kv_redis.reasons import WRONG_TYPE
from tiered_kv_redis.replacing import Replacing
from tiered_kv_redis.rest import Rest
from tiered_kv_redis.survey import Candidate, evict, survey
from tiered_kv_redis.topology import Topology

_log = logging.getLogger(__name__)

_KEEP_S: Final = 1.0
"""How often it is looked whether a survey is still one's own; it is lost after `SURVEY_MS` at the earliest."""
_POLL_S: Final = 0.25
"""How soon it is looked again where there is no room and none can be made now."""
_STEP_S_MAX: Final = 5.0
"""How long one step at the server may take."""


class Quota:
    """The quota of one namespace, as one process keeps it. Any thread may call.

    Args:
        topology: The servers.
        namespace_digest: 16 bytes.
        limits: See there.
        counters: Where to count.
        name: The tier's name.

    Raises:
        ConfigError: The quota is too small for the blocks.
    """

    def __init__(
        self, topology: Topology, namespace_digest: bytes, limits: QuotaLimits, counters: Counters, name: str
    ) -> None:
        if limits.quota_bytes < 2 * GRANTS_MIN * limits.record_bytes_max:
            raise ConfigError(
                f"{limits.quota_bytes} bytes are too few for records of {limits.record_bytes_max}; "
                f"give at least {2 * GRANTS_MIN * limits.record_bytes_max}",
                location="quota",
            )
        self._topology = topology
        self._digest = namespace_digest
        self._limits = limits
        self._counters = counters
        self._name = name
        self._account = Account(topology, namespace_digest)
        self.grants = Grants(self._account, limits, counters, self)
        self._replacing = Replacing(limits.quota_bytes, limits.record_bytes_max)
        self.round = threading.Event()
        """Set when the round that goes on now, or begins next, has ended; replaced then."""
        self._is_noted = False
        # The keeper's own.
        self._candidates: deque[Candidate] = deque()
        self._surveyed_s = -math.inf  # when this process did
        self._survey_seen = (-1, 0.0)  # the number of the last one of anybody's, and since when it is that
        self._survey_again_s: float | None = None
        self._rest = Rest()
        self._account_seen: bytes | None = None  # the id of the account that was seen last
        self._tries_seen: int | None = None
        self._is_try_untold = False  # the others do not know yet of our last survey
        self._kept_s = 0.0  # when the survey was last seen to be ours
        self._beats: dict[bytes, tuple[int, float]] = {}  # of the other owners, and since when
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"tiered-kv-{name}-quota", daemon=True)
        self._thread.start()

    # Any thread.

    def wake(self) -> None:
        """Have a round begin, unless one has been asked for already."""
        self._woken.set()

    def take_replacements(self, blocks: int) -> int:
        """Return how many blocks that cannot be read here may be replaced now; see `Replacing`."""
        taken = self._replacing.take(blocks)
        if taken < blocks:
            self.wake()
        return taken

    def give_back_replacements(self, blocks: int) -> None:
        """Undo `take_replacements` for blocks that were not replaced."""
        self._replacing.give_back(blocks)

    def stats(self) -> dict[str, int]:
        """Return gauges by name."""
        return {
            "quota_bytes": self._limits.quota_bytes,
            "account_bytes": self.grants.total_bytes,
            "granted_bytes": self.grants.outstanding_bytes,
        }

    def close(self, timeout_s: float) -> None:
        """Give the grants back, if that takes no longer than `timeout_s`, and end the thread."""
        self._stopping.set()
        self._woken.set()
        self._thread.join(timeout_s)

    # The keeper's thread.

    def _serve(self) -> None:
        tick_s = 0.0
        while not self._stopping.is_set():
            self._woken.wait(max(0.0, tick_s - time.monotonic()))
            self._woken.clear()
            if self._stopping.is_set():
                break
            try:
                if time.monotonic() >= tick_s:
                    tick_s = time.monotonic() + self._limits.tick_s
                    self.grants.tell(self._deadline())
                if not self._look_after():
                    self._stopping.wait(_POLL_S)  # those who wait for the round ask again then
            except Exception as error:  # none of them, a mistake of ours included, may end the thread
                if self._stopping.is_set():  # the connections were closed under it
                    break
                self._note(error)
                self.grants.are_in_doubt = True
                self._mend(error)
            ended, self.round = self.round, threading.Event()  # in one step: who asks now gets the next one
            ended.set()
        try:
            self.grants.leave(self._deadline())
        except (NodeDownError, LostAccountError) as error:
            self._note(error)
        self.round.set()

    def _mend(self, error: Exception) -> None:
        """Remove what somebody else has put in the account's place."""
        if isinstance(error, NodeDownError) and error.reason == WRONG_TYPE:
            with contextlib.suppress(NodeDownError):
                self._account.discard(self._deadline())

    def _look_after(self) -> bool:
        """Survey if it is time, and make room if there is little; False if that is wanted and cannot be done now."""
        statement = self._account.statement(self._deadline())
        dead = self._watch(statement)
        self._note_others(statement)
        if self._is_try_untold:
            self._tell_try()
        has_dead_grants = any(statement.owners[owner][0] for owner in dead)  # one without is forgotten in passing
        is_due = has_dead_grants or self._is_due(statement)
        self.grants.total_bytes = statement.total_bytes if statement.is_settled else 0
        is_full = self.grants.total_bytes > self._limits.full_bytes
        if not is_due and not is_full:
            return True
        if not self._rest.is_over:
            is_due = False
            if not (is_full and self._candidates):
                return False
        self.grants.tell(self._deadline())  # the less others have to take for granted to us, the more there is
        self._kept_s = time.monotonic()
        begun = self._account.begin_survey(self._deadline())
        if begun is None:
            return False  # another process is at it
        self._note_others(begun)  # it may have been until a moment ago
        try:
            self._make_room(begun, dead, is_due=is_due)
        finally:
            self._account.end_survey(self._deadline())
        return True

    def _note_others(self, statement: Statement) -> None:
        """See whether anybody has surveyed since the last look, and rest after that; a new account knows of no rest."""
        now_s = time.monotonic()
        if statement.surveys != self._survey_seen[0]:
            self._survey_seen = (statement.surveys, now_s)
            self._replacing.note_survey(len(statement.owners))
        if self._tries_seen is not None and (statement.id != self._account_seen or statement.tries < self._tries_seen):
            self._rest.end()
            self._is_try_untold = False
            self._tries_seen = 0 if statement.id else statement.tries  # without one nobody has opened it yet
        self._account_seen = statement.id
        if statement.tries != self._tries_seen:
            if self._tries_seen is not None:  # a newcomer does not know when that was
                self._rest.begin(statement.took_s)
            self._tries_seen = statement.tries

    def _is_due(self, statement: Statement) -> bool:
        """Return whether the blocks have to be counted, room or not."""
        now_s = time.monotonic()
        return (
            not statement.is_settled
            or now_s - self._survey_seen[1] >= self._limits.survey_interval_s
            or self.grants.are_in_doubt
            or self._replacing.is_short
            or (self._survey_again_s is not None and now_s >= self._survey_again_s)
        )

    def _make_room(self, begun: Statement, dead: Sequence[bytes], *, is_due: bool) -> None:
        """Survey and evict, as the one process that does."""
        limits = self._limits
        if self._rest.is_over:  # otherwise an old list is better than none: what was used since is passed over
            is_fresh = time.monotonic() - self._surveyed_s < limits.fresh_s
            if (is_due or not is_fresh or not self._candidates) and not self._survey(begun, dead):
                return
        elif not begun.is_settled:
            return
        while True:
            self.grants.total_bytes = self._account.statement(self._deadline()).total_bytes
            excess_bytes = self.grants.total_bytes - limits.low_bytes
            if excess_bytes <= 0 or not self._candidates or not self._may_go_on():
                return
            removed, removed_bytes = evict(self._candidates, excess_bytes, self._deadline())
            self._account.take_off(removed_bytes, self._deadline())
            self._counters.add("evicted_blocks", removed)

    def _survey(self, begun: Statement, dead: Sequence[bytes]) -> bool:
        """Count the blocks, and write down what the account did not know; False if that came to nothing."""
        self.grants.are_in_doubt = False
        if not begun.is_settled:
            # Grants of an account that was lost may be used until their owners notice; then it is looked at again.
            self._survey_again_s = time.monotonic() + 2 * self._limits.tick_s + self._limits.transfer_s
        elif self._survey_again_s is not None and time.monotonic() >= self._survey_again_s:
            self._survey_again_s = None
        self._topology.split([b""], self._deadline())  # so that the servers are known
        nodes = self._topology.nodes()
        try:
            with self._rest.after():
                found = survey(nodes, self._digest, self._limits.record_bytes_max, self._deadline, self._may_go_on)
        finally:
            self._is_try_untold = True  # where the server does not answer, it is told when it does again
            self._tell_try()
        if found is None or not self._may_go_on():
            self.grants.are_in_doubt = True
            return False
        now = self._account.statement(self._deadline())
        dead = [owner for owner in dead if now.owners.get(owner) == begun.owners.get(owner)]  # some are back, perhaps
        grants_bytes = sum(size_bytes for owner, (size_bytes, _) in begun.owners.items() if owner not in dead)
        self._account.note_survey(found.used_bytes + grants_bytes - begun.net_bytes, dead, self._deadline())
        self._survey_seen = (now.surveys + 1, time.monotonic())
        self._replacing.note_survey(len(now.owners) - len(dead))
        self._candidates = found.candidates
        self._surveyed_s = time.monotonic()
        self._counters.add("surveys")
        return True

    def _tell_try(self) -> None:
        """Tell the others that this process has surveyed, or tried to, so that they rest too."""
        self._account.note_try(self._rest.took_s, self._deadline())
        self._is_try_untold = False
        self._tries_seen = (self._tries_seen or 0) + 1

    def _watch(self, statement: Statement) -> list[bytes]:
        """Return the owners that have not been heard of for so long that they have ended."""
        now_s = time.monotonic()
        before = self._beats
        self._beats = {}
        for owner, (_, beat) in statement.owners.items():
            seen = before.get(owner)
            self._beats[owner] = seen if seen is not None and seen[0] == beat else (beat, now_s)
        return [
            owner
            for owner, (_, since_s) in self._beats.items()
            if now_s - since_s > self._limits.dead_s and owner != self._account.owner
        ]

    def _may_go_on(self) -> bool:
        if not self._stopping.is_set() and time.monotonic() - self._kept_s >= _KEEP_S:
            if not self._account.keep_survey(self._deadline()):
                return False
            self._kept_s = time.monotonic()
        return not self._stopping.is_set()

    def _deadline(self) -> float:
        return time.monotonic() + _STEP_S_MAX

    def _note(self, error: Exception) -> None:
        reason = error.reason if isinstance(error, NodeDownError) else type(error).__name__
        self._counters.add("failed_surveys")
        if not self._is_noted:
            self._is_noted = True
            _log.warning(
                "tier '%s': the quota's account cannot be kept: %s; further ones are only counted", self._name, reason
            )
