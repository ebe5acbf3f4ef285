"""The namespace of a stack, and its digest.

A block hash identifies tokens, but not the model that computed the block. A `Namespace` names all that must agree for
blocks to be interchangeable. Its digest is part of every path, key prefix and record header.

The opening of a stack, the engines' plugins and the command make one. It is frozen, so any thread may use it. What must
stay true: equal namespaces have equal digests in every process and release, unless `FORMAT_VERSION` changes.

The digest is BLAKE2b (RFC 7693) with 16 bytes of output, personalised with `b"tiered-kv-ns-v1"`, over the
canonical form: JSON without white space, keys sorted by code point, text in UTF-8, no numbers but integers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from tiered_kv.config.settings import StrictModel
from tiered_kv.config.units import Count

FORMAT_VERSION = 1
"""Version of the canonical form. A new field, or another meaning of one, raises it."""

DIGEST_BYTES = 16
_PERSON = b"tiered-kv-ns-v1"


def _integer_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Label = Annotated[str, Field(min_length=1, max_length=1024)]
Seed = Annotated[str, BeforeValidator(_integer_as_text), Field(max_length=1024)]


class Parallel(StrictModel):
    """How the model is split, and which rank computed the blocks."""

    tensor: Count = Field(default=1, ge=1, description="Tensor parallel size.")
    pipeline: Count = Field(default=1, ge=1, description="Pipeline parallel size.")
    decode_context: Count = Field(default=1, ge=1, description="Decode context parallel size.")
    prefill_context: Count = Field(default=1, ge=1, description="Prefill context parallel size.")
    rank: Count = Field(default=0, ge=0, description="The worker's rank among them.")
    same_bytes_on_every_rank: bool = Field(
        default=False,
        description="True where a block's bytes depend on none of the above (as with replicated latent "
        "attention); then none of it is part of the namespace.",
    )

    @model_validator(mode="after")
    def _rank_exists(self) -> Parallel:
        ranks = self.tensor * self.pipeline * self.decode_context * self.prefill_context
        if self.rank >= ranks:
            raise ValueError(f"rank {self.rank} does not exist: these sizes make ranks 0 to {ranks - 1}")
        return self


class Namespace(StrictModel):
    """The settings that must be equal before two engines may use one block. The size of a block is the only other one.

    Texts are compared exactly: "main" and "Main" are different revisions.
    """

    model: Label = Field(description="The model's name or path.")
    revision: Label = Field(default="main", description="The model's revision: a branch, a tag or a commit.")
    dtype: Label = Field(default="auto", description="Data type of the keys and values, such as bfloat16.")
    quantization: Label = Field(default="none", description="How keys and values are quantized.")
    layout: Label = Field(default="default", description="Order of the dimensions within a block.")
    tenant: Label = Field(default="default", description="Keeps one user's blocks from another's.")
    hash_algorithm: Label = Field(default="default", description="What the engine hashes tokens with.")
    hash_seed: Seed = Field(default="", description="The seed of that hash: text, or an integer.")
    layers: Count = Field(default=0, ge=0, description="Layers that a block covers; 0 if unknown.")
    groups: tuple[Label, ...] = Field(
        default=(),
        max_length=1024,
        description="For each KV cache group, in the order of its index, what it holds.",
    )
    parallel: Parallel = Field(default=Parallel(), description="Parallel sizes, and the rank.")
    extra: dict[Label, str] = Field(
        default={},
        max_length=256,
        description="Whatever else must agree, such as an adapter or a rope scaling.",
    )

    def identify(self, *, block_bytes: int, block_tokens: int) -> NamespaceIdentity:
        """Return the identity of this namespace with blocks of this size."""
        described = self.model_dump(mode="python", exclude={"parallel"})
        described["groups"] = list(self.groups)
        if not self.parallel.same_bytes_on_every_rank:
            described["parallel"] = self.parallel.model_dump(exclude={"same_bytes_on_every_rank"})
        return NamespaceIdentity(
            {
                "format": FORMAT_VERSION,
                "block": {"bytes": block_bytes, "tokens": block_tokens},
                "namespace": described,
            }
        )


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """A namespace in its readable form, of mappings, lists, texts and integers, which is kept beside the data."""

    described: Mapping[str, object]

    @property
    def canonical(self) -> bytes:
        """The input of the digest."""
        text = json.dumps(self.described, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode()

    @property
    def digest(self) -> bytes:
        """The 16 bytes that identify the namespace."""
        return hashlib.blake2b(self.canonical, digest_size=DIGEST_BYTES, person=_PERSON).digest()


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the fields in which two readable forms differ, with both values; a missing value is None.

    An empty `theirs` is unknown, and differs in nothing.
    """
    mine, others = dict(_flat(ours)), dict(_flat(theirs))
    return {
        name: (mine.get(name), others.get(name))
        for name in sorted(mine.keys() | others.keys())
        if others and mine.get(name) != others.get(name)
    }


def _flat(described: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each field of a readable form, down to four levels: it may come from damaged storage."""
    for name, value in described.items():
        if isinstance(value, Mapping) and prefix.count(".") < 4:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
