"""S3-FIFO, by request: a small queue for new blocks, and a main queue for blocks that were used again.

`policy_hits.py` compares the policies with it.

After J. Yang, Y. Zhang, Z. Qiu, Y. Yue and R. Vigfusson, "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023).
Most blocks are never used again, and pass through the small queue only. The paper's queues keep the order of arrival,
and reinsert a used block when it would be evicted. Here a used block belongs to the request that used it last, so it
moves at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.cpu.backend import CPUBlock, RequestChain
from tiered_kv.cpu.policies.arc import ARCPolicy

SMALL_SHARE = 0.1
"""The small queue's share of the blocks, as in the paper."""


class S3FIFOPolicy(ARCPolicy):
    """Evicts blocks used once while they take more than a tenth of the tier, then the least recently used.

    The queues are the lists of `ARCPolicy`, with a fixed share. A block that returns soon after its eviction goes to
    the main queue.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._recent_target = SMALL_SHARE * num_blocks
        # One list for both queues: a returning block must not be evicted after the head of its prefix.
        self._frequent_ghosts = self._recent_ghosts

    def admit(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        chain.refresh()
        for block in blocks:
            block.is_frequent = self._recent_ghosts.pop(block.key, self) is None

    def _trim_ghosts(self) -> None:
        while len(self._recent_ghosts) > (1 - SMALL_SHARE) * self.num_blocks:
            self._recent_ghosts.popitem(last=False)
