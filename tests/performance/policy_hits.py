"""Prefix hit rates of eviction policies, by workload and size: a line of JSON for each.

    python tests/performance/policy_hits.py --policies lru arc s3fifo density --sizes 1000 5000 --trace FILE
    python tests/performance/policy_hits.py --workloads chats agents documents uniform recency --seed 1

The requests go one after the other through the primary tier, or `--running` of them at a time, while its
clock stands still. Blocks are 8 bytes, and no bytes move. The policy `bound` is Belady's rule by block: it evicts the
block whose next use is farthest. It bounds no prefix hit rate exactly, but no policy that cannot see the future comes
near it.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.performance.bench import command_line
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.policies import RequestChain, RowTable
from tiered_kv.cpu.policies.recency import ARCPolicy
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.workload.request import ChatWorkload
from tiered_kv.workload.trace import read_trace

BLOCK_BYTES = 8
BOUND = "bound"
OTHERS = {"s3fifo": "tests.performance.policy_hits:S3FIFOPolicy"}
"""Policies that are not built in."""
S3FIFO_SMALL_SHARE = 0.1
"""The small queue's share of the blocks, as in the paper."""

Prompt = Sequence[int]
"""The ids of a prompt's blocks, in the order of the prefix."""


def hits_of(prompts: Sequence[Prompt], policy: str, num_blocks: int) -> int:
    """Return how many blocks the requests find in a primary tier of `num_blocks`."""
    manager = open_manager(policy, num_blocks, clock=lambda: 0.0)
    hits = sum(serve(manager, ids, ReqContext(str(number))) for number, ids in enumerate(prompts))
    manager.shutdown()
    return hits


