"""Servers that speak S3's protocol in another way: the tier works where boto3 works, and says what a server refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_s3 import FakeS3, OpenRig, Reply, Request, Then, answer, open_rig, server
from tests.support.odd_s3 import AT_FIRST, ODD
from tests.support.stacks import stack_of
from tiered_kv.base import OffloadKey
from tiered_kv.cli.main import main
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit import resolver
from tiered_kv.toolkit.administration import Verification
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv.toolkit.resolver import Addresses, addresses_of
from tiered_kv_s3.administration import S3Administration
from tiered_kv_s3.settings import S3Settings

pytest.importorskip("boto3", reason="boto3 is not installed")

__all__ = ["open_rig", "server"]

BLOCK_BYTES = 512
BLOCKS = 12
KEPT = 8
"""Blocks that the capacity allows."""
WAIT_S = 60.0
PATIENCE = {"job_timeout": WAIT_S, "request_timeout": WAIT_S, "lookup_timeout": WAIT_S}


@pytest.fixture
def odd_server(request: pytest.FixtureRequest, server: FakeS3) -> FakeS3:
    """A server that is odd from the first request on, with an empty bucket and short pages."""
    row = ODD[request.param] if request.param in ODD else AT_FIRST[request.param]()
    server.has_mark = False
    server.page_objects = 5
    server.reply = lambda asked: row(asked, server.served)
    return server


def config_of(server: FakeS3, **changes: object) -> dict[str, object]:
    entry = {**server.entry, **PATIENCE, "sweep_interval": "50ms", **changes}
    return stack_of({"capacity": KEPT * (BLOCK_BYTES + HEADER_BYTES), **entry}, blocks=BLOCKS, block_bytes=BLOCK_BYTES)


def content(keys: list[OffloadKey]) -> np.ndarray:
    return np.stack([np.frombuffer(hashlib.sha512(key).digest() * 8, np.uint8) for key in keys])


def stored_in(server: FakeS3) -> set[str]:
    return {target for target in server.objects if "/blocks/" in target}


QUICK = ("no_multi_delete",)
ROWS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*ODD, *AT_FIRST)]


@pytest.mark.parametrize("odd_server", ROWS, indirect=True)
def test_every_operation_works_on_an_odd_server(odd_server: FakeS3, tmp_path: Path) -> None:
    keys = make_keys(BLOCKS)
    unlimited = config_of(odd_server, capacity=None)
    with open_stack(unlimited) as stack:
        assert stack.put(keys, content(keys), timeout=WAIT_S) == BLOCKS
        assert stack.flush(WAIT_S)
    assert len(stored_in(odd_server)) == BLOCKS
    with open_stack(unlimited) as stack:
        found = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        assert stack.get(keys, found, timeout=WAIT_S) == BLOCKS
        assert (found == content(keys)).all()
        assert count_of(stack.counters(), "s3", "tier", "corrupt_blocks_total") == 0
        digest = stack.config.identity.digest.hex()
    limited = config_of(odd_server)
    with open_stack(limited) as stack:
        stack.put(make_keys(1, "one more"), content(make_keys(1, "one more")), timeout=WAIT_S)
        wait_until(lambda: len(stored_in(odd_server)) <= KEPT, what="a sweep")
    file = tmp_path / "stack.yaml"
    file.write_text(json.dumps(config_of(odd_server, sweep_interval="1h")))
    assert main(["check", str(file)]) == 0
    settings = S3Settings.model_validate(limited["secondary"][0])  # type: ignore[index]
    with closing(S3Administration(settings)) as administration:
        verification = Verification(BLOCK_BYTES)
        deadline = time.monotonic() + WAIT_S
        (namespace,) = administration.survey(deadline).namespaces
        administration.verify(digest, verification, deadline)
        assert (namespace.blocks, verification.blocks, verification.ok) == (KEPT, KEPT, True)
        purged = administration.purge(digest, deadline)
        assert (purged.blocks, purged.left, stored_in(odd_server)) == (KEPT, (), set())
        assert administration.survey(deadline).namespaces == ()


def test_a_sweep_ends_with_its_tier_on_a_server_that_takes_its_time(server: FakeS3, open_rig: OpenRig) -> None:
    begun, writes = threading.Event(), list[str]()

    def reply(asked: Request) -> Reply | None:
        if asked.method == "PUT" and asked.target.endswith("/sweep"):
            begun.set()
            time.sleep(1.2)  # two such writes take longer than the tier waits for its threads
            writes.append(asked.target)
        return None

    server.reply = reply
    rig = open_rig(capacity="1MiB", sweep_interval="50ms")
    assert rig.store(make_keys(1)).success
    assert begun.wait(WAIT_S)
    rig.close()
    assert len(writes) == 1
    assert not [each.name for each in threading.enumerate() if each.name.endswith("-sweeper")]


def words(status: int, code: str, message: str) -> bytes:
    return answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


def logged(caplog: pytest.LogCaptureFixture, operation: str) -> list[str]:
    return [text for text in caplog.messages if f"request to {operation} failed" in text]


REFUSED_ONE = (
    b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code><Message>it is retained</Message></Error>"
    b"</DeleteResult>"
)


@pytest.mark.slow
@pytest.mark.parametrize("reply", [words(403, "AccessDenied", "it is retained"), answer(200, REFUSED_ONE)])
def test_a_bucket_that_refuses_deletes_says_so_in_the_log_the_counters_check_and_purge(
    server: FakeS3, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, reply: bytes
) -> None:
    server.reply = lambda request: reply if request.method in ("POST", "DELETE") else None
    keys = make_keys(BLOCKS)
    with open_stack(config_of(server)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)

        def failed(times: int) -> bool:
            return count_of(stack.counters(), "s3", "tier", "failed_sweeps_total") >= times

        wait_until(lambda: failed(2), what="two sweeps")
        assert count_of(stack.counters(), "s3", "tier", "failed_requests_total", "delete", "AccessDenied") >= 2
    (text,) = logged(caplog, "delete")
    assert "AccessDenied" in text
    assert "it is retained" in text
    file = tmp_path / "stack.yaml"
    file.write_text(json.dumps(config_of(server)))
    assert main(["check", str(file)]) == 1
    assert "AccessDenied" in capsys.readouterr().out
    assert main(["purge", str(file), "--yes"]) == 1
    assert "AccessDenied" in capsys.readouterr().out


def test_one_retained_object_keeps_no_others_and_the_rest_counts_as_removed(server: FakeS3) -> None:
    keys = make_keys(BLOCKS)
    with open_stack(config_of(server, capacity=None)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)
        digest = stack.config.identity.digest.hex()
    retained = min(stored_in(server)).removeprefix("/bucket/")

    def refuse_one(request: Request) -> bytes | None:
        if request.method != "POST" or retained.encode() not in request.body:
            return None
        body = request.body.replace(retained.encode(), b"none")
        server.served(Request("POST", request.target, request.headers, body))
        return answer(200, REFUSED_ONE.replace(b"<Key>k", f"<Key>{retained}".encode()))

    server.reply = refuse_one
    settings = S3Settings.model_validate(config_of(server)["secondary"][0])  # type: ignore[index]
    with closing(S3Administration(settings)) as administration:
        purged = administration.purge(digest, time.monotonic() + WAIT_S)
    assert stored_in(server) == {f"/bucket/{retained}"}
    assert purged.blocks == BLOCKS - 1
    assert "1 entries were found" in purged.left[0]


@pytest.mark.slow
def test_a_server_that_confirms_deletes_that_it_did_not_make_is_found_out(
    server: FakeS3, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(BLOCKS)
    server.reply = lambda request: answer(200, b"<DeleteResult/>") if request.method == "POST" else None
    with open_stack(config_of(server, capacity=None)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)
    server.written_s = dict.fromkeys(server.objects, time.time() - 3600)
    with open_stack(config_of(server)) as stack:
        stack.put(make_keys(1, "one more"), content(keys[:1]), timeout=WAIT_S)
        wait_until(lambda: count_of(stack.counters(), "s3", "tier", "failed_sweeps_total"), what="a failed sweep")
    assert "NotDeleted" in logged(caplog, "delete")[0]


def test_a_copy_that_leaves_an_object_as_old_as_it_was_is_no_renewal(
    server: FakeS3, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(2)
    with open_stack(config_of(server, capacity=None)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)
    written_s = time.time() - 6 * 3600
    server.written_s = dict.fromkeys(server.objects, written_s)
    copied = answer(200, b"<CopyObjectResult><LastModified>2999-01-01T00:00:00Z</LastModified></CopyObjectResult>")
    server.reply = lambda request: copied if "x-amz-copy-source" in request.headers else None
    with open_stack(config_of(server, capacity=None, ttl="10h")) as stack:
        assert stack.get(keys, np.zeros((2, BLOCK_BYTES), np.uint8), timeout=WAIT_S) == 2
        wait_until(lambda: count_of(stack.counters(), "s3", "tier", "failed_renewals_total") == 2, what="the copies")
        assert count_of(stack.counters(), "s3", "tier", "renewed_blocks_total") == 0
    assert len(logged(caplog, "copy")) == 1


def test_the_first_refusal_of_each_operation_is_logged_with_the_words_of_the_server(
    server: FakeS3, caplog: pytest.LogCaptureFixture
) -> None:
    skewed = words(403, "RequestTimeTooSkewed", "The difference to the current time is too large, said secret &amp; id")
    server.reply = lambda request: skewed
    keys = make_keys(4)
    with open_stack(config_of(server)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)
        wait_until(lambda: count_of(stack.counters(), "s3", "failed_blocks_total", "store", "denied"))
    assert [text for text in logged(caplog, "put") if "RequestTimeTooSkewed: The difference" in text]
    assert len(caplog.messages) == len(set(caplog.messages))
    assert "secret" not in caplog.text


def test_the_first_lookup_that_meets_no_server_is_logged_with_the_words_of_the_system(
    server: FakeS3, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(attempts=1)
    assert not rig.lookup(make_keys(1)[0]), "it has read the mark"
    server.reply = lambda request: Then(b"", "close")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = closed.getsockname()[1]
    monkeypatch.setattr(resolver, "addresses_of", lambda host, port, timeout_s: addresses_of(host, refusing, timeout_s))
    assert not any(rig.lookup_all(make_keys(40, "other")))
    assert [text for text in logged(caplog, "head") if os.strerror(errno.ECONNREFUSED) in text]


def is_long(request: Request) -> bool:
    """Return whether a request is for more than ten objects."""
    limit = re.search(r"max-keys=(\d+)", request.target)
    is_listing = request.method == "GET" and "prefix=" in request.target
    return request.body.count(b"<Key>") > 10 or (is_listing and (limit is None or int(limit[1]) > 10))


@pytest.mark.slow
@pytest.mark.full
def test_a_server_that_needs_time_for_each_object_gets_requests_for_fewer(server: FakeS3) -> None:
    keys = make_keys(BLOCKS)
    with open_stack(config_of(server, capacity=None)) as stack:
        stack.put(keys, content(keys), timeout=WAIT_S)
        digest = stack.config.identity.digest.hex()
    many = Then(b"", "stall")
    server.reply = lambda request: many if is_long(request) else None
    entry = config_of(server, request_timeout="2s", attempts=1)["secondary"]
    settings = S3Settings.model_validate(entry[0])  # type: ignore[index]
    with closing(S3Administration(settings)) as administration:
        purged = administration.purge(digest, time.monotonic() + WAIT_S)
    assert (purged.blocks, purged.left, stored_in(server)) == (BLOCKS, (), set())


def test_connections_that_do_not_open_cost_no_answer_of_the_others(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(14)
    opened = 0
    rig = open_rig(presence_ttl=0)
    assert rig.store(keys[:BLOCKS]).success
    rig = open_rig(presence_ttl=0, request_timeout=1)  # those that do not open take that long
    assert not rig.lookup(make_keys(1, "another")[0]), "it has read the mark, with one connection"
    with ExitStack() as waiting, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        for _ in range(4):  # from now on it answers nobody
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())

        def every_other(host: str, port: int, timeout_s: float) -> Addresses:
            nonlocal opened
            opened += 1
            return addresses_of(host, full.getsockname()[1] if opened % 2 else port, timeout_s)

        monkeypatch.setattr(resolver, "addresses_of", every_other)
        assert rig.lookup_all(keys) == [True] * BLOCKS + [False] * 2
    assert opened > 1
    assert rig.tier.stats()["unanswered_lookups_total"] == 0
