"""Runs in an environment with vLLM: whole engines but for their models, which fill the caches with known bytes.

    python vllm_models_program.py DIRECTORY

An engine stores the blocks of a prompt, loses them, is restarted, and loads them. Every byte that its model would read
is compared. Prints one line of JSON for each check: its name, and an error or nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm_known_bytes import Engine  # type: ignore[import-not-found]  # found beside this program when it runs
from vllm_program_parts import (  # type: ignore[import-not-found]
    DEEPSEEK,
    OUR_TIER,
    config_with,
    refusal_of,
    run_checks,
    wait_for,
)

from tests.engines.program_checks import ChecksIn
from tests.support.host_server import serving
from tests.support.tiny_llama import TINY_LLAMA
from tiered_kv.cli import main as cli
from tiered_kv.config.namespace import differences
from tiered_kv.errors import ConfigError
from tiered_kv_vllm.engine import configured
from tiered_kv_vllm.groups import check_groups, check_kinds

PROMPT = [random.Random(0).randrange(512) for _ in range(200)]
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, max_tp_shards=1, head_size=128, dtype=torch.float32)
LLAMA = {**TINY_LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256}
GLM = {
    **LLAMA,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_nextn_predict_layers": 1,
}
"""A `config.json` of a model that may have an MTP draft."""
MTP: Mapping[str, Any] = {"block_size": 32, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
CANONICAL_BYTES = 4 * 32 * 2 * 32 * 4
"""Of a layer: heads, tokens, keys and values, head size, float32."""


def full(ranks: int) -> Any:
    """Return what a layer of `LLAMA` keeps on one of so many ranks."""
    heads = max(1, 4 // ranks)
    return FullAttentionSpec(block_size=32, num_kv_heads=heads, head_size=32, dtype=torch.float32)


def states(ranks: int, mode: str = "align", tokens: int = 32) -> Any:
    """Return what a recurrent layer keeps on one of so many ranks, in pages as large as those of `full`."""
    return MambaSpec(
        block_size=tokens,
        shapes=((4, 64), (4, 128)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=full(ranks).page_size_bytes,
        mamba_cache_mode=mode,
    )


def window() -> Any:
    return SlidingWindowSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32, sliding_window=48)


def chunked() -> Any:
    """Return what a layer keeps whose tokens read back to the start of their chunk of 128."""
    return ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32, attention_chunk_size=128
    )


def latent_window(*, is_replayed: bool) -> Any:
    """Return what a latent layer with a window keeps; vLLM may compute it again instead of keeping it for others."""
    return SlidingWindowMLASpec(
        block_size=32,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=128,
        dtype=torch.float32,
        sliding_window=48,
        bounded_replay=is_replayed,
    )


def draft(spec: Any = None) -> Any:
    """Return what a draft's layer keeps. From 0.33 on vLLM's runner marks it; 0.32 takes the last for the draft's."""
    is_marked = any(field.name == "is_draft" for field in dataclasses.fields(FullAttentionSpec))
    return dataclasses.replace(spec or full(1), **({"is_draft": True} if is_marked else {}))


def layers_of(*specs: Any) -> dict[str, Any]:
    return {f"layers.{number}.attn": spec for number, spec in enumerate(specs)}


