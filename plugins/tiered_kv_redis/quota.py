"""A namespace's quota, and the thread that keeps its account with the other processes.

A transfer thread takes bytes from the process's own grants, and goes to the server for a further one only when they
are used up. The keeper's thread tells the others that this process lives, gives back what it does not use, surveys, and
evicts what was used longest ago when the quota is nearly full.
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
from tiered_kv_redis.survey import Candidate, evict, survey
from tiered_kv_redis.topology import Topology

_log = logging.getLogger(__name__)

_KEEP_S: Final = 1.0
"""How often it is looked whether a survey is still one's own; it is lost after `SURVEY_MS` at the earliest."""
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
        self.round = threading.Event()
        """Set when the round that goes on now, or begins next, has ended; replaced then."""
        self._is_noted = False
        # The keeper's own.
        self._candidates: deque[Candidate] = deque()
        self._surveyed_s = -math.inf  # when this process did
        self._survey_seen = (-1, 0.0)  # the number of the last one of anybody's, and since when it is that
        self._survey_again_s: float | None = None
        self._kept_s = 0.0  # when the survey was last seen to be ours
        self._beats: dict[bytes, tuple[int, float]] = {}  # of the other owners, and since when
        self._is_stopping = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"tiered-kv-{name}-quota", daemon=True)
        self._thread.start()

    # Any thread.

    def wake(self) -> None:
        """Have a round begin, unless one has been asked for already."""
        self._woken.set()

    def stats(self) -> dict[str, int]:
        """Return gauges by name."""
        return {
            "quota_bytes": self._limits.quota_bytes,
            "account_bytes": self.grants.total_bytes,
            "granted_bytes": self.grants.outstanding_bytes,
        }

    def close(self, timeout_s: float) -> None:
        """Give the grants back, if that takes no longer than `timeout_s`, and end the thread."""
        self._is_stopping = True
        self._woken.set()
        self._thread.join(timeout_s)

    # The keeper's thread.

    def _serve(self) -> None:
        tick_s = 0.0
        while not self._is_stopping:
            self._woken.wait(max(0.0, tick_s - time.monotonic()))
            self._woken.clear()
            if self._is_stopping:
                break
            try:
                if time.monotonic() >= tick_s:
                    tick_s = time.monotonic() + self._limits.tick_s
                    self.grants.tell(self._deadline())
                self._look_after()
            except Exception as error:  # none of them, a mistake of ours included, may end the thread
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

    def _look_after(self) -> None:
        """Survey if it is time, and make room if there is little."""
        statement = self._account.statement(self._deadline())
        dead = self._watch(statement)
        now_s = time.monotonic()
        if statement.surveys != self._survey_seen[0]:
            self._survey_seen = (statement.surveys, now_s)
        is_due = (
            not statement.is_settled
            or bool(dead)
            or now_s - self._survey_seen[1] >= self._limits.survey_interval_s
            or self.grants.are_in_doubt
            or (self._survey_again_s is not None and now_s >= self._survey_again_s)
        )
        self.grants.total_bytes = statement.total_bytes if statement.is_settled else 0
        if not is_due and self.grants.total_bytes <= self._limits.full_bytes:
            return
        self.grants.tell(self._deadline())  # the less others have to take for granted to us, the more there is
        self._kept_s = time.monotonic()
        begun = self._account.begin_survey(self._deadline())
        if begun is None:
            return  # another process is at it
        try:
            self._make_room(begun, dead, is_due=is_due)
        finally:
            self._account.end_survey(self._deadline())

    def _make_room(self, begun: Statement, dead: Sequence[bytes], *, is_due: bool) -> None:
        """Survey and evict, as the one process that does."""
        limits = self._limits
        is_fresh = time.monotonic() - self._surveyed_s < limits.fresh_s
        if (is_due or not is_fresh or not self._candidates) and not self._survey(begun, dead):
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
        found = survey(nodes, self._digest, self._limits.record_bytes_max, self._deadline, self._may_go_on)
        if found is None or not self._may_go_on():
            self.grants.are_in_doubt = True
            return False
        grants_bytes = sum(size_bytes for owner, (size_bytes, _) in begun.owners.items() if owner not in dead)
        self._account.note_survey(found.used_bytes + grants_bytes - begun.net_bytes, dead, self._deadline())
        self._candidates = found.candidates
        self._surveyed_s = time.monotonic()
        self._counters.add("surveys")
        return True

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
        if not self._is_stopping and time.monotonic() - self._kept_s >= _KEEP_S:
            if not self._account.keep_survey(self._deadline()):
                return False
            self._kept_s = time.monotonic()
        return not self._is_stopping

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
