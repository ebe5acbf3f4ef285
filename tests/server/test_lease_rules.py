"""What engines may do with rows, whatever they and their server do, in any order."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.host_server import BLOCK_BYTES, content_of, keys_of, stack_of
from tests.support.stacks import plugged
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.hooks import TierType
from tiered_kv.config.settings import TierSettings
from tiered_kv.server.attach import Attachment, HostLink
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.protocol import Hello
from tiered_kv.server.server import CacheServer, listen
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager

ROWS = 24
KEYS = keys_of(30)
ENGINES = 3


class TierBelow(SecondaryTierManager):
    """A tier that copies a pass after it was asked to, so that each run of an example is the same."""

    is_nonblocking = True

    def __init__(self, spec: object, view: memoryview, tier_type: str) -> None:
        super().__init__(spec, view, tier_type)
        self._rows = np.asarray(view)
        self._blocks: dict[OffloadKey, bytes] = {}
        self._new: list[tuple[JobMetadata, bool]] = []
        self._begun: list[tuple[JobMetadata, bool]] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return key in self._blocks

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._new.append((job_metadata, True))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._new.append((job_metadata, False))

    def get_finished(self) -> list[JobResult]:
        ended, self._begun, self._new = self._begun, self._new, []
        for job, is_store in ended:
            for key, row in zip(job.keys, job.block_ids, strict=True):
                if is_store:
                    self._blocks[key] = self._rows[row].tobytes()
                    assert self._blocks[key] == content_of(key), "wrong bytes are stored"
                else:
                    self._rows[row] = np.frombuffer(self._blocks.get(key, bytes(BLOCK_BYTES)), np.uint8)
        return [JobResult(job.job_id, True) for job, _ in ended]

    def reset_cache(self) -> bool:
        self._blocks.clear()
        return True

    def shutdown(self) -> None:
        self._rows, self._primary_kv_view = np.empty(0, np.uint8), memoryview(b"")


@pytest.fixture(autouse=True)
def _below() -> Iterator[None]:
    with plugged(TierType("below", TierSettings, lambda: TierBelow)):
        yield


STACK = {
    **stack_of(rows=ROWS, secondary=[{"type": "below"}], prefill="off"),
    "primary": {"capacity": ROWS * BLOCK_BYTES, "promotion_hold": 1e-9},
}


@dataclass(eq=False)
class Copies:
    """An engine, and the copies of its workers that run."""

    manager: AttachedManager
    end_fd: int
    """Closing this end of a pipe ends the process, for the server."""
    requests: list[ReqContext] = field(default_factory=list)
    loads: list[tuple[ReqContext, list[OffloadKey], list[int], HostLink]] = field(default_factory=list)
    stores: list[tuple[ReqContext, list[OffloadKey], list[int], HostLink]] = field(default_factory=list)


class LeaseRules(RuleBasedStateMachine):
    """Engines with one thread, and a server that makes a pass when a rule says so."""

    limits: ClassVar[Mapping[str, float]] = {}
    """Limits of what the server does in a pass, in place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        for name, limit in self.limits.items():
            self.patches.enter_context(mock.patch(f"tiered_kv.server.{name}", limit))
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "cache.sock"
        self.engines: list[Copies] = []
        self.ended: dict[int, int] = {}
        self.names = 0
        self.start()

    def start(self) -> None:
        self.namespaces = Namespaces(STACK)
        self.namespaces.open_own()
        self.server = CacheServer(listen(self.path), self.namespaces, pidfd_of=self.pidfd_of)

    def pidfd_of(self, _: socket.socket, pid: int) -> int:
        reader, self.writer = os.pipe()
        return reader

    def passes(self, count: int = 4) -> None:
        for _ in range(count):
            self.server.serve_once(0)

    def attach(self, attachment: Attachment) -> None:
        """Connect while the server makes passes."""
        connecting = threading.Thread(target=attachment.connect)
        connecting.start()
        while connecting.is_alive():
            self.server.serve_once(0.001)
        connecting.join()

    @initialize()
    def first_engines(self) -> None:
        for _ in range(ENGINES):
            self.begin_engine()

    @precondition(lambda self: len(self.engines) < ENGINES)
    @rule()
    def begin_engine(self) -> None:
        self.names += 1
        attachment = Attachment(f"unix:{self.path}", Hello(f"engine-{self.names}", "scheduler"))
        self.attach(attachment)
        engine = Copies(AttachedManager(attachment), self.writer)
        self.engines.append(engine)

    @rule(count=st.integers(1, 3))
    def serve(self, count: int) -> None:
        self.passes(count)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.engine(data).manager.on_schedule_end()

    @rule(
        data=st.data(),
        ahead=st.booleans(),
        first=st.integers(0, 20),
        count=st.integers(1, 10),
        twice=st.sampled_from([0, 0, 3]),
    )
    def ask(self, data: st.DataObject, ahead: bool, first: int, count: int, twice: int) -> None:
        engine = self.engine(data)
        context = ReqContext(f"request-{self.names}-{len(engine.requests)}-{data.draw(st.integers(0, 10**9))}")
        engine.manager.on_new_request(context)
        engine.requests.append(context)
        if ahead:
            engine.manager.prefetch([*KEYS[first : first + count], *KEYS[first : first + twice]], context)
        else:
            engine.manager.lookup_many(KEYS[first : first + count], context)

    @rule(data=st.data(), first=st.integers(0, 20), count=st.integers(1, 10))
    def load(self, data: st.DataObject, first: int, count: int) -> None:
        engine = self.engine(data)
        context = self.request(data, engine)
        if context is None:
            return
        keys = KEYS[first : first + count]
        engine.manager.expect(len(keys), context)
        answers = engine.manager.lookup_many(keys, context)
        found = keys[: next((at for at, each in enumerate(answers) if each is not True), len(keys))]
        running = {key for each, keys_of_load, _, _ in engine.loads if each is context for key in keys_of_load}
        if found and running.isdisjoint(found):
            rows = engine.manager.prepare_load(found, context).block_ids.tolist()
            link = engine.manager.link
            assert link is not None
            engine.loads.append((context, found, rows, link))

    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        engine = self.engine(data)
        if engine.loads:
            context, keys, _, _ = engine.loads.pop(data.draw(st.integers(0, len(engine.loads) - 1)))
            engine.manager.complete_load(keys, context)

    @rule(data=st.data(), first=st.integers(0, 24), count=st.integers(1, 6))
    def store(self, data: st.DataObject, first: int, count: int) -> None:
        engine = self.engine(data)
        context = self.request(data, engine)
        if context is None:
            return
        output = engine.manager.prepare_store(KEYS[first : first + count], context)
        link = engine.manager.link
        if output is not None and output.keys_to_store and link is not None:
            rows = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]  # the manager's own
            engine.stores.append((context, output.keys_to_store, rows, link))
            self.write(link, rows, output.keys_to_store, half=True)

    @rule(data=st.data(), success=st.booleans())
    def end_store(self, data: st.DataObject, success: bool) -> None:
        engine = self.engine(data)
        if engine.stores:
            context, keys, rows, link = engine.stores.pop(data.draw(st.integers(0, len(engine.stores) - 1)))
            if success:
                self.write(link, rows, keys)
            engine.manager.complete_store(keys, context, success)

    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        engine = self.engine(data)
        context = self.request(data, engine)
        if context is not None:
            engine.requests.remove(context)
            engine.manager.on_request_finished(context)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        self.engine(data).manager.reset_cache()

    @precondition(lambda self: len(self.engines) > 1)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """An engine ends without a word: first its copies, then its socket, as the kernel closes it."""
        engine = self.engine(data)
        self.engines.remove(engine)
        self.end(engine)

    @rule()
    def replace_the_server(self) -> None:
        self.server.close()
        self.start()
        for engine in self.engines:
            engine.manager.on_schedule_end()
            os.close(engine.end_fd)
            engine.end_fd = -1
            for load in [*engine.loads]:
                engine.loads.remove(load)
                engine.manager.complete_load(load[1], load[0])
            for store in [*engine.stores]:
                engine.stores.remove(store)
                engine.manager.complete_store(store[1], store[0])
            for _ in range(20_000):
                if engine.manager.is_attached:
                    break
                self.server.serve_once(0.001)
                engine.manager.on_schedule_end()
            assert engine.manager.is_attached
            engine.end_fd = self.writer

    @invariant()
    def loads_read_the_right_bytes(self) -> None:
        for engine in self.engines:
            for _, keys, rows, link in engine.loads:
                assert link.region is not None
                for key, row in zip(keys, rows, strict=True):
                    assert link.region.array[row].tobytes() == content_of(key), "wrong bytes"

    @invariant()
    def each_row_has_one_use(self) -> None:
        host = self.namespaces.stacks[0]
        granted = [row for session in host.sessions.values() for row in session.granted]
        stored = [block.block_id for block in host.manager.primary.blocks.values()]
        assert len(set(granted)) == len(granted), "a row was granted twice"
        assert not set(granted) & set(stored), "a row is stored and granted"
        assert len(granted) + len(stored) <= ROWS

    @invariant()
    def counts_are_right(self) -> None:
        host = self.namespaces.stacks[0]
        sessions, ended = [*host.sessions.values()], host.ended
        requests = [request for session in sessions for request in session.requests.values()]
        for session in sessions:
            assert session.leases == sum(len(each.leased) for each in session.requests.values())
            assert not session.changed or session in host.changed
            assert not session.is_waiting or session in host.waiting
        requests += ended._requests.values()
        assert host.requests == len(requests)
        assert host.keys == sum(len(each.codes) for each in requests)
        assert host.leases == sum(len(each.leased) for each in requests)
        assert host.granted == sum(len(each.granted) for each in sessions) + len(ended._granted)

    def teardown(self) -> None:
        try:
            for engine in self.engines:
                self.end(engine)
            host = self.namespaces.stacks[0]
            self.passes(20)
            for _ in range(1000):
                if host.sessions or host.ended:
                    self.passes()
            self.passes(20)
            assert not host.sessions
            assert not host.ended
            assert all(block.ref_cnt == 0 for block in host.manager.primary.blocks.values()), "a lease has no end"
            free = host.manager.primary.backend.get_num_free_blocks()
            assert free + len(host.manager.primary.blocks) == ROWS, "rows are lost"
        finally:
            self.server.close()
            self.directory.cleanup()
            self.patches.close()

    def end(self, engine: Copies) -> None:
        engine.loads.clear()
        engine.stores.clear()
        os.close(engine.end_fd)
        engine.manager.shutdown()

    def engine(self, data: st.DataObject) -> Copies:
        return self.engines[data.draw(st.integers(0, len(self.engines) - 1))]

    def request(self, data: st.DataObject, engine: Copies) -> ReqContext | None:
        return data.draw(st.sampled_from(engine.requests)) if engine.requests else None

    def write(self, link: HostLink, rows: Sequence[int], keys: Sequence[OffloadKey], *, half: bool = False) -> None:
        assert link.region is not None
        for row, key in zip(rows, keys, strict=True):
            content = content_of(key)
            link.region.array[row].data[:] = bytes(len(content)) if half else content


TestLeaseRules: Any = LeaseRules.TestCase
TestLeaseRules.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=30)


class SmallSteps(LeaseRules):
    """A server that reads one message of each engine in a pass, and acts on one end."""

    limits: ClassVar[Mapping[str, float]] = {
        "server.READ_S": 0.0,
        "server.TURN_S": 0.0,
        "server.LEAVE_S": 0.0,
        "ended.SWEEP_ROWS": 1,
    }


TestSmallSteps: Any = SmallSteps.TestCase
TestSmallSteps.settings = TestLeaseRules.settings
