"""Runs in an environment with vLLM: pipeline stages of unequal layers, each process apart.

    python vllm_stages_program.py LAYERS_OF_STAGE_0 LAYERS_OF_STAGE_1 ...

Starts one process for each stage, stores blocks by the spec of the whole stack, overwrites the KV caches, loads the
blocks again, and prints as JSON what was found: by rank the stages whose bytes came back, and what each process takes
for the row and the namespace.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import TierFilter

from tiered_kv.base import GPULoadStoreSpec
from tiered_kv.integrations.vllm import identity
from tiered_kv.integrations.vllm.engine import configured, engine_facts
from tiered_kv.integrations.vllm.spec import TieredKVOffloadingSpec
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.testing.rig import make_keys

PAGE_BYTES = 4096
KEYS = 4
CAPACITY = 1 << 18
"""A multiple of the rows that each stage would compute from its own layers, so that the sizes of the regions agree."""

CONFIGURATION = SimpleNamespace()
"""Stands for an engine's. This is about layers, so it has nothing else."""


def facts(said: Mapping[str, object], location: str) -> dict[str, str]:
    """Return nothing of the stand-in; refuse what the real function refuses, when a configuration is asked for late."""
    try:
        return engine_facts(said, location)
    except AttributeError as error:
        if error.obj is not CONFIGURATION:
            raise
        return {}


vars(identity)["engine_facts"] = facts


def spec_of(layers: list[int], rank: int, engine_id: str) -> Any:
    """Return the spec of a process that knows the layers of one stage."""
    first = sum(layers[:rank])
    names = tuple(f"layer.{number}" for number in range(first, first + layers[rank]))
    config = SimpleNamespace(
        engine_id=engine_id,
        worker_kv_bytes_per_block=layers[rank] * PAGE_BYTES,
        enable_kv_cache_events=False,
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
        parallel=SimpleNamespace(
            data_parallel_index=0, rank=rank, world_size=len(layers), tp_size=1, pp_size=len(layers), dcp_size=1,
            pcp_size=1,
        ),
        model=SimpleNamespace(name="m", dtype="bfloat16"),
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=names, group_id=0)],
        kv_cache_layout=None,
        canonical_layout=False,
        replicated_layout=False,
        extra_config={"stack": {"primary": {"capacity": CAPACITY}}},
    )  # fmt: skip
    with configured(CONFIGURATION, None):  # as in a connector, whose workers get their KV caches after it was made
        return TieredKVOffloadingSpec(config)


def known_by(spec: Any) -> tuple[int, str]:
    config = spec._shared.config
    return config.block.bytes, config.identity.digest.hex()


def work(layers: list[int], rank: int, engine_id: str) -> None:
    """Be the worker of a stage: store its bytes, forget them, load them, and say whose came back."""
    tensors = [torch.full((KEYS, PAGE_BYTES), 1 + rank, dtype=torch.uint8) for _ in range(layers[rank])]
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=PAGE_BYTES) for tensor in tensors],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=index, page_size_bytes=PAGE_BYTES) for index in range(len(tensors))]
        ],
    )
    spec = spec_of(layers, rank, engine_id)
    worker = spec.get_worker(caches)
    print(json.dumps(known_by(spec)), flush=True)
    rows = CPULoadStoreSpec(json.loads(sys.stdin.readline()))
    device = GPULoadStoreSpec(list(range(KEYS)), [KEYS], [0])
    worker.submit_store(1, device, rows)
    worker.wait({1})
    assert len(worker.get_finished()) == 1
    print(json.dumps("stored"), flush=True)
    sys.stdin.readline()
    for tensor in tensors:
        tensor.zero_()
    worker.submit_load(2, rows, device)
    worker.wait({2})
    assert len(worker.get_finished()) == 1
    print(json.dumps([sorted({int(value) - 1 for value in tensor.unique()}) for tensor in tensors]), flush=True)
    worker.shutdown()


def run(layers: list[int]) -> dict[str, object]:
    """Be the scheduler, which knows the layers of stage 0."""
    engine_id = f"test-{uuid.uuid4().hex}"
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), engine_id, *map(str, layers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(layers))
    ]

    def answers() -> list[Any]:
        lines = [worker.stdout.readline() for worker in workers if worker.stdout is not None]
        assert all(lines), "a worker has ended"
        return [json.loads(line) for line in lines]

    def tell(message: object) -> None:
        for worker in workers:
            assert worker.stdin is not None
            print(json.dumps(message), file=worker.stdin, flush=True)

    try:
        known = answers()
        spec = spec_of(layers, 0, engine_id)
        manager = spec.get_manager()
        known.append(list(known_by(spec)))
        keys = make_keys(KEYS, "a prompt")
        request: Any = SimpleNamespace(req_id="r", load_tier_filter=TierFilter.ALL)
        manager.on_new_request(request)
        output = manager.prepare_store(keys, request)
        tell(output.store_spec.block_ids.tolist())
        assert answers() == ["stored"] * len(layers)
        manager.complete_store(set(keys), request)
        tell(None)
        found = answers()
        manager.on_request_finished(request)
        manager.shutdown()
        assert [worker.wait(60) for worker in workers] == [0] * len(layers)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return {"found": found, "known": known}


def main() -> None:
    if sys.argv[1] == "--rank":
        rank, engine_id, *layers = sys.argv[2:]
        work([int(each) for each in layers], int(rank), engine_id)
    else:
        print(json.dumps(run([int(each) for each in sys.argv[1:]])))


if __name__ == "__main__":
    main()
