"""Keys and digests are what the documentation says, on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'transformers'")

from tiered_kv.errors import MissingExtraError  # noqa: E402
from tiered_kv_transformers import PrefixCache, block_keys  # noqa: E402
from tiered_kv_transformers.identity import config_digest, weights_digest  # noqa: E402
from tiered_kv_transformers.layout import CacheLayout  # noqa: E402


class TestTokenHashes:
    def test_hashes_are_those_of_the_definition(self) -> None:
        def blake(*parts: bytes) -> bytes:
            return hashlib.blake2b(b"".join(parts), digest_size=32, person=b"tiered-kv-tok-v1").digest()

        ids = [7, 0, 2**31, -1, 2**62, 5]
        expected, parent = [], blake("Sämling".encode())
        for start in (0, 2, 4):
            tokens = (token.to_bytes(8, "little", signed=True) for token in ids[start : start + 2])
            parent = blake(parent, *tokens)
            expected.append(parent)
        assert block_keys(np.array(ids), 2, "Sämling") == expected

    def test_hashes_are_those_in_the_documentation(self) -> None:
        page = (Path(__file__).parents[3] / "docs" / "how-to" / "transformers.md").read_text()
        for number, key in enumerate(block_keys(np.arange(8), 4)):
            assert f"hash {number}  {key.hex()}" in page

    @pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", ">i8", "u2"])
    def test_the_width_and_order_of_the_integers_do_not_matter(self, dtype: str) -> None:
        assert block_keys(np.arange(20, dtype=dtype), 4) == block_keys(np.arange(20), 4)
        assert block_keys(np.arange(40, dtype=dtype)[::2], 4) == block_keys(np.arange(0, 40, 2), 4)

    def test_a_key_stands_for_all_tokens_before_it(self) -> None:
        ids = np.arange(32)
        changed = ids.copy()
        changed[9] = 99
        one, other = block_keys(ids, 4), block_keys(changed, 4)
        assert one[:2] == other[:2]
        assert not set(one[2:]) & set(other)
        assert len(set(one)) == 8


class TestDigests:
    def test_a_configuration_s_digest_never_changes(self) -> None:
        config = {"hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}, "layer_types": ["full"], "note": None}
        assert config_digest(config) == "040a4f0ec54be1524d3ab938e948d0d0"
        text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
        assert config_digest(config) == hashlib.blake2b(text, digest_size=16, person=b"tiered-kv-cfg-v1").hexdigest()

    @pytest.mark.parametrize(
        ("sampled", "golden"), [(False, "55da4d4c29421989c5aaa62b316b59f9"), (True, "3a4589156b4850d8c6654ee2d5cf4bdd")]
    )
    def test_the_digest_of_weights_never_changes(self, sampled: bool, golden: str) -> None:
        assert weights_digest(weights(), sampled=sampled) == golden

    @pytest.mark.parametrize("sampled", [False, True])
    def test_names_shapes_types_and_content_count(self, sampled: bool) -> None:
        digests = {weights_digest(state, sampled=sampled) for state in [weights(), *changed_weights()]}
        assert len(digests) == 6

    def test_samples_do_not_see_everything(self) -> None:
        state = weights()
        state["b"][1000, 1] += 1
        assert weights_digest(state, sampled=True) == weights_digest(weights(), sampled=True)
        assert weights_digest(state) != weights_digest(weights())

    def test_the_order_in_memory_does_not_matter(self) -> None:
        state = weights()
        state["b"] = state["b"].t().contiguous().t()
        assert weights_digest(dict(reversed(state.items()))) == weights_digest(weights())

    def test_weights_that_are_not_there_are_refused(self) -> None:
        absent: list[Any] = [torch.empty(3, device="meta"), {"state": 1}]
        for missing in absent:
            with pytest.raises(ValueError, match=r"the weight 'a' cannot be read: .*weights='revision'"):
                weights_digest({"a": missing})

    def test_weights_that_hide_their_bytes_are_refused(self) -> None:
        base: Any = torch.Tensor

        class Packed(base):  # type: ignore[misc]  # see `base`
            def contiguous(self, *_: Any, **__: Any) -> Any:
                raise NotImplementedError("packed")

        with pytest.raises(ValueError, match=r"the weight 'a' cannot be read \(NotImplementedError\); .*'revision'"):
            weights_digest({"a": torch.zeros(3).as_subclass(Packed)})


def weights() -> dict[str, Any]:
    large = torch.arange(30_000, dtype=torch.float32).reshape(10_000, 3)
    return {
        "a": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
        "b": large,
        "c": torch.tensor(2.5),
        "d": torch.empty(0),
    }


def changed_weights() -> Iterator[dict[str, Any]]:
    state = weights()
    yield {"renamed": state["a"], **{name: state[name] for name in "bcd"}}
    yield {**state, "a": state["a"].reshape(3, 2)}
    yield {**state, "a": state["a"].view(torch.float16)}
    yield {**state, "a": state["a"] + 1}
    yield {**state, "b": torch.cat([state["b"][:-1], state["b"][-1:] + 1])}


class TestLayout:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_a_row_is_what_the_documentation_says(self, dtype: Any) -> None:
        layout = CacheLayout(layers=2, kv_heads=3, head_dim=4, block_tokens=5, dtype=dtype)
        states = [tuple(torch.randn(1, 3, 23, 4).to(dtype) for _ in range(2)) for _ in range(2)]
        rows = layout.gather(states, 1, 3)
        assert rows.shape == (3, layout.block_bytes) == (3, 2 * 2 * 3 * 5 * 4 * dtype.itemsize)
        for number, row in enumerate(rows):
            expected = b"".join(
                states[layer][part][0, head, 5 * (number + 1) + token].view(torch.uint8).numpy().tobytes()
                for layer in range(2)
                for part in range(2)
                for head in range(3)
                for token in range(5)
            )
            assert row.tobytes() == expected


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*'transformers>="):
        PrefixCache.open(None, {})
