"""The namespace: what must agree has one digest, and whatever differs has another."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tiered_kv.config.namespace import Namespace, Parallel

labels = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
parallels = st.builds(
    Parallel,
    tensor=st.integers(2, 4),
    pipeline=st.integers(1, 3),
    decode_context=st.integers(1, 2),
    prefill_context=st.integers(1, 2),
    rank=st.integers(0, 1),
)
namespaces = st.builds(
    Namespace,
    model=labels,
    revision=labels,
    dtype=labels,
    quantization=labels,
    layout=labels,
    tenant=labels,
    hash_algorithm=labels,
    hash_seed=st.text(max_size=4) | st.integers(),
    layers=st.integers(0, 3),
    groups=st.lists(labels, max_size=2).map(tuple),
    parallel=parallels,
    extra=st.dictionaries(labels, st.text(max_size=2), max_size=2),
)


def digest(namespace: Namespace, block_bytes: int = 65536, block_tokens: int = 16) -> bytes:
    return namespace.identify(block_bytes=block_bytes, block_tokens=block_tokens).digest


@given(namespaces, st.sampled_from(sorted(Namespace.model_fields)), namespaces)
def test_a_difference_in_any_one_field_is_another_namespace(one: Namespace, field: str, donor: Namespace) -> None:
    changed = one.model_copy(update={field: getattr(donor, field)})
    assert (digest(changed) == digest(one)) is (changed == one)


@given(namespaces)
def test_the_same_namespace_has_the_same_digest_after_a_round_trip(namespace: Namespace) -> None:
    again = Namespace.model_validate(json.loads(json.dumps(namespace.model_dump(mode="json"))))
    assert digest(again) == digest(namespace)


GOLDEN_DEFAULT = "830c5a0ff12825280503e2cd410be9f3"
GOLDEN_FULL = "0f7cb230755f05c5b5c4e41201e4597e"


def test_the_digest_of_defaults_never_changes() -> None:
    identity = Namespace(model="m").identify(block_bytes=65536, block_tokens=16)
    assert identity.canonical == (
        b'{"block":{"bytes":65536,"tokens":16},"format":1,"namespace":{"dtype":"auto","extra":{},"groups":[],'
        b'"hash_algorithm":"default","hash_seed":"","layers":0,"layout":"default","model":"m",'
        b'"parallel":{"decode_context":1,"pipeline":1,"prefill_context":1,"rank":0,"tensor":1},'
        b'"quantization":"none","revision":"main","tenant":"default"}}'
    )
    assert json.loads(identity.canonical) == identity.described
    # hashlib.blake2b(identity.canonical, digest_size=16, person=b"tiered-kv-ns-v1")
    assert identity.digest.hex() == GOLDEN_DEFAULT


def test_the_digest_of_a_full_namespace_never_changes() -> None:
    namespace = Namespace(
        model="meta-llama/Llama-3.1-8B-Instruct",
        revision="0e9e39f",
        dtype="bfloat16",
        quantization="fp8",
        layout="NHD",
        tenant="Zürich",
        hash_algorithm="sha256",
        hash_seed="42",
        layers=32,
        groups=("full", "sliding"),
        parallel=Parallel(tensor=2, pipeline=2, rank=3),
        extra={"adapter": "lora-1"},
    )
    assert digest(namespace, 2 << 20, 16).hex() == GOLDEN_FULL


def test_ranks_share_blocks_only_where_their_bytes_are_the_same() -> None:
    def on_rank(rank: int, tensor: int, same: bool) -> bytes:
        parallel = Parallel(tensor=tensor, rank=rank, same_bytes_on_every_rank=same)
        return digest(Namespace(model="m", parallel=parallel))

    assert on_rank(0, 2, False) != on_rank(1, 2, False)
    assert on_rank(0, 2, True) == on_rank(1, 4, True)
    assert on_rank(0, 1, False) != on_rank(0, 1, True)


@pytest.mark.parametrize(
    "settings", [{}, {"model": ""}, {"model": "m", "parallel": {"rank": 1}}, {"model": "m", "mdoel": "x"}]
)
def test_an_incomplete_namespace_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Namespace.model_validate(settings)
