"""The account of a namespace's quota: one hash in the server, which every process of the namespace changes.

    tkv1:<namespace>:account
        id              random; a process whose grants are of another account has lost them
        net             all grants, less what was given back and what was evicted, since the account was opened
        offset          what the last survey found that `net` does not tell; missing until there was one
        survey          who surveys, or did last
        surveys         how many surveys there were
        tries           how many there were, those included that came to nothing
        took            how many milliseconds the last of these has taken
        g:<owner>       "<bytes> <beat>": what the owner may still store, at most, and a number that it raises

`net + offset` is an upper bound of the bytes of all blocks and all grants. A grant is given while it stays within the
quota: with HINCRBY, which every process may do at the same time, and which tells what it came to. If that is too
much, it is taken back. An owner writes down that it has a grant before it is in `net`, and that it has none after it
was taken off. So whoever reads the account in between sees too much, never too little.

All of it is one key, so it lies on one master of a cluster, and is lost as a whole. That is seen by its `id`. Nothing
is granted then until somebody has surveyed.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv_redis.exchange import converse
from tiered_kv_redis.keyspace import KEY_PREFIX
from tiered_kv_redis.listing import Listing, Value
from tiered_kv_redis.node import NodeDownError
from tiered_kv_redis.reasons import CLUSTER_DOWN, MOVED, READ_ONLY
from tiered_kv_redis.replies import command
from tiered_kv_redis.topology import Topology

SURVEY_MS: Final = 60_000
"""How long a survey is one's own after the last step of it."""

_TOOK_MS_MAX: Final = 600_000
"""What is believed of `took`."""

_OWNER = b"g:"


@dataclass(frozen=True, slots=True)
class Statement:
    """What the account says.

    Args:
        id: Of the account; empty where there is none.
        is_settled: Whether there was a survey since it was opened; only then do the totals mean anything.
        net_bytes, offset_bytes, surveys, tries: See above.
        took_s: Seconds that the last survey has taken.
        owners: For each owner, the bytes that it may still store at most, and its beat.
    """

    id: bytes
    is_settled: bool
    net_bytes: int
    offset_bytes: int
    surveys: int
    tries: int
    took_s: float
    owners: dict[bytes, tuple[int, int]]

    @property
    def total_bytes(self) -> int:
        """Blocks and grants, at most."""
        return self.net_bytes + self.offset_bytes


class LostAccountError(Exception):
    """The account is not the one that this owner's grants are of, or there is none that can be used."""


