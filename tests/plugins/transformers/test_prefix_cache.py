"""The prefix cache for Transformers: what was saved is restored, bit for bit, or computed again."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
torch = pytest.importorskip("torch", reason="the extra 'transformers'")
transformers = pytest.importorskip("transformers", reason="the extra 'transformers'")

from tests.engines.program_checks import damage  # noqa: E402 - after what it needs
from tests.support.cache_names import cache_in, given  # noqa: E402
from tests.support.faulty import Gate  # noqa: E402
from tests.support.shortages import Resource, outage  # noqa: E402
from tests.support.tiny_llama import llama_sizes  # noqa: E402
from tiered_kv.errors import ConfigError, ShutdownError  # noqa: E402
from tiered_kv.metrics.counters import count_of  # noqa: E402
from tiered_kv.testing.control import wait_until  # noqa: E402
from tiered_kv_transformers import PrefixCache, PrefixCacheStats, prefix_cache  # noqa: E402

pytestmark = pytest.mark.slow

Tensor = Any
BLOCK_TOKENS = 8
VOCABULARY = 101
WAIT_S = 60.0


def llama(seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
    """Return a model of three layers with grouped-query attention and random weights."""
    sizes = {
        **llama_sizes(vocab=VOCABULARY, hidden=64, intermediate=96, layers=3, heads=4, kv_heads=2),
        "max_position_embeddings": 512,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**sizes, **changes})
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread: with models so small, more threads mostly wait for each other, and busily."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _first_run(temporary_directory: Path, _one_thread: None, model: Any) -> None:
    """Let torch make its directory for compiled code, which it keeps, before the tests look for what they leave."""
    assert temporary_directory.exists()
    computed(model, prompt(4))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is to be found be waited for longer than a busy machine takes; a test may say otherwise."""
    monkeypatch.setattr(PrefixCache.restore, "__kwdefaults__", {"timeout": WAIT_S})
    for method in (PrefixCache.flush, PrefixCache.close):
        monkeypatch.setattr(method, "__defaults__", (WAIT_S,))


