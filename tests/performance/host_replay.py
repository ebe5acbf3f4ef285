"""What the engines of one host hit: `python -m tests.performance.host_replay TRACE [--engines N] [--capacity BLOCKS]`.

It starts `tiered-kv serve` and a process for each engine, and routes the requests of a trace to them at random. An
engine loads what it finds of a prompt and stores the rest. Beside it are the simulated rates of one cache of the same
size, and of private caches. `of_one` is the first over that of one cache.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.performance.host_cache import ROW_BYTES, attached, store
from tests.support.host_server import server_process
from tiered_kv.base import ReqContext
from tiered_kv.config.stack_config import load_config
from tiered_kv.server.client import AttachedManager
from tiered_kv.workload.hit_rates import host_rates
from tiered_kv.workload.request import Request, block_key
from tiered_kv.workload.simulation import Fleet, routes
from tiered_kv.workload.trace import read_trace

_STORE_BLOCKS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=None)
    args = parser.parse_args()
    requests = list(read_trace(args.trace, requests_max=args.requests))
    stack: dict[str, object] = {"namespace": {"model": "m"}, "block": {"bytes": ROW_BYTES}}
    stack["primary"] = {"capacity": args.capacity * ROW_BYTES}
    with tempfile.TemporaryDirectory() as directory, server_process(Path(directory), stack):
        hits = replay(f"unix:{directory}/cache.sock", requests, args.engines)
    rate = sum(hits) / sum(len(request.hash_ids) for request in requests)
    fleet = Fleet(args.engines, "random", concurrency=args.engines)
    simulated = host_rates(load_config(stack).primary.policy, args.capacity, requests, fleet)
    one = simulated.shared
    figures = {"shared": rate, "one": one, "private": simulated.private, "of_one": rate / one}
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def replay(address: str, requests: Sequence[Request], engines: int) -> list[int]:
    """Return how many blocks each request hit. A request waits for its engine, and for others of its session."""
    hits = [0] * len(requests)
    running: dict[socket.socket, int] = {}

    def collect() -> None:
        for each in select.select(list(running), [], [])[0]:
            hits[running.pop(each)] = int(each.recv(32))

    channels = [start_engine(address, requests) for _ in range(engines)]
    for number, engine in enumerate(routes("random", requests, engines)):
        session, channel = requests[number].session, channels[engine]
        while channel in running or (session and any(requests[each].session == session for each in running.values())):
            collect()
        channel.send(b"%d" % number)
        running[channel] = number
    while running:
        collect()
    for channel in channels:
        channel.close()
    for _ in channels:
        os.wait()
    return hits


def start_engine(address: str, requests: Sequence[Request]) -> socket.socket:
    """Start a process that serves the requests whose numbers it gets, and answers how many blocks each hit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():  # noqa: TID251 (before any thread)
        theirs.close()
        return ours
    ours.close()
    try:
        manager = attached(address)
        while number := theirs.recv(32):
            theirs.send(b"%d" % serve(manager, requests[int(number)], ReqContext(f"request-{number.decode()}")))
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def serve(manager: AttachedManager, request: Request, context: ReqContext) -> int:
    """Load the blocks of a prompt that are there, store the others, and return how many were there."""
    keys = [block_key(each) for each in request.hash_ids]
    manager.on_new_request(context)
    manager.prefetch(keys, context)
    while True:
        answers = manager.lookup_many(keys, context)
        hits = answers.index(False) if False in answers else len(answers)
        if None not in answers[:hits]:
            break
        manager.on_schedule_end()
        time.sleep(0.0001)
    manager.prepare_load(keys[:hits], context)
    manager.complete_load(keys[:hits], context)
    manager.on_request_finished(context)
    for first in range(hits, len(keys), _STORE_BLOCKS):
        store(manager, keys[first : first + _STORE_BLOCKS])
    return hits


if __name__ == "__main__":
    main()
