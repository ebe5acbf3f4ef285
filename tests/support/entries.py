"""Tiers on a test bench by their entry, as a stack's YAML would have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiered_kv.testing.rig import TierRig
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

OpenRig = Callable[..., TierRig]
"""Opens a tier on a rig, which is closed at the end of the test."""

NAMESPACE = bytes(range(16))
"""Whose blocks they are where a test has no need of others'."""


def rig_of(
    entry: Mapping[str, object],
    *,
    block_bytes: int,
    num_blocks: int = 256,
    wait_s: float = 60.0,
    namespace: bytes = NAMESPACE,
) -> TierRig:
    """Open the tier of an entry on a rig, which its caller closes.

    Args:
        entry: `type`, and what that type of tier takes.
        block_bytes: Bytes of a block.
        num_blocks: Rows of the rig's region.
        wait_s: How long a job or a lookup may take. Unless the entry says otherwise, the tier too waits for so long
            before a lookup is a miss: what is there would not be found while a busy machine holds a thread up.
        namespace: The digest of the namespace, 16 bytes. Rigs with different ones are different tenants.

    Returns:
        The rig. Opened again, by `reopen` or here, it is the same namespace's.

    Raises:
        ConfigError: The entry cannot be used.
        TierError: The tier cannot be opened.
    """
    return TierRig(
        lambda spec, view: SecondaryTierFactory.create(spec, view, {"lookup_timeout": wait_s, **entry}),
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        wait_s=wait_s,
        spec=TierSpec(str(entry["type"]), block_bytes, namespace, {"model": "bench"}, wants_events=True),
    )
