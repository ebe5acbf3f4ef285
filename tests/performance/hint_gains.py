"""What hints gain, honest ones and lies: prefix hit rates by workload, size and what the requests say.

    python tests/performance/hint_gains.py
    python tests/performance/hint_gains.py --workloads agents --sizes 500 1000

A line of JSON for each workload, size and policy, with the hit rate for each way to say hints. In `priorities` the
rates are those of the agents with a priority of their own, and of the others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.performance.bench import command_line
from tests.performance.policy_hits import Prompt, agent_steps, document_prompt, documents, open_manager, serve
from tiered_kv.base import ReqContext

Said = Mapping[str, object]


class Request(NamedTuple):
    """A request, and what an honest client knows of it."""

    now_s: float
    ids: Prompt
    wait_s: float | None
    """Until its blocks are asked for again; None if they never are."""
    owner: int


def hits_of(requests: Sequence[tuple[Request, Said]], policy: str, num_blocks: int) -> list[int]:
    """Return how many blocks each request finds in a primary tier of `num_blocks`."""
    now_s = 0.0
    manager = open_manager(policy, num_blocks, clock=lambda: now_s)
    hits = []
    for number, (request, said) in enumerate(requests):
        now_s = request.now_s
        hits.append(serve(manager, request.ids, ReqContext(str(number), {"tiered_kv": said} if said else None)))
    manager.shutdown()
    return hits


# Workloads.


def agents() -> Iterator[Request]:
    """The agents of `policy_hits.py`."""
    return (Request(now_s, ids, wait_s, agent) for now_s, agent, ids, wait_s in agent_steps())


def once() -> Iterator[Request]:
    """The questions of `policy_hits.py` about documents, each followed by one about a document that is used once."""
    chance = random.Random(8)
    for number, ids in enumerate(documents()):
        yield Request(2.0 * number, ids, 1.0, 0)
        yield Request(2.0 * number + 1, document_prompt(1000 + number, chance), None, 1)


# Ways to say hints: each a function of a request, and of numbers that are random and equal in every run.


def nothing(_: Request, __: random.Random) -> Said:
    return {}


def returns(request: Request, _: random.Random) -> Said:
    return {} if request.wait_s is None else {"expect_return": request.wait_s}


def returns_or_ends(request: Request, _: random.Random) -> Said:
    return {"ttl": 0} if request.wait_s is None else {"expect_return": request.wait_s}


def guess(request: Request, chance: random.Random) -> Said:
    """The kind of the wait is known, but not its length: five seconds for a tool, three minutes for a person."""
    return {} if request.wait_s is None else {"expect_return": 5 if request.wait_s < 40 else 180}


def wrong_by_ten(request: Request, chance: random.Random) -> Said:
    return {"expect_return": (request.wait_s or 20) * chance.choice((0.1, 10))}


def all_at_once(_: Request, __: random.Random) -> Said:
    return {"expect_return": 1}


def half_lie(request: Request, chance: random.Random) -> Said:
    return returns(request, chance) if request.owner % 2 else {"expect_return": 1}


def all_high(_: Request, __: random.Random) -> Said:
    return {"priority": 1}


def all_expire(_: Request, __: random.Random) -> Said:
    return {"ttl": 0}


def ends(request: Request, _: random.Random) -> Said:
    return {"ttl": 0} if request.wait_s is None else {}


def low(request: Request, _: random.Random) -> Said:
    return {"priority": -1} if request.wait_s is None else {}


def skip(request: Request, _: random.Random) -> Said:
    return {"skip": "store"} if request.wait_s is None else {}


def fifth_high(request: Request, _: random.Random) -> Said:
    return {"priority": 1} if request.owner % 5 == 0 else {}


def fifth_low(request: Request, _: random.Random) -> Said:
    return {"priority": -1} if request.owner % 5 == 0 else {}


Way = Callable[[Request, random.Random], Said]

WORKLOADS: dict[str, tuple[Callable[[], Iterator[Request]], tuple[int, ...], tuple[Way, ...]]] = {
    "agents": (
        agents,
        (500, 1000, 2000),
        (nothing, returns, returns_or_ends, guess, wrong_by_ten, all_at_once, half_lie, all_high, all_expire),
    ),
    "once": (once, (1000, 4000), (nothing, skip, ends, low, all_expire)),
    "priorities": (agents, (500, 1000), (nothing, fifth_high, fifth_low)),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workloads", nargs="+", default=sorted(WORKLOADS), choices=sorted(WORKLOADS))
    parser.add_argument("--policies", nargs="+", default=["density"])
    parser.add_argument("--sizes", nargs="+", type=int, help="blocks; by default those that suit the workload")
    parser.add_argument("--ways", nargs="+", help="ways to say hints, by the names of their functions; by default all")
    arguments = parser.parse_args()
    for name in arguments.workloads:
        make, sizes, ways = WORKLOADS[name]
        requests = list(make())
        for size in arguments.sizes or sizes:
            for policy in arguments.policies:
                rates: dict[str, object] = {}
                for way in (way for way in ways if way.__name__ in (arguments.ways or {way.__name__})):
                    chance = random.Random(0)
                    hits = hits_of([(request, way(request, chance)) for request in requests], policy, size)
                    rates[way.__name__] = (
                        [rate(requests, hits, 0), rate(requests, hits, 1)]
                        if name == "priorities"
                        else rate(requests, hits)
                    )
                print(json.dumps({"workload": name, "blocks": size, "policy": policy, **rates}), flush=True)


def rate(requests: Sequence[Request], hits: Sequence[int], others: int | None = None) -> float:
    """Return the hit rate of all, or of the owners whose number is or (`others`) is not a multiple of five."""
    chosen = [
        (found, len(request.ids))
        for found, request in zip(hits, requests, strict=True)
        if others is None or (request.owner % 5 != 0) == others
    ]
    return round(sum(found for found, _ in chosen) / sum(length for _, length in chosen), 4)


if __name__ == "__main__":
    main()