def prompt(tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def stack_at(path: Path, **changes: object) -> dict[str, object]:
    nvme = {"type": "nvme", "path": str(path), "capacity": "64MiB", "lookup_timeout": "60s"}
    return {"primary": {"capacity": "4MiB"}, "secondary": [nvme], **changes}


IN_MEMORY: dict[str, object] = {"primary": {"capacity": "4MiB"}}


def open_cache(model: Any, stack: Any = IN_MEMORY, **settings: Any) -> PrefixCache:
    return PrefixCache.open(model, stack, **{"block_tokens": BLOCK_TOKENS, **settings})


def computed(model: Any, ids: Tensor) -> Any:
    """Return the model's own cache of a prompt."""
    with torch.no_grad():
        return cache_in(model, model(ids, **given(model, transformers.DynamicCache(config=model.config))))


def states(cache: Any, tokens: int) -> list[Tensor]:
    return [part[:, :, :tokens] for layer in cache.layers for part in (layer.keys, layer.values)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def generate(model: Any, ids: Tensor, cache: Any = None, tokens: int = 12) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **given(model, cache),
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
    )


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    def test_another_process_gets_the_same_bits(self, dtype: str, kv_heads: int, tmp_path: Path) -> None:
        model, ids = llama(dtype=dtype, num_key_value_heads=kv_heads), prompt(61)
        original = computed(model, ids)
        with open_cache(model, stack_at(tmp_path / "kv")) as prefixes:
            assert prefixes.save(ids, original) == 7
        # A new primary tier: what it has came from the disk.
        with open_cache(model, stack_at(tmp_path / "kv")) as prefixes:
            cache, tokens = prefixes.restore(ids)
            assert tokens == cache.get_seq_length() == 56
            assert prefixes.stack.counters()["nvme"]["loaded_blocks_total"] == 7
        assert same(states(cache, 56), states(original, 56))

    def test_blocks_larger_than_a_part_come_in_several(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = prompt(200)
        original = computed(model, ids)
        with open_cache(model) as prefixes:
            monkeypatch.setattr("tiered_kv_transformers.prefix_cache._PART_BYTES", 3 * prefixes.layout.block_bytes)
            prefixes.save(ids[:, :160], original)
            assert prefixes.flush()
            cache, tokens = prefixes.restore(ids)
        assert tokens == 160
        assert same(states(cache, 200), states(original, 160))


class TestWhatIsCovered:
    def test_nothing_saved_is_an_empty_cache_that_the_model_takes(self, model: Any) -> None:
        ids = prompt(40)
        with open_cache(model) as prefixes:
            cache, tokens = prefixes.restore(ids)
            assert (tokens, cache.get_seq_length()) == (0, 0)
            assert torch.equal(generate(model, ids, cache).sequences, generate(model, ids).sequences)
            assert prefixes.stats() == PrefixCacheStats(0, 4, 0, 0, 0)

    @pytest.mark.parametrize(("tokens", "covered"), [(1, 0), (8, 0), (9, 8), (32, 24), (33, 32)])
    def test_at_least_one_token_is_left_to_compute(self, model: Any, tokens: int, covered: int) -> None:
        ids = prompt(64)
        with open_cache(model) as prefixes:
            prefixes.save(ids, computed(model, ids))
            assert prefixes.flush()
            assert prefixes.restore(ids[:, :tokens]).tokens == covered
            assert prefixes.restore(ids[0, :tokens]).tokens == covered

    def test_only_full_blocks_of_tokens_that_were_named_and_computed_are_saved(self, model: Any) -> None:
        ids = prompt(48)
        with open_cache(model) as prefixes:
            assert prefixes.save(ids, transformers.DynamicCache()) == 0
            assert prefixes.save(ids[:, :7], computed(model, ids)) == 0
            assert prefixes.save(ids[:, :23], computed(model, ids)) == 2
            assert prefixes.save(ids, computed(model, ids[:, :39])) == 4

    def test_a_conversation_copies_each_block_once(self, model: Any) -> None:
        ids = prompt(100)
        with open_cache(model) as prefixes:
            cache = computed(model, ids[:, :40])
            assert prefixes.save(ids[:, :40], cache) == 5
            with torch.no_grad():
                model(ids[:, 40:], **given(model, cache))
            assert prefixes.save(ids, cache) == 7
            assert prefixes.save(ids, cache) == 0
            assert prefixes.flush()
            restored = prefixes.restore(ids).cache
            assert prefixes.save(ids, restored) == 0
            # It is cropped, and goes on with other tokens: what is saved are those.
            other = torch.cat([ids[:, :60], prompt(40, seed=9)], dim=1)
            with torch.no_grad():
                before = states(restored, restored.get_seq_length())
                with contextlib.suppress(ValueError):  # since Transformers 5.24, which takes negative numbers only
                    restored.crop(restored.get_seq_length())
                assert same(states(restored, restored.get_seq_length()), before), "a refused crop changes nothing"
                restored.crop(60 - restored.get_seq_length())
                model(other[:, 60:], **given(model, restored))
            assert prefixes.save(other, restored) == 12
            assert prefixes.flush()
            assert close(states(prefixes.restore(other).cache, 96), states(computed(model, other), 96))


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    """Compare keys that were computed in two steps with those of one: they differ by rounding."""
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


class TestDamage:
    def test_a_damaged_block_is_computed_again_with_the_same_tokens(self, model: Any, tmp_path: Path) -> None:
        ids = prompt(90)
        plain = generate(model, ids)
        original = computed(model, ids)
        with open_cache(model, stack_at(tmp_path / "kv")) as prefixes:
            prefixes.save(ids, original)
        damage(tmp_path / "kv", block_of(prefixes, original, 4))
        with open_cache(model, stack_at(tmp_path / "kv")) as prefixes:
            cache, tokens = prefixes.restore(ids)
            assert tokens == 32
            assert count_of(prefixes.stack.counters(), "nvme", "tier", "corrupt_blocks_total") == 1
            again = generate(model, ids, cache)
            assert torch.equal(again.sequences, plain.sequences)
            assert prefixes.save(ids, cache) == 7
            assert prefixes.flush()
            assert prefixes.restore(ids).tokens == 88

    def test_a_stack_without_room_drops_and_counts(self, model: Any) -> None:
        ids = prompt(400)
        block = 3 * 2 * 2 * 16 * 4 * BLOCK_TOKENS
        with open_cache(model, {"primary": {"capacity": 8 * block}}, pending_bytes_max=1 << 30) as prefixes:
            cache = computed(model, ids)
            assert prefixes.save(ids, cache) == 50
            assert prefixes.flush()
            assert prefixes.stats() == PrefixCacheStats(0, 0, 8, 42, 0)
            assert prefixes.restore(ids).tokens == 64
            assert prefixes.save(ids, cache) == 50  # what was lost is not taken for stored

    def test_snapshots_take_no_more_memory_than_allowed(self, model: Any) -> None:
        ids = prompt(100)
        block = 3 * 2 * 2 * 16 * 4 * BLOCK_TOKENS
        with open_cache(model, pending_bytes_max=5 * block) as prefixes:
            cache = computed(model, ids)
            assert prefixes.save(ids, cache) == 5
            assert prefixes.flush()
            assert prefixes.save(ids, cache) == 5
            assert prefixes.flush()
            assert prefixes.restore(ids).tokens == 80
            assert prefixes.stats().dropped_blocks == 7 + 2


def block_of(prefixes: PrefixCache, cache: Any, number: int) -> bytes:
    rows = prefixes.layout.gather([(layer.keys, layer.values) for layer in cache.layers], number, 1)
    return rows.tobytes()


class TestThreads:
    def test_what_is_saved_is_what_the_cache_was(self, model: Any, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
        ids = prompt(40)
        gate.close()
        with open_cache(model) as prefixes:
            hold(prefixes, gate, monkeypatch)
            cache = computed(model, ids)
            expected = [part.clone() for part in states(cache, 40)]
            assert prefixes.save(ids, cache) == 5
            for part in states(cache, 40):
                part.zero_()
            gate.open()
            assert prefixes.flush()
            assert same(states(prefixes.restore(prompt(41)).cache, 40), expected)

    def test_saving_while_the_model_generates(self, model: Any) -> None:
        ids = prompt(30)
        plain = generate(model, ids, tokens=80)
        cache = transformers.DynamicCache(config=model.config)
        done = threading.Event()
        with open_cache(model) as prefixes, ThreadPoolExecutor(1) as pool:
            call = pool.submit(generate, model, ids, cache, 80)
            call.add_done_callback(lambda _: done.set())
            rounds = 0
            while not done.wait(0.001) or rounds == 0:  # which leaves the interpreter to the model for a moment
                # The first step gives each layer its keys, and then its values.
                if cache.get_seq_length(2) and cache.layers[2].values.numel():
                    prefixes.save(plain.sequences, cache)
                    rounds += 1
            assert torch.equal(call.result(60).sequences, plain.sequences)
            prefixes.save(plain.sequences, cache)
            assert prefixes.flush()
            assert prefixes.stats().stored_blocks == 13
            restored, tokens = prefixes.restore(plain.sequences)
            assert tokens == 104
            assert same(states(restored, tokens), states(cache, tokens))

    def test_without_a_thread_a_prompt_is_not_saved_and_the_next_one_is(self, model: Any) -> None:
        ids = prompt(30)
        with open_cache(model) as prefixes:
            cache = cache_in(model, generate(model, ids, tokens=2))
            with outage(Resource.THREAD):
                assert prefixes.save(ids, cache) == 0
            assert prefixes.stats().dropped_blocks == 3
            assert prefixes.save(ids, cache) == 3
            assert prefixes.flush()
            assert prefixes.stats().stored_blocks == 3


def hold(prefixes: PrefixCache, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold up the thread that saves, before it gives the stack anything."""
    put: Callable[..., int] = prefixes.stack.put

    def held(*arguments: Any, **named: Any) -> int:
        gate.pass_through()
        return put(*arguments, **named)

    monkeypatch.setattr(prefixes.stack, "put", held)


class TestResets:
    def test_snapshots_from_before_a_reset_are_not_stored(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, gate: Gate
    ) -> None:
        ids = prompt(40)
        gate.close()
        with open_cache(model) as prefixes:
            hold(prefixes, gate, monkeypatch)
            cache = computed(model, ids)
            assert prefixes.save(ids, cache) == 5
            prefixes.stack.reset_cache()
            gate.open()
            assert prefixes.flush()
            assert prefixes.save(ids, cache) == 0, "it still holds the keys and values from before"
            assert prefixes.restore(ids).tokens == 0
            assert prefixes.stats().dropped_blocks == 10
            assert prefixes.save(ids, computed(model, ids)) == 5
            assert prefixes.flush()
            assert prefixes.restore(ids).tokens == 32

    def test_a_cache_that_was_restored_before_a_reset_is_not_saved_after_it(self, model: Any) -> None:
        ids = prompt(41)
        with open_cache(model) as prefixes:
            caches = [prefixes.restore(ids).cache]  # nothing was found, and the model computes all of it
            generate(model, ids, caches[0])
            assert prefixes.save(ids, caches[0]) == 5
            assert prefixes.flush()
            caches.append(prefixes.restore(ids[:, :25]).cache)
            generate(model, ids, caches[1])
            prefixes.stack.reset_cache()
            assert [prefixes.save(ids, cache) for cache in caches] == [0, 0]

    def test_a_restore_amid_a_reset_has_blocks_from_before_it_only(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = prompt(81)
        with open_cache(model) as prefixes:
            monkeypatch.setattr(prefix_cache, "_PART_BYTES", 4 * prefixes.layout.block_bytes)
            prefixes.save(ids, computed(model, ids))
            assert prefixes.flush()
            get: Callable[..., int] = prefixes.stack.get
            calls: list[int] = []

            def get_amid_resets(*arguments: Any) -> int:
                if calls:
                    prefixes.stack.reset_cache()
                    other = computed(llama(seed=1), ids)
                    prefixes.save(ids, other)
                    assert prefixes.flush()
                calls.append(get(*arguments))
                return calls[-1]

            monkeypatch.setattr(prefixes.stack, "get", get_amid_resets)
            assert prefixes.restore(ids).tokens == 4 * BLOCK_TOKENS
            assert calls == [4, 4], "there were others"


class TestClosing:
    def test_a_stack_that_hangs_does_not_hold_up_closing(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, gate: Gate
    ) -> None:
        gate.close()
        prefixes = open_cache(model)
        hold(prefixes, gate, monkeypatch)
        for seed in range(3):
            prefixes.save(prompt(40, seed), computed(model, prompt(40, seed)))
        wait_until(lambda: gate.waiting == 1)  # the thread has the first
        assert not prefixes.flush(timeout=0.01)
        prefixes.close(timeout=0.05)
        assert prefixes.stats().pending_blocks == 5  # what the thread holds; the others were dropped
        gate.open()
        prefixes.close()
        assert prefixes.stats() == PrefixCacheStats(0, 0, 0, 15, 0)

    def test_a_closed_cache_says_so(self, model: Any) -> None:
        ids = prompt(40)
        prefixes = open_cache(model)
        prefixes.close()
        prefixes.close()
        cache = computed(model, ids)
        for call in (lambda: prefixes.save(ids, cache), lambda: prefixes.restore(ids), prefixes.flush):
            with pytest.raises(ShutdownError, match="closed"):
                call()

    def test_an_error_in_the_stack_costs_its_blocks_only(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        ids = prompt(40)
        with open_cache(model) as prefixes:
            with monkeypatch.context() as patch:
                patch.setattr(prefixes.stack, "put", lambda *_, **__: 1 / 0)
                prefixes.save(ids, computed(model, ids))
                assert prefixes.flush()
            prefixes.save(ids, computed(model, ids))
            assert prefixes.flush()
            assert prefixes.stats() == PrefixCacheStats(0, 0, 5, 5, 0)
        assert "5 blocks of a prompt could not be stored" in caplog.text


class TestOpening:
    def test_the_file_need_not_say_what_the_model_says(self, model: Any, tmp_path: Path) -> None:
        path = tmp_path / "stack.yaml"
        path.write_text("namespace: {tenant: a}\nblock: {tokens: 4}\nprimary: {capacity: 1MiB}\n")
        with PrefixCache.open(model, path) as prefixes:
            config = prefixes.stack.config
        assert (config.block.tokens, config.block.bytes) == (4, 3 * 2 * 2 * 4 * 16 * 4)
        assert config.namespace.model_dump(include={"model", "tenant", "dtype", "layers", "groups", "layout"}) == {
            "model": "llama",
            "tenant": "a",
            "dtype": "float32",
            "layers": 3,
            "groups": ("full attention, 2 heads of 16",),
            "layout": "layer,kv,head,token,dim",
        }

    @pytest.mark.parametrize(
        ("said", "message"),
        [
            ("block: {bytes: 4KiB}", r"stack\.yaml:\d+: block\.bytes: the model says this; leave it out"),
            ("block: {tokens: 4}", r"stack\.yaml:\d+: block\.tokens: found 4, and block_tokens=8 was asked for"),
            ("block: 7", r"stack\.yaml:\d+: block: expected a mapping, or nothing"),
            ("namespace: {dtype: bfloat16}", r"namespace\.dtype: the model says this; leave it out"),
            ("namespace: {extra: {weights: mine}}", r"namespace\.extra\.weights: the model says this"),
            ("namespace: {modle: x}", r"namespace\.modle: unknown key"),
            ("primary: {capacity: 7KiB}", r"primary\.capacity: expected room for at least 2 blocks of 6KiB"),
        ],
    )
    def test_a_file_that_contradicts_the_model_is_refused(
        self, model: Any, said: str, message: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "stack.yaml"
        path.write_text(said + ("" if said.startswith("primary") else "\nprimary: {capacity: 1MiB}") + "\n")
        with pytest.raises(ConfigError, match=message):
            open_cache(model, path)

    def test_a_model_on_several_devices_is_refused(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        spread = [SimpleNamespace(device=torch.device("cuda", number)) for number in range(2)]
        monkeypatch.setattr(model, "parameters", lambda: spread)
        with pytest.raises(ValueError, match="several devices"):
            open_cache(model)

    def test_the_name_of_the_weights_may_be_the_user_s(self, model: Any) -> None:
        names = {"model": "mine", "revision": "3f1c"}
        with open_cache(model, {**IN_MEMORY, "namespace": names}, weights="revision") as prefixes:
            assert prefixes.stack.config.namespace.extra["weights"] == "revision"
        with pytest.raises(ConfigError, match=r"namespace\.revision: .*give both"):
            open_cache(model, {**IN_MEMORY, "namespace": {"model": "mine"}}, weights="revision")
        with pytest.raises(ValueError, match="nonesuch"):
            open_cache(model, weights="nonesuch")
