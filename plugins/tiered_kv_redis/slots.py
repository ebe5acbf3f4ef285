"""Where a cluster's slots are, as a member of it says, and which addresses are believed at all.

A map is used as a whole or refused as a whole. A member sends each slot at most once, with the master that it knows
for it, also while slots move: then a slot is named with its old master until the new one has it. Slots without a master
are left out, be it that they are not named, or with a master that has no address any more: its port is 0 then.
"""

from __future__ import annotations

import re
from typing import Final

from tiered_kv_redis.reasons import WireError
from tiered_kv_redis.settings import Address

SLOTS: Final = 16_384
"""Of every Redis Cluster."""
MASTERS_MAX: Final = 1_000
"""The Redis Cluster specification is made for so many nodes. Each has connections of its own here."""
_PORT_MAX: Final = 65_535
_HOST: Final = re.compile(r"[0-9A-Za-z._:%-]{1,255}")
"""An address or a host name, as long as Redis lets it be."""
_UNKNOWN: Final = (None, b"", b"?")
"""What a member says for a host that does not know what it is called."""


def masters_of(ranges: object, member: Address) -> dict[int, Address]:
    """Return where the master of each slot is that has one.

    Args:
        ranges: The reply to CLUSTER SLOTS (https://redis.io/docs/latest/commands/cluster-slots/), of any shape.
        member: Who sent it: the host that is meant where none is named.

    Raises:
        WireError: It is no such reply: it names a slot that there is not, or twice, too many masters, or no address.
    """
    if not isinstance(ranges, list):
        raise WireError("protocol")
    masters: dict[int, Address] = {}
    addresses: set[Address] = set()
    for each in ranges:
        match each:
            case [int(first), int(last), [host, port, *_], *_] if 0 <= first <= last < SLOTS:
                if port == 0:
                    continue
                address = believed_address(member.host if host in _UNKNOWN else host, port)
            case _:
                raise WireError("protocol")
        addresses.add(address)
        slots = range(first, last + 1)
        if len(addresses) > MASTERS_MAX or any(slot in masters for slot in slots):
            raise WireError("protocol")
        masters.update(dict.fromkeys(slots, address))
    return masters


def believed_address(host: object, port: object) -> Address:
    """Return an address that a server named.

    Raises:
        WireError: It is none.
    """
    name = host.decode("latin-1") if isinstance(host, bytes) else host
    if not isinstance(name, str) or not isinstance(port, int) or not 1 <= port <= _PORT_MAX:
        raise WireError("protocol")
    if not _HOST.fullmatch(name):
        raise WireError("protocol")
    return Address(name, port)