def open_manager(policy: str, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> TieringOffloadingManager:
    backend = CPUBackend(PrimaryRegion(num_blocks, BLOCK_BYTES))
    return TieringOffloadingManager(PrimaryRows(backend, OTHERS.get(policy, policy)), clock=clock)


def serve(manager: TieringOffloadingManager, ids: Prompt, context: ReqContext) -> int:
    """Serve one request alone, and return how many of its blocks it finds before the first that is absent."""
    found, absent = begin(manager, ids, context)
    manager.complete_load(found, context)
    for first in range(0, len(absent), 32):
        output = manager.prepare_store(absent[first : first + 32], context)
        if output is None:
            break
        manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    manager.on_schedule_end()
    return len(found)


def begin(
    manager: TieringOffloadingManager, ids: Prompt, context: ReqContext
) -> tuple[list[OffloadKey], list[OffloadKey]]:
    """Begin a request; return the keys before the first that is absent, whose load is prepared, and the others."""
    manager.on_new_request(context)
    keys = [make_offload_key(block_id.to_bytes(8, "big"), 0) for block_id in ids]
    found = next((index for index, key in enumerate(keys) if not manager.lookup(key, context)), len(keys))
    if found:
        manager.prepare_load(keys[:found], context)
    return keys[:found], keys[found:]


def hits_at_once(prompts: Sequence[Prompt], policy: str, num_blocks: int, running: int) -> int:
    """Return how many blocks the requests find where `running` of them run at a time; each stores 8 blocks a step."""
    manager = open_manager(policy, num_blocks, clock=lambda: 0.0)
    waiting = iter(enumerate(prompts))
    requests: list[tuple[ReqContext, list[OffloadKey], list[OffloadKey]]] = []  # with keys to load, and to store
    hits = 0
    while True:
        for number, ids in itertools.islice(waiting, running - len(requests)):
            context = ReqContext(str(number))
            found, absent = begin(manager, ids, context)
            hits += len(found)
            requests.append((context, found, absent))
        if not requests:
            break
        for request in list(requests):
            context, loading, absent = request
            manager.complete_load(loading, context)
            loading.clear()
            if absent:
                output = manager.prepare_store(absent[:8], context)
                del absent[: 8 if output is not None else len(absent)]
                if output is not None:
                    manager.complete_store(output.keys_to_store, context)
            else:
                manager.on_request_finished(context)
                requests.remove(request)
        manager.on_schedule_end()
    manager.shutdown()
    return hits


def bound_of(prompts: Sequence[Prompt], num_blocks: int) -> int:
    """Return how many blocks are found where the block is evicted whose next use is farthest."""
    uses: dict[int, list[int]] = {}
    for number in range(len(prompts) - 1, -1, -1):
        for block_id in prompts[number]:
            uses.setdefault(block_id, []).append(number)
    resident: dict[int, int] = {}  # block id to its next use
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for ids in prompts:
        hits += next((index for index, block_id in enumerate(ids) if block_id not in resident), len(ids))
        for depth, block_id in enumerate(ids):
            later = uses[block_id]
            later.pop()
            if later:
                resident[block_id] = later[-1]
                heapq.heappush(farthest, (-later[-1], -depth, block_id))
            else:
                resident.pop(block_id, None)
        while len(resident) > num_blocks:
            use, _, block_id = heapq.heappop(farthest)
            if resident.get(block_id) == -use:
                del resident[block_id]
    return hits


class S3FIFOPolicy(ARCPolicy):
    """S3-FIFO, by request: a small queue for new blocks, and a main queue for blocks that were used again.

    After J. Yang, Y. Zhang, Z. Qiu, Y. Yue and R. Vigfusson, "FIFO Queues are All You Need for Cache Eviction" (SOSP
    2023). The queues are the lists of `ARCPolicy`, with a fixed share. A used block belongs to the request that used it
    last, so it moves at once; the paper reinserts it when it would be evicted.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._recent_target = S3FIFO_SMALL_SHARE * self.num_blocks
        # One list for both queues: a returning block must not be evicted after the head of its prefix.
        self._frequent_ghosts = self._recent_ghosts

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()
        self._is_frequent += [False] * (len(self.table) - len(self._is_frequent))
        for row in rows:
            self._is_frequent[row] = self._recent_ghosts.discard(self.table.key[row])

    def _trim_ghosts(self) -> None:
        while len(self._recent_ghosts) > (1 - S3FIFO_SMALL_SHARE) * self.num_blocks:
            self._recent_ghosts.pop()


# Workloads. Each is a function of a seed: equal in every run.


def chats(seed: int = 0) -> Iterator[Prompt]:
    """Chats that share system prompts: the generator of `tiered-kv replay`."""
    return (request.hash_ids for request in ChatWorkload(chats=480, seed=seed).requests())


def agents(seed: int = 0) -> Iterator[Prompt]:
    """Agents that call tools every few seconds, over long instructions, and now and then wait minutes for a person."""
    return (ids for _, _, ids, _ in agent_steps(seed))


def agent_steps(seed: int = 0) -> Iterator[tuple[float, int, Prompt, float | None]]:
    """Return the requests of `agents`: the time, the agent, the prompt, and when the agent returns, if it does."""
    chance = _random(1, seed)
    events: list[tuple[float, int, int, list[int]]] = []
    for agent in range(300):
        tools = chance.randrange(6)
        instructions = [_id("tools", tools, index) for index in range(40)]
        heapq.heappush(events, (agent * 8 * chance.random() * 2, agent, chance.randint(3, 30), instructions))
    while events:
        now_s, agent, steps, ids = heapq.heappop(events)
        ids = ids + [_id("agent", agent, index) for index in range(len(ids), len(ids) + chance.randint(1, 6))]
        wait_s = None
        if steps:
            wait_s = chance.expovariate(1 / 180) if chance.random() < 0.1 else 1 + chance.expovariate(1 / 6)
        yield now_s, agent, ids, wait_s
        if wait_s is not None:
            heapq.heappush(events, (now_s + wait_s, agent, steps - 1, ids))


def documents(seed: int = 0) -> Iterator[Prompt]:
    """Questions about documents, a few of which are popular (Zipf, exponent 0.9)."""
    return _questions(_random(2, seed), [1 / (rank + 1) ** 0.9 for rank in range(800)])


def uniform(seed: int = 0) -> Iterator[Prompt]:
    """Questions about documents that are all equally popular."""
    return _questions(_random(3, seed), [1.0] * 200)


def recency(seed: int = 0) -> Iterator[Prompt]:
    """Documents that return soon or never: of those so far, the nth most recent with a chance of about 1/n."""
    chance = _random(4, seed)
    recent: list[int] = []
    made = 0
    for _ in range(9000):
        rank = int(1.5 ** (chance.random() * 20))
        if rank <= len(recent) and chance.random() < 0.8:
            document = recent.pop(-rank)
        else:
            document, made = made, made + 1
        recent.append(document)
        yield document_prompt(document, chance)


def loop(seed: int = 0) -> Iterator[Prompt]:
    """The same 150 documents, one after the other, again and again: the worst case for LRU."""
    chance = _random(5, seed)
    return (document_prompt(number % 150, chance) for number in range(4500))


def scans(seed: int = 0) -> Iterator[Prompt]:
    """Questions about documents; after each 500, another 200 about documents that are used once."""
    chance, made = _random(6, seed), 1000
    for number, prompt in enumerate(documents(seed)):
        yield prompt
        if number % 500 == 499:
            yield from (document_prompt(made + index, chance) for index in range(200))
            made += 200


def mixed(seed: int = 0) -> Iterator[Prompt]:
    """Agents, documents and recency, a request of each in turn."""
    return (prompt for prompts in zip(agents(seed), documents(seed), recency(seed), strict=False) for prompt in prompts)


def phases(seed: int = 0) -> Iterator[Prompt]:
    """1,500 requests of documents, then of agents, of recency, and of 150 documents that are equally popular; twice."""
    sources = (documents(seed), agents(seed), recency(seed), _questions(_random(7, seed), [1.0] * 150))
    for source in sources * 2:
        yield from itertools.islice(source, 1500)


def _random(number: int, seed: int) -> random.Random:
    return random.Random(number + 100 * seed)


def _questions(chance: random.Random, weights: Sequence[float]) -> Iterator[Prompt]:
    for document in chance.choices(range(len(weights)), weights, k=6000):
        yield document_prompt(document, chance)


def document_prompt(document: int, chance: random.Random) -> list[int]:
    """Return a prompt: a document of 4 to 40 blocks, and a question of its own."""
    length = random.Random(document).randint(4, 40)
    question = chance.getrandbits(48)
    return [_id("document", document, index) for index in range(length)] + [
        _id("question", question, index) for index in range(chance.randint(1, 3))
    ]


def _id(*parts: int | str) -> int:
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


WORKLOADS: dict[str, tuple[Callable[..., Iterator[Prompt]], tuple[int, ...]]] = {
    "chats": (chats, (500, 1000, 2000, 4000)),
    "agents": (agents, (500, 1000, 2000, 4000)),
    "documents": (documents, (500, 1000, 2000, 4000, 8000)),
    "uniform": (uniform, (500, 1000, 2000, 3000)),
    "recency": (recency, (250, 500, 1000, 2000, 4000)),
    "loop": (loop, (500, 1000, 2000, 3000)),
    "scans": (scans, (500, 1000, 2000, 4000, 8000)),
    "mixed": (mixed, (500, 1000, 2000, 4000)),
    "phases": (phases, (500, 1000, 2000, 4000)),
}
TRACE, TRACE_SIZES = "conversation", (1000, 5000, 10_000, 30_000)


def main() -> None:
    parser = command_line(__doc__, trace=Path, seed=0)
    parser.add_argument("--workloads", nargs="*", default=[], choices=sorted(WORKLOADS))
    parser.add_argument("--sizes", nargs="+", type=int, help="blocks; by default those that suit the workload")
    parser.add_argument("--policies", nargs="+", default=["lru", "arc", "s3fifo", "density", BOUND])
    parser.add_argument("--running", type=int, default=1, help="requests at a time; each stores 8 blocks a step")
    arguments = parser.parse_args()
    chosen = {name: list(WORKLOADS[name][0](arguments.seed)) for name in arguments.workloads}
    if arguments.trace:
        chosen[TRACE] = [request.hash_ids for request in read_trace(arguments.trace)]
    for name, prompts in chosen.items():
        total = sum(len(ids) for ids in prompts)
        for size in arguments.sizes or (TRACE_SIZES if name == TRACE else WORKLOADS[name][1]):
            rates: dict[str, float] = {}
            for policy in arguments.policies:
                if policy == BOUND:
                    hits = bound_of(prompts, size)
                elif arguments.running > 1:
                    hits = hits_at_once(prompts, policy, size, arguments.running)
                else:
                    hits = hits_of(prompts, policy, size)
                rates[policy] = round(hits / total, 4)
            print(json.dumps({"workload": name, "blocks": size, **rates}), flush=True)


if __name__ == "__main__":
    main()
