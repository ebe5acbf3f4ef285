"""The prefix cache: stores a prompt's keys and values in a stack, and restores them as a cache for the model.

A program calls it, on any thread. `Saver` calls back: `copy_blocks` on the thread that calls `save`, and `_forget` on
that thread or on the saver's own. What must stay true: no block of other tokens or weights, and no block from before a
reset, is restored.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tiered_kv.config.namespace import Namespace
from tiered_kv.config.reading import from_source
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.stack.buffers import Blocks
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv_transformers.block_keys import block_keys
from tiered_kv_transformers.causality import check_causal
from tiered_kv_transformers.identity import Weights, namespace_fields
from tiered_kv_transformers.layout import CacheLayout, States, token_count
from tiered_kv_transformers.refusals import layout_of, states_of
from tiered_kv_transformers.saver import Saver

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

_PART_BYTES = 32 << 20
"""Memory that one `restore` takes besides the cache: it loads blocks in parts of this size."""


class Restored(NamedTuple):
    """What `restore` found.

    Args:
        cache: A `DynamicCache` of the model, for its argument `cache`; empty if nothing was found.
        tokens: Tokens of the prompt in `cache`: whole blocks, and always fewer than the prompt.
    """

    cache: DynamicCache
    tokens: int


class _Given(NamedTuple):
    """How much of a cache the stack was given."""

    last_key: bytes | None
    """The key of the last block that the stack was given; None if the stack was given no block."""
    epoch: int
    """The stack's epoch when the cache was restored, or first saved."""


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """What a prefix cache has done since it was opened, in blocks.

    Args:
        restored_blocks: Blocks that `restore` returned.
        missed_blocks: Blocks of restored prompts, from the first block that was not found in time.
        stored_blocks: Blocks that were saved, or were in the stack already.
        dropped_blocks: Blocks that were not saved: there was no memory for a snapshot, or no room in the stack in time,
            or the prefix cache was closed or reset first.
        pending_blocks: Blocks that are on their way into the stack at this moment.
    """

    restored_blocks: int
    missed_blocks: int
    stored_blocks: int
    dropped_blocks: int
    pending_blocks: int


