"""A server's metrics and status: at one address from the start, for all its namespaces."""

from __future__ import annotations

import http.client
import json
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.host_server import BLOCK_BYTES, WAIT_S, keys_of, serving
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.server.namespaces import CLOSE_S, Namespaces
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.stack.exporters.server import StatusServer
from tiered_kv.stack.exporters.status import explain_query, status
from tiered_kv.testing.control import wait_until

STACK = {"primary": {"capacity": 64 * BLOCK_BYTES, "prefault": True}, "metrics": {"listen": "127.0.0.1:0"}}


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    with closing(Namespaces(STACK, 2)) as opened:
        yield opened


@pytest.fixture
def pages(namespaces: Namespaces) -> Iterator[StatusServer]:
    opened = namespaces.open_pages()
    assert opened is not None
    with closing(opened):
        yield opened


def ask(pages: StatusServer, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(pages.host, pages.port, timeout=20.0)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def attach(namespaces: Namespaces, model: str) -> str:
    """Open a namespace as for an engine, and return its digest."""
    opened: list[ServedStack | TieredKVError] = []
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the server's thread, which is this one
    settings = {"namespace": {"model": model}, "block": {"bytes": BLOCK_BYTES}}
    namespaces.open(settings, calls.put, opened.append)
    while not opened:
        calls.get(timeout=WAIT_S)()
    assert isinstance(opened[0], ServedStack)
    return opened[0].config.identity.digest.hex()


def test_probes_are_answered_before_an_engine_attaches(pages: StatusServer) -> None:
    assert ask(pages, "/healthz") == (200, "ok\n")
    assert ask(pages, "/metrics") == (200, "")
    status, text = ask(pages, "/status")
    assert status == 400
    assert "none is open yet" in text


def test_one_namespace_has_the_pages_of_a_stack(namespaces: Namespaces, pages: StatusServer) -> None:
    digest = attach(namespaces, "a")
    assert json.loads(ask(pages, "/status")[1])["namespace"] == digest
    families = list(text_string_to_metric_families(ask(pages, "/metrics")[1]))
    assert {"namespace" in sample.labels for family in families for sample in family.samples} == {False}


def test_a_request_is_found_by_its_id_and_shown_with_its_engine(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine("replica-0")
        context = engine.begin("chat-7")
        engine.load(keys_of(2), context)
        engine.end(context)
        history = served.host.stack.history
        assert history is not None
        wait_until(history.requests)
        answer: Any = explain_query(served.host.stack.observed(), {"request": ["chat-7"]})
        (request,) = answer["requests"]
        assert request["request"].split("/")[::2] == ["replica-0", "chat-7"]
        assert request["missed_blocks"] == 2


def test_a_server_shows_what_its_engines_hold(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(keys_of(8))
        engine.look_up(keys_of(8), engine.begin())
        in_use = served.rows_in_use()  # by the server's thread, which counts leases after it has answered
        held = status(served.host.observed())["tiers"][0]["counters"]
        assert (held["sessions"], held["leased_blocks"]) == (1, 8)
        assert held["granted_blocks"] == in_use - 8 > 0


def test_several_namespaces_are_told_apart(namespaces: Namespaces, pages: StatusServer) -> None:
    digests = {attach(namespaces, model)[:12] for model in "ab"}
    families = list(text_string_to_metric_families(ask(pages, "/metrics")[1]))
    names = [family.name for family in families]
    assert len(names) == len(set(names)) > 10
    for family in families:
        assert {sample.labels["namespace"] for sample in family.samples} == digests, family.name
    for digest in digests:
        assert json.loads(ask(pages, f"/status?namespace={digest}")[1])["namespace"].startswith(digest)
        assert ask(pages, f"/explain?last=1&namespace={digest}")[0] == 200
    status, text = ask(pages, "/status")
    assert status == 400
    assert all(digest in text for digest in digests)


def test_all_stacks_are_closed_though_one_fails(namespaces: Namespaces, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[float] = []
    for model in "ab":
        attach(namespaces, model)
    for host in namespaces.stacks:

        def close(timeout: float, close: Callable[[float], None] = host.close) -> None:
            closed.append(timeout)
            close(timeout)
            raise OSError("a disk has gone")

        monkeypatch.setattr(host, "close", close)
    namespaces.close()
    assert len(closed) == 2
    assert closed[0] <= CLOSE_S / 2
    assert not namespaces.stacks


def test_the_rows_of_a_namespace_are_allocated_where_the_file_says_so(namespaces: Namespaces) -> None:
    attach(namespaces, "a")
    (host,) = namespaces.stacks
    wait_until(lambda: os.fstat(host.region.fd).st_blocks * 512 == host.region.flat.nbytes)


def test_a_wrong_address_is_an_error_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.listen"):
        Namespaces({**STACK, "metrics": {"listen": "here"}})


def test_a_file_with_a_namespace_and_without_block_says_to_leave_both_out() -> None:
    with pytest.raises(ConfigError, match="without 'block', engines bring both"):
        Namespaces({"namespace": {"model": "m"}, "primary": {"capacity": "1MiB"}})


def test_a_file_that_a_server_cannot_serve_says_what_to_leave_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="events: only one stack can publish"):
        Namespaces({**STACK, "events": {"publish": "tcp://127.0.0.1:5557"}}, 2)
    with pytest.raises(ConfigError, match="audit: a server compares no blocks"):
        Namespaces({**STACK, "audit": 0.001})
    with pytest.raises(ConfigError, match=r"secondary\.0: a server has the host's cache"):
        Namespaces({**STACK, "secondary": [{"type": "host", "socket": f"unix:{tmp_path}/cache.sock"}]})
