"""A prefix cache for Hugging Face Transformers that outlives the process.

    from tiered_kv_transformers import PrefixCache

    with PrefixCache.open(model, "stack.yaml") as prefixes:
        cache, tokens = prefixes.restore(input_ids)
        output = model.generate(input_ids, cache=cache)
        prefixes.save(output, cache)

Needs the extra `transformers`. docs/how-to/transformers.md says what is stored, under which keys, and what is refused.

Who calls it, and on which thread. A program calls `prefix_cache.PrefixCache` from any thread. `restore` waits for the
tiers, at most its timeout. `save` copies the new blocks and returns; one thread of `saver.Saver` puts them into the
stack.

What must stay true. A block is restored only for a prompt that begins with the same tokens: its key is a hash of all
tokens up to its end (`block_keys.block_keys`). A model whose keys and values depend on later tokens, or whose cache has
another layout, is refused (`causality`, `refusals`). The weights are part of the namespace (`identity`). Blocks from
before a reset are neither saved nor restored. Copies that wait for the stack take at most `pending_bytes_max` bytes.

A row of the primary tier has the keys and values of some tokens, of every layer; `layout.CacheLayout` copies between
rows and a cache's tensors. The stack (`tiered_kv/stack/open.py`) keeps everything else.
"""

from __future__ import annotations

from tiered_kv_transformers.block_keys import block_keys
from tiered_kv_transformers.identity import Weights
from tiered_kv_transformers.layout import CacheLayout
from tiered_kv_transformers.prefix_cache import PrefixCache, PrefixCacheStats, Restored

__all__ = ["CacheLayout", "PrefixCache", "PrefixCacheStats", "Restored", "Weights", "block_keys"]