class Checks(ChecksIn):
    def latent_attention_takes_one_rank_s_bytes_and_is_found_with_other_ranks(self) -> None:
        model, stack = self._model("latent", DEEPSEEK), self._stack("latent")
        with Engine(model, [layers_of(LATENT, LATENT)] * 8, stack, block_size=16) as engine:
            first = engine.serve(PROMPT)
            assert first.found == 0
            config = engine.manager._stack.config
            assert config.block.bytes == 2 * LATENT.page_size_bytes, "a row of 8 ranks is one rank's"
            assert config.namespace.extra["parts"] == "one for all ranks"
            stored = [worker.stored_bytes for worker in engine.executor.workers]
            assert stored == [12 * config.block.bytes, *[0] * 7], "rank 0 stores"
            engine.drop()
            assert engine.serve(PROMPT) == (first.tokens, 192)
        for ranks in (8, 2, 1):
            with Engine(model, [layers_of(LATENT, LATENT)] * ranks, stack, block_size=16) as engine:
                assert engine.serve(PROMPT) == (first.tokens, 192), ranks
                assert engine.counters()["fs"]["loaded_blocks_total"] == 12

    def windows_of_latent_attention_are_found_or_computed_again(self) -> None:
        model = self._model("latent", DEEPSEEK)
        for is_replayed, whole, blocks in ((False, 192, 8), (True, 144, 6)):
            stack, found = self._stack(f"latent-window-{is_replayed}"), 0
            layers = layers_of(dataclasses.replace(LATENT, block_size=32), latent_window(is_replayed=is_replayed))
            for ranks in (2, 1):
                with Engine(model, [layers] * ranks, stack, block_size=32) as engine:
                    first = engine.serve(PROMPT)
                    engine.drop()
                    assert (first.found, engine.serve(PROMPT)) == (found, (first.tokens, whole)), (is_replayed, ranks)
                    counted = engine.counters()
                    assert counted["cpu"]["stored_blocks_total"] == (0 if found else blocks)
                found = whole
            assert counted["fs"]["loaded_blocks_total"] == blocks

    def a_draft_split_as_its_model_does_not_keep_other_ranks_from_sharing(self) -> None:
        latent = layers_of(LATENT, LATENT, draft(LATENT))
        cases: dict[str, tuple[Any, ...]] = {
            "latent-draft": ({**DEEPSEEK, "num_nextn_predict_layers": 1}, (2, 1), lambda _: latent, {}, 16),
            "canonical-draft": (
                GLM,
                (2, 4, 1),
                lambda ranks: layers_of(full(ranks), full(ranks), draft(full(ranks))),
                {"canonical_layout": True},
                32,
            ),
        }
        for name, (config, counts, layers, extra, size) in cases.items():
            model, stack, found = self._model(name, config), self._stack(name), 0
            options = {**MTP, "block_size": size, "max_num_batched_tokens": 512}
            for ranks in counts:
                with Engine(model, [layers(ranks)] * ranks, stack, extra=extra, **options) as engine:
                    first = engine.serve(PROMPT, tokens=40)
                    engine.drop()
                    again = engine.serve(PROMPT, tokens=40)
                    assert (first.found, again.tokens) == (found, first.tokens), (name, ranks)
                    found = again.found
                    assert found >= 160, (name, ranks)

    def no_rank_loads_a_row_before_the_one_that_stores_has_written_it(self) -> None:
        model, stack = self._model("latent", DEEPSEEK), self._stack("written")
        with Engine(model, [layers_of(LATENT, LATENT)] * 2, stack, block_size=16) as engine:
            copier = engine.executor.workers[0].copier
            finished, copier.get_finished = copier.get_finished, list  # rank 0 says nothing of what it has written
            engine.add(PROMPT)
            blocks = engine.manager._stack.primary.blocks
            wait_for(lambda: engine.step() or len(blocks) == 12)
            for _ in range(20):
                engine.step()
            assert {block.ref_cnt for block in blocks.values()} == {-1}, "rank 1 has reported, and rank 0 writes"
            copier.get_finished = finished
            engine.drop()
            assert engine.serve(PROMPT).found == 192

    def the_same_in_a_host_s_cache(self) -> None:
        model = self._model("latent", DEEPSEEK)
        with serving(self.directory, {"primary": {"capacity": "1MiB"}, "prefill": "off"}, namespaces=2) as served:
            for ranks, found in ((8, 0), (2, 192), (1, 192)):
                attached, layers = {"attach": served.address}, [layers_of(LATENT, LATENT)] * ranks
                with Engine(model, layers, None, extra=attached, block_size=16) as engine:
                    first = engine.serve(PROMPT)
                    engine.drop()
                    # The server learns of the last blocks in the steps of later requests.
                    wait_for(lambda engine=engine: engine.serve(PROMPT).found == 192 or engine.drop())
                    engine.drop()
                    assert (first.found, engine.serve(PROMPT)) == (found, (first.tokens, 192)), ranks
                    assert engine.manager._stack.block_bytes == 2 * LATENT.page_size_bytes
                    stored = [worker.stored_bytes > 0 for worker in engine.executor.workers]
                    assert stored == [not found, *[False] * (ranks - 1)]

    def the_same_below_vllm_s_tiering(self) -> None:
        tier = {"type": "fs", "path": str(self.directory / "tiering"), "capacity": "64MiB"}
        tiering = {
            "spec_name": "TieredKVTieringSpec",
            "cpu_bytes_to_use": 4 << 20,
            "secondary_tiers": [{**OUR_TIER, "tier": tier}],
        }
        model = self._model("latent", DEEPSEEK)
        for ranks, found in ((2, 0), (4, 192), (1, 192)):
            with Engine(model, [layers_of(LATENT, LATENT)] * ranks, None, extra=tiering, block_size=16) as engine:
                assert engine.serve(PROMPT).found == found, ranks
                stored = [worker.stored_bytes > 0 for worker in engine.executor.workers]
                assert stored == [not found, *[False] * (ranks - 1)]

    def canonical_blocks_are_found_with_any_number_of_ranks(self) -> None:
        model, stack = self._model("llama", LLAMA), self._stack("canonical")
        for layout in ("LBHNC", "LBNHC"):
            tokens, found = None, 0
            for ranks in (2, 4, 1, 8):  # of four heads: eight ranks have each head twice
                layers = [layers_of(full(ranks), full(ranks))] * ranks
                extra = {"canonical_layout": True}
                with Engine(model, layers, stack, extra=extra, layout=layout, block_size=32) as engine:
                    served = engine.serve(PROMPT)
                    assert (served.found, tokens in (None, served.tokens)) == (found, True), (layout, ranks)
                    stored = engine.counters()["cpu"]["stored_blocks_total"]
                    assert (stored, engine.manager._stack.config.block.bytes) == (
                        0 if found else 6,
                        2 * CANONICAL_BYTES,
                    )
                    tokens, found = served.tokens, 192
                    described = engine.manager._stack.config.identity.described
        digests = []
        for ranks in (2, 4):
            with Engine(model, [layers_of(full(ranks), full(ranks))] * ranks, stack, block_size=32) as engine:
                assert engine.serve(PROMPT).found == 0, "vLLM's direct layout is another, for each number of ranks"
                identity = engine.manager._stack.config.identity
                digests.append(identity.digest.hex())
                differing = differences(identity.described, described)
                assert differing["namespace.extra.canonical"] == ("false", "true"), differing
        file, said = self.directory / "canonical.yaml", io.StringIO()
        file.write_text(json.dumps(stack))
        with contextlib.redirect_stdout(said):
            assert cli.main(["why", str(file), "--namespaces", "--namespace", digests[1]]) == 0
        (line,) = [line for line in said.getvalue().splitlines() if f"{digests[0]} is another namespace: " in line]
        assert "namespace.parallel.tensor is 2, not 4" in line, line
        assert "canonical" not in line, line

    def windows_beside_a_draft_are_found_without_the_block_that_may_change(self) -> None:
        model, stack = self._model("glm", GLM), self._stack("draft")
        layers = [layers_of(full(1), window(), draft())]
        retention = {"prefix_cache_retention_interval": 32}
        for found in (0, 160):
            with Engine(model, layers, stack, **MTP, **retention) as engine:
                first = engine.serve(PROMPT, tokens=40)
                engine.drop()
                assert (first.found, engine.serve(PROMPT, tokens=40)) == (found, (first.tokens, 160))
        for kinds in ((full(1), window(), draft()), (full(1), draft(window()))):
            message = refusal_of(partial(Engine, model, [layers_of(*kinds)], stack, **MTP), ConfigError)
            assert "finds no window beside a draft" in message

    def windows_and_small_types_are_found(self) -> None:
        stack = self._stack("windows")
        fp8 = dataclasses.replace(full(1), dtype=torch.float8_e5m2)
        kinds: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "alone": ((window(), window()), {}),
            "beside": ((full(1), window(), window()), {}),
            "chunks": ((full(1), chunked(), chunked()), {}),
            "fp8": ((fp8, fp8), {"kv_cache_dtype": "fp8_e5m2"}),
        }
        for name, (layers, options) in kinds.items():
            for found in (0, 192):
                with Engine(self._model(name, LLAMA), [layers_of(*layers)], stack, block_size=32, **options) as engine:
                    first = engine.serve(PROMPT)
                    engine.drop()
                    assert (first.found, engine.serve(PROMPT)) == (found, (first.tokens, 192)), name

    def states_beside_attention_are_found(self) -> None:
        # Mamba2 also leaves the state at the end of a prompt's last whole block, within a step.
        mamba2 = dataclasses.replace(states(1), num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
        for name, ranks, state in (("one", 1, states(1)), ("two", 2, states(2)), ("mamba2", 1, mamba2)):
            model, stack = self._model("llama", LLAMA), self._stack(f"states-{name}")
            layers = [layers_of(full(ranks), state)] * ranks
            for found in (0, 192):  # the state of 192 tokens, and the blocks of attention before it
                with Engine(model, layers, stack, block_size=32) as engine:
                    first = engine.serve(PROMPT)
                    engine.drop()
                    assert (first.found, engine.serve(PROMPT)) == (found, (first.tokens, 192)), name
                    engine.drop()
                    assert engine.serve([*PROMPT, *first.tokens, 1, 2, 3]).found == 192, "the next turn"

    def states_beside_a_draft_are_found(self) -> None:
        model, stack = self._model("glm", GLM), self._stack("states-draft")
        layers = [layers_of(full(1), dataclasses.replace(states(1), num_speculative_blocks=1), draft())]
        for found in (0, 160):
            with Engine(model, layers, stack, **MTP) as engine:
                first = engine.serve(PROMPT, tokens=40)
                engine.drop()
                assert (first.found, engine.serve(PROMPT, tokens=40)) == (found, (first.tokens, 160))

    def a_tail_with_a_key_of_its_own_is_found_after_a_restart(self) -> None:
        model, stack, prompt = self._model("llama", LLAMA), self._stack("tail"), PROMPT[:184]
        for found in (0, 176):  # five blocks and a half, of 32 tokens
            with Engine(model, [layers_of(full(1), states(1))], stack, block_size=32, prefix_match_unit=16) as engine:
                first = engine.serve(prompt)
                engine.drop()
                assert (first.found, engine.serve(prompt)) == (found, (first.tokens, 176))

    def the_audit_compares_full_attention_of_several_groups(self) -> None:
        model = self._model("llama", LLAMA)
        small = dataclasses.replace(full(2), page_size_padded=full(1).page_size_bytes)
        cases = {
            "window": ([layers_of(small, window())], {}),
            "states": ([layers_of(full(1), states(1))], {"prefix_match_unit": 16}),
            "ranks": ([layers_of(full(2), states(2))] * 2, {}),
        }
        for name, (layers, options) in cases.items():
            stack = self._stack(f"audit-{name}", audit=1.0, audit_action="stop")
            for tier in ("cpu", "fs"):
                with Engine(model, layers, stack, block_size=32, **options) as engine:
                    primary = engine.manager._stack.primary
                    for rest in (1, 2):  # what other groups leave in the rows
                        used = {block.block_id for block in primary.blocks.values()}
                        rows = primary.backend.region.array
                        rows[[row for row in range(len(rows)) if row not in used]] = rest
                        assert engine.serve(PROMPT[:184]).found == 0, name
                        engine.drop()
                    del rows  # it keeps the memory mapped
                    audited = engine.counters()[tier].get("audited_blocks_total")
                    assert audited == {"identical": 5}, (name, tier, engine.counters())

    def the_audit_of_a_draft_that_reads_ahead_is_refused(self) -> None:
        model, stack = self._model("glm", GLM), self._stack("audit-draft", audit=1.0)
        attempt = partial(Engine, model, [layers_of(full(1), full(1))], stack, **MTP)
        assert "depends on the next one" in refusal_of(attempt, ConfigError)

    def why_tells_of_the_state_that_no_step_left(self) -> None:
        stack = self._stack("why", metrics={"listen": "127.0.0.1:0"})
        with Engine(self._model("llama", LLAMA), [layers_of(full(1), states(1))], stack, block_size=32) as engine:
            engine.serve(PROMPT)
            engine.drop()
            # Steps left states at 128 and 192 tokens, and the prompts differ before.
            assert engine.serve([*PROMPT[:100], *range(100)]).found == 0
            server, said = engine.manager._stack.server, io.StringIO()
            with contextlib.redirect_stdout(said):
                cli.main(["why", f"http://127.0.0.1:{server.port}", "--last"])
            # The blocks of full attention were found up to the fourth, where the prompts differ.
            assert "(1 of KV cache group 0, 3 of KV cache group 1)" in said.getvalue(), said.getvalue()

    def what_no_block_could_be_found_of_is_refused(self) -> None:
        stack = self._stack("refused")
        alone = [{"layers.0.mixer": states(1, "none", 512)}]
        attempt = partial(Engine, self._model("llama", LLAMA), alone, stack, enable_prefix_caching=False)
        assert "add --enable-prefix-caching" in refusal_of(attempt, ConfigError)
        sizes = {"block_size": 32, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
        cross = CrossAttentionSpec(**sizes)
        attempt = partial(Engine, self._model("llama", LLAMA), [layers_of(full(1), cross)], stack, block_size=32)
        assert "found layers of CrossAttentionSpec" in refusal_of(attempt, ConfigError)
        group = KVCacheGroupSpec(["layers.0.attn"], RSWASpec(**sizes, rswa_window=128))
        with configured(None, KVCacheConfig(1, [], [group])):
            assert "found layers of RSWASpec" in refusal_of(check_kinds, ConfigError)
        group = KVCacheGroupSpec(["layers.0.attn"], LATENT)
        with configured(None, KVCacheConfig(1, [], [group], hisparse_host_num_blocks=1)):
            assert "HiSparse" in refusal_of(partial(check_groups, config_with({})), ConfigError)

    def chunks_that_vllm_may_store_in_part_are_refused(self) -> None:
        model, ours = self._model("llama", LLAMA), {"stack": self._stack("chunks")}
        tiering = {"spec_name": "TieredKVTieringSpec", "cpu_bytes_to_use": 4 << 20}
        for layers in (layers_of(window()), *(layers_of(full(1), each) for each in (window(), chunked(), states(1)))):
            for extra in (ours, tiering):
                chunks = {**extra, "blocks_per_chunk": 2}
                attempt = partial(Engine, model, [layers], None, extra=chunks, block_size=32)
                assert "stores parts of chunks" in refusal_of(attempt, ConfigError)

    def what_has_no_canonical_layout_is_refused(self) -> None:
        stack = self._stack("refused")
        layers = [layers_of(LATENT, dataclasses.replace(full(2), block_size=16))] * 2
        model = self._model("latent", DEEPSEEK)
        attempt = partial(Engine, model, layers, stack, extra={"canonical_layout": True}, block_size=16)
        assert "vLLM has no canonical layout" in refusal_of(attempt, ConfigError)

    def _model(self, name: str, config: Mapping[str, object]) -> Path:
        path = self.directory / f"model-{name}"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        return path

    def _stack(self, name: str, **more: object) -> dict[str, Any]:
        fs = {"type": "fs", "path": str(self.directory / name), "capacity": "64MiB"}
        return {"primary": {"capacity": "4MiB"}, "secondary": [fs], "prefill": "off", **more}


def main() -> None:
    run_checks(Checks(Path(sys.argv[1])), sys.argv[2:])


if __name__ == "__main__":
    main()