class PrefixCache:
    """Keeps the keys and values of prompts in a stack, by blocks of tokens. Any thread may call any method.

    `PrefixCache.open` opens it for one model; after a change of the model's weights, open another. Prompts are single
    sequences without padding, with positions from 0.

    Attributes:
        layout: Layout of the model's blocks.
        stack: The open stack, for this cache alone; `close` closes it.
    """

    def __init__(
        self, model_config: Any, layout: CacheLayout, stack: Stack, pending_bytes_max: int, save_timeout_s: float
    ) -> None:
        self._model_config = model_config
        self.layout = layout
        self.stack = stack
        self._seed = stack.config.namespace.hash_seed
        self._saver = Saver(stack, max(1, pending_bytes_max // layout.block_bytes), save_timeout_s)
        self._lock = threading.Lock()
        """Guards the fields below. A thread holds it for assignments only."""
        self._given: weakref.WeakKeyDictionary[DynamicCache, _Given] = weakref.WeakKeyDictionary()
        """For each restored or saved cache, how much of it the stack was given."""
        self._restored_blocks = 0
        self._missed_blocks = 0

    @classmethod
    def open(
        cls,
        model: Any,  # a PreTrainedModel, whose module is not loaded here
        stack: str | os.PathLike[str] | Mapping[str, object],
        *,
        block_tokens: int | None = None,
        weights: Literal["full", "sampled", "revision"] | Weights = Weights.FULL,
        pending_bytes_max: int | None = None,
        save_timeout_s: float = 30.0,
    ) -> PrefixCache:
        """Open a stack for a model's blocks.

        Args:
            model: A causal language model of Transformers, in evaluation mode. It is not kept.
            stack: The path of a stack's file, or a mapping of the same form, without the size of a block and the fields
                of the namespace that the model gives.
            block_tokens: Tokens of a block; by default `block.tokens` of the stack, or 16.
            weights: What identifies the weights: a hash of every byte ("full"), of samples ("sampled"), or the
                namespace's `model` and `revision`, for which you vouch ("revision").
            pending_bytes_max: Memory for snapshots on their way into the stack; by default the primary tier's capacity.
            save_timeout_s: How long one snapshot may wait for room in the stack.

        Raises:
            TypeError, ValueError: The model cannot be served. It computes a few tokens to find out.
            ConfigError: The stack's file cannot be used, or contradicts the model.
            TierError: A tier cannot be opened.
        """
        _require_extra()
        kind = Weights(weights)
        config, layout = from_source(stack, lambda raw: _complete(raw, model, block_tokens, kind))
        saver_bytes = config.primary.capacity if pending_bytes_max is None else pending_bytes_max
        return cls(model.config, layout, open_stack(config), saver_bytes, save_timeout_s)

    def restore(self, input_ids: torch.Tensor, *, timeout: float = 1.0) -> Restored:
        """Return a cache with the keys and values of the longest prefix of a prompt that the stack has.

        At least one token of the prompt is left to compute: a model gives logits only for tokens that it is given.

        Args:
            input_ids: The prompt's token ids, of shape (tokens,) or (1, tokens), on the model's device.
            timeout: Seconds to wait for tiers, in all. The cache has what was loaded by then.

        Raises:
            TypeError, ValueError: `input_ids` are not one prompt's token ids.
            ShutdownError: The prefix cache is closed.
        """
        end_s = time.monotonic() + timeout
        token_ids = _token_ids(input_ids)
        keys = block_keys(token_ids[:-1], self.layout.block_tokens, self._seed)
        epoch = self.stack.epoch
        states, blocks = self._load(keys, input_ids.device, end_s, epoch)
        cache = _cache_of(self._model_config, states)
        with self._lock:
            self._restored_blocks += blocks
            self._missed_blocks += len(keys) - blocks
            self._given[cache] = _Given(keys[blocks - 1] if blocks else None, epoch)
        return Restored(cache, blocks * self.layout.block_tokens)

    def save(self, input_ids: torch.Tensor, cache: DynamicCache) -> int:
        """Store a prompt's full blocks in the background, except blocks that this cache was restored or saved with.

        The bytes of the blocks are copied before this method returns, so the model may go on with the cache at once.
        Blocks are dropped and counted if the copies exceed `pending_bytes_max`, or if the cache was restored or saved
        before a reset.

        Args:
            input_ids: The tokens that the cache was computed from, from the first one on, of shape (tokens,) or
                (1, tokens). There may be more tokens than the cache has, as after `generate`, or fewer.

        Returns:
            How many blocks are on their way into the stack.

        Raises:
            TypeError: The cache is of a kind that cannot be saved, or `input_ids` are no token ids.
            ValueError: The cache is not of this model, or there are several sequences.
            ShutdownError: The prefix cache is closed.
        """
        epoch = self.stack.epoch
        token_ids = _token_ids(input_ids)
        states = states_of(cache, self.layout)
        keys = block_keys(token_ids[: token_count(states)], self.layout.block_tokens, self._seed)
        with self._lock:
            given = self._given.setdefault(cache, _Given(None, epoch))
        # The key of a block stands for all tokens up to the block's end. If a cache was cropped or reset, and went on
        # with other tokens, the last key that the stack was given is not among `keys`: all blocks are offered again.
        first = keys.index(given.last_key) + 1 if given.last_key in keys else 0

        def copy_blocks(blocks: int) -> Blocks:  # runs on the thread that calls `save`
            rows = self.layout.gather(states, first, blocks)
            with self._lock:
                self._given[cache] = _Given(keys[first + blocks - 1], given.epoch)
            return rows

        on_loss = functools.partial(self._forget, weakref.ref(cache))
        return self._saver.save(keys[first:], copy_blocks, on_loss, given.epoch)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all saved blocks have reached every tier, and return whether they have in time.

        Raises:
            ShutdownError: The prefix cache is closed.
        """
        end_s = time.monotonic() + timeout
        return self._saver.wait(timeout) and self.stack.flush(max(0.0, end_s - time.monotonic()))

    def stats(self) -> PrefixCacheStats:
        """Return the counts so far; `stack.counters()` has the counts of each tier."""
        stored, dropped, pending = self._saver.counts()
        with self._lock:
            return PrefixCacheStats(self._restored_blocks, self._missed_blocks, stored, dropped, pending)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for saved blocks, at most `timeout` seconds, drop blocks that are still pending, and close the stack."""
        self._saver.stop(timeout)
        self.stack.close(timeout)
        self._saver.wait(timeout)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self, reference: weakref.ref[DynamicCache]) -> None:
        """Let the next `save` of a cache offer all blocks of the cache again, since some were not stored.

        The thread that calls `save` calls this, or the saver's thread, or the thread that closes the prefix cache.
        """
        cache = reference()
        if cache is not None:
            with self._lock:
                self._given[cache] = _Given(None, self._given[cache].epoch)

    def _load(self, keys: Sequence[bytes], device: torch.device, end_s: float, epoch: int) -> tuple[States, int]:
        """Return tensors with the longest prefix of `keys` that is loaded in time, and its number of blocks.

        Nothing is loaded after a reset, which ends the `epoch`.
        """
        part_blocks = max(1, min(len(keys), _PART_BYTES // self.layout.block_bytes))
        rows = np.empty((part_blocks, self.layout.block_bytes), dtype=np.uint8)
        states: States = []
        done = 0
        while done < len(keys):
            wanted = keys[done : done + part_blocks]
            found = self.stack.get(wanted, rows[: len(wanted)], max(0.0, end_s - time.monotonic()))
            if self.stack.epoch != epoch:
                found = 0
            if found and not states:
                states = self.layout.empty_states(len(keys), device)
            if found:
                self.layout.scatter(rows[:found], states, done)
            done += found
            if found < len(wanted) or time.monotonic() >= end_s:
                break
        tokens = done * self.layout.block_tokens
        if 0 < done < len(keys):
            states = [(keys[:, :, :tokens].clone(), values[:, :, :tokens].clone()) for keys, values in states]
        return states, done


def _token_ids(input_ids: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the token ids of one prompt as an array of shape (tokens,)."""
    import torch

    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids must be a tensor of token ids, not {type(input_ids).__name__}")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype is torch.bool:
        raise TypeError(f"input_ids must be integers, not {input_ids.dtype}")
    if input_ids.dim() > 2 or input_ids.dim() == 0 or (input_ids.dim() == 2 and input_ids.shape[0] != 1):
        raise ValueError(
            f"input_ids must be of shape (tokens,) or (1, tokens), found {tuple(input_ids.shape)}; "
            "a batch of several prompts has no common prefix: restore and save each by itself"
        )
    array: np.ndarray[Any, np.dtype[Any]] = input_ids.detach().reshape(-1).cpu().numpy()
    return array


def _cache_of(model_config: Any, states: States) -> DynamicCache:
    """Return a cache of the model with `states`, which it takes over, or an empty one."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model_config)
    for layer, (keys, values) in zip(cache.layers, states, strict=False):
        layer.update(keys[:, :, :0], values[:, :, :0])  # sets data type and device; nothing is copied
        layer.keys, layer.values = keys, values
    return cache


def _require_extra() -> None:
    try:
        import torch  # noqa: F401 - is it installed?
        import transformers  # noqa: F401 - the same
    except ImportError as error:
        raise MissingExtraError("the prefix cache for Transformers", "transformers") from error


BLOCK_TOKENS = 16
"""Tokens of a block, by default."""


def _complete(
    raw: Mapping[str, object], model: Any, block_tokens: int | None, weights: Weights
) -> tuple[StackConfig, CacheLayout]:
    """Return the configuration of a stack for a model's blocks, and their layout.

    In `raw`, `block` may have `tokens`, and `namespace` what the model does not say: `model`, `revision`, `tenant`,
    `hash_seed`, `extra`.
    """
    given_block, given_names = _mapping(raw, "block"), _mapping(raw, "namespace")
    missing = [name for name in ("model", "revision") if name not in given_names]
    if weights is Weights.REVISION and missing:
        raise ConfigError(
            "weights='revision' takes the namespace's model and revision for the weights; give both",
            location=f"namespace.{missing[0]}",
        )
    names = {"model": str(getattr(getattr(model, "config", None), "model_type", "")) or "model", **given_names}
    if "bytes" in given_block:
        raise ConfigError("the model says this; leave it out", location="block.bytes")
    # Read the file first with blocks of one byte, which fit everywhere, and then with blocks of the model's size.
    draft = load_config({**raw, "block": {"bytes": 1, **given_block}, "namespace": names})
    layout = layout_of(model, _block_tokens(draft.block.tokens if "tokens" in given_block else None, block_tokens))
    check_causal(model, layout)
    namespace = _namespace(draft.namespace, given_names, namespace_fields(model, layout, weights))
    block = {"bytes": layout.block_bytes, "tokens": layout.block_tokens}
    parts = {name: getattr(draft, name) for name in StackConfig.model_fields if name not in ("namespace", "block")}
    return load_config({"namespace": namespace, "block": block, **parts}), layout


def _mapping(raw: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError("expected a mapping, or nothing", location=name)
    return value


def _block_tokens(in_file: int | None, asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise ValueError(f"block_tokens must be at least 1, not {asked}")
    if in_file is not None and asked is not None and in_file != asked:
        raise ConfigError(f"found {in_file}, and block_tokens={asked} was asked for", location="block.tokens")
    return in_file or asked or BLOCK_TOKENS


def _namespace(draft: Namespace, given: Mapping[str, object], fields: Mapping[str, Any]) -> Namespace:
    """Return the file's namespace with the model's `fields`, which the file must not have."""
    taken = [name for name in fields if name != "extra" and name in given]
    taken += [f"extra.{name}" for name in fields["extra"] if name in draft.extra]
    if taken:
        raise ConfigError("the model says this; leave it out", location=f"namespace.{taken[0]}")
    return draft.model_copy(update={**fields, "extra": {**draft.extra, **fields["extra"]}})
