"""A prefix cache for Hugging Face Transformers that outlives the process.

    from tiered_kv.integrations.transformers import PrefixCache

    with PrefixCache.open(model, "stack.yaml") as prefixes:
        cache, tokens = prefixes.restore(input_ids)
        output = model.generate(input_ids, past_key_values=cache, return_dict_in_generate=True)
        prefixes.save(output.sequences, output.past_key_values)

Needs the extra `transformers`. `transformers.md` says what is stored, under which keys, and what is refused.
"""

from __future__ import annotations

from tiered_kv.integrations.transformers.identity import Weights
from tiered_kv.integrations.transformers.layout import CacheLayout, block_keys
from tiered_kv.integrations.transformers.prefix_cache import PrefixCache, PrefixCacheStats, Restored

__all__ = ["CacheLayout", "PrefixCache", "PrefixCacheStats", "Restored", "Weights", "block_keys"]
