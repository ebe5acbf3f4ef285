"""The history of a stack's blocks, with the facts of its tiers.

`AnyStack` opens it, and closes it. What must stay true: it has the names of all tiers, the primary tier's first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.metrics.history.recorder import BlockHistory

if TYPE_CHECKING:  # modules that only some stacks use are imported when they use them
    from tiered_kv.metrics.history.ledger import EndedRequest
    from tiered_kv.stack.exporters.events import EventPublisher


def open_history(
    config: StackConfig, events: EventPublisher | None, *, has_thread: bool, has_names: bool
) -> BlockHistory | None:
    """Return the history of a stack's blocks; None if its setting is 0."""
    if not config.history:
        return None
    on_ended = None
    if events is not None and events.publishes_requests:
        from tiered_kv.stack.exporters.status import received_by

        def on_ended(ended: EndedRequest) -> None:
            events.request_ended(received_by(ended, config.block.tokens))

    names = [PRIMARY_NAME]
    ttl_s: list[float | None] = [None]
    blocks: list[int | None] = [config.primary_blocks]
    for tier in config.secondary:
        facts = tier.storage_facts()
        names.append(tier.name)
        ttl_s.append(facts.ttl_s)
        blocks.append(None if facts.capacity_bytes is None else facts.capacity_bytes // config.block.bytes)
    return BlockHistory(
        config.history, names, ttl_s, blocks=blocks, has_thread=has_thread, on_ended=on_ended, has_names=has_names
    )