class Account:
    """The account of one namespace, as one owner (a tier in a process) uses it.

    Any thread may call; the lock is held by the worker that talks to the server about grants.

    Args:
        topology: The servers.
        namespace_digest: 16 bytes.
    """

    def __init__(self, topology: Topology, namespace_digest: bytes) -> None:
        prefix = KEY_PREFIX + namespace_digest.hex().encode() + b":"
        self.owner = secrets.token_hex(8).encode()
        self.lock = threading.Lock()
        self.total_bytes = 0
        """Blocks and grants, when this owner asked last."""
        self._topology = topology
        self._key = prefix + b"account"
        self._survey_key = prefix + b"survey"
        self._field = _OWNER + self.owner
        self._id = b""  # of the account that our grants are of
        self._beat = 0

    # Grants; under the lock.

    def ask(self, outstanding_bytes: int, need_bytes: int, wanted_bytes: int, quota_bytes: int, deadline: float) -> int:
        """Take a grant.

        Args:
            outstanding_bytes: What this owner may still store without it.
            need_bytes: The least that is of use.
            wanted_bytes: How much to ask for, at least as much.
            quota_bytes: What must not be exceeded.
            deadline: Seconds of `time.monotonic()`.

        Returns:
            What was granted; 0 where there is no room.

        Raises:
            LostAccountError: There is no account, nobody has surveyed yet, or it is another than before.
            NodeDownError: The server is not reached, or refuses. Then the grant may stand in `net` until a survey.
        """
        found, offset, _, net = self._call(
            deadline,
            [b"HGET", b"id"],
            [b"HGET", b"offset"],
            self._note(outstanding_bytes + wanted_bytes),
            [b"HINCRBY", b"net", b"%d" % wanted_bytes],
        )
        granted_bytes = 0
        is_lost = found is None or offset is None or (self._id and found != self._id)
        if not is_lost:
            total_bytes = _number(net) + _number(offset)
            granted_bytes = wanted_bytes - max(0, total_bytes - quota_bytes)
            if granted_bytes < need_bytes:
                granted_bytes = 0
            self.total_bytes = total_bytes - wanted_bytes + granted_bytes
        if granted_bytes < wanted_bytes:
            self._call(
                deadline,
                [b"HINCRBY", b"net", b"%d" % (granted_bytes - wanted_bytes)],
                self._note(outstanding_bytes + granted_bytes),
            )
        if is_lost:
            raise LostAccountError
        self._id = found if isinstance(found, bytes) else b""
        return granted_bytes

    def give_back(self, returned_bytes: int, outstanding_bytes: int, deadline: float) -> None:
        """Return a part of the grants, and tell that this owner is alive; raises as `ask` does."""
        self._beat += 1
        self._check_id(deadline)
        self._call(deadline, [b"HINCRBY", b"net", b"%d" % -returned_bytes], self._note(outstanding_bytes))

    def forget(self) -> None:
        """Note that there are no grants any more, so that those of any account may be had."""
        self._id = b""

    def leave(self, returned_bytes: int, deadline: float) -> None:
        """Return all grants, and be no owner any more; raises as `ask` does."""
        self._check_id(deadline)
        self._call(deadline, [b"HINCRBY", b"net", b"%d" % -returned_bytes], [b"HDEL", self._field])

    # Surveys; one thread.

    def statement(self, deadline: float) -> Statement:
        """Return what the account says."""
        (listed,) = self._call(deadline, [b"HGETALL"])
        fields = dict(_pairs(listed))
        owners = {name[len(_OWNER) :]: _grant(value) for name, value in fields.items() if name.startswith(_OWNER)}
        is_settled = b"id" in fields and b"offset" in fields
        return Statement(
            fields.get(b"id", b""),
            is_settled,
            _number(fields.get(b"net")),
            _number(fields.get(b"offset")),
            _number(fields.get(b"surveys")),
            _number(fields.get(b"tries")),
            max(0, min(_number(fields.get(b"took")), _TOOK_MS_MAX)) / 1000,
            owners,
        )

    def begin_survey(self, deadline: float) -> Statement | None:
        """Become the one who surveys; return what the account says then, or None if somebody else does."""
        taken = self._call_survey(deadline, b"SET", self.owner, b"NX", b"PX", b"%d" % SURVEY_MS)
        if taken is None and self._call_survey(deadline, b"GET") != self.owner:
            return None
        found, *_ = self._call(deadline, [b"HGET", b"id"])
        if found is None:
            # A survey that went on while the account was lost may have left its time here.
            self._call(
                deadline,
                [b"HSET", b"id", secrets.token_hex(8).encode(), b"net", b"0"],
                [b"HDEL", b"offset", b"tries", b"took"],
            )
        self._call(deadline, [b"HSET", b"survey", self.owner])
        return self.statement(deadline)

    def keep_survey(self, deadline: float) -> bool:
        """Go on surveying; False if it took too long, and may be somebody else's."""
        (surveyor,) = self._call(deadline, [b"HGET", b"survey"])
        if surveyor != self.owner or self._call_survey(deadline, b"GET") != self.owner:
            return False
        self._call_survey(deadline, b"PEXPIRE", b"%d" % SURVEY_MS)
        return True

    def note_survey(self, offset_bytes: int, dead: Sequence[bytes], deadline: float) -> None:
        """Write down what was found, and forget owners that have ended."""
        gone = [[b"HDEL", *(_OWNER + owner for owner in dead)]] if dead else []
        self._call(deadline, *gone, [b"HSET", b"offset", b"%d" % offset_bytes], [b"HINCRBY", b"surveys", b"1"])

    def take_off(self, removed_bytes: int, deadline: float) -> None:
        """Take blocks that were evicted off the total; by who surveys."""
        self._call(deadline, [b"HINCRBY", b"net", b"%d" % -removed_bytes])

    def note_try(self, took_s: float, deadline: float) -> None:
        """Tell the others how long a survey has taken, that came to nothing perhaps, since they rest after it too."""
        self._call(deadline, [b"HSET", b"took", b"%d" % math.ceil(took_s * 1000)], [b"HINCRBY", b"tries", b"1"])

    def end_survey(self, deadline: float) -> None:
        """Let others survey."""
        if self._call_survey(deadline, b"GET") == self.owner:
            self._call_survey(deadline, b"UNLINK")

    def discard(self, deadline: float) -> None:
        """Remove what lies where the account should be, and is none."""
        self._call(deadline, [b"UNLINK"])
        self._call_survey(deadline, b"UNLINK")

    def _check_id(self, deadline: float) -> None:
        (found,) = self._call(deadline, [b"HGET", b"id"])
        if found is None or (self._id and found != self._id):
            raise LostAccountError

    def _note(self, outstanding_bytes: int) -> list[bytes]:
        return [b"HSET", self._field, b"%d %d" % (outstanding_bytes, self._beat)]

    def _call(self, deadline: float, *calls: list[bytes]) -> list[Value]:
        """Send commands about the account, given without its name."""
        return self._send(deadline, self._key, [command(name, self._key, *rest) for name, *rest in calls])

    def _call_survey(self, deadline: float, name: bytes, *arguments: bytes) -> Value:
        return self._send(deadline, self._survey_key, [command(name, self._survey_key, *arguments)])[0]

    def _send(self, deadline: float, key: bytes, commands: Sequence[bytes]) -> list[Value]:
        shares = self._topology.split([key], deadline)
        if not shares:
            raise NodeDownError(CLUSTER_DOWN)
        listing = Listing(shares[0][0], commands)
        converse([listing], deadline)
        if listing.failures:
            reason = next(iter(listing.failures.values()))
            if reason in (MOVED, READ_ONLY):
                self._topology.refresh()
            raise NodeDownError(reason)
        return listing.replies


def _pairs(listed: Value) -> list[tuple[bytes, bytes]]:
    texts = [each for each in listed if isinstance(each, bytes)] if isinstance(listed, list) else []
    return list(zip(texts[::2], texts[1::2], strict=False))


def _number(value: Value) -> int:
    """Return a number of the account's; what somebody else wrote for one counts as nothing."""
    if isinstance(value, int):
        return value
    try:
        return int(value) if isinstance(value, bytes) and len(value) <= 20 else 0
    except ValueError:
        return 0


def _grant(value: bytes) -> tuple[int, int]:
    size_bytes, _, beat = value.partition(b" ")
    return max(0, _number(size_bytes)), _number(beat)
