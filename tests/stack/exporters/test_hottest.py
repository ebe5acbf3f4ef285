"""`/hottest`: who gets the keys of a stack's memory, in which pages, and what another stack does with them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.stacks import manager_of, stack_of
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.errors import ConfigError, FormatError, TierUnavailableError
from tiered_kv.stack.exporters import hottest
from tiered_kv.stack.exporters.hottest import ask_hottest
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until

BLOCK_BYTES = 4096
TOKEN = "a-token-of-a-test"
HASHES = [bytes(24) + number.to_bytes(8, "big") for number in range(1, 13)]
KEYS = [make_offload_key(each, 0) for each in HASHES]


def config_of(directory: Path, listen: str = "127.0.0.1:0", token: str | None = None, **top: Any) -> dict[str, Any]:
    shared = {"type": "fs", "name": "shared", "path": str(directory / "shared"), "capacity": "8MiB"}
    return stack_of(shared, blocks=64, metrics={"listen": listen, "token": token}, **top)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with open_stack(config_of(tmp_path)) as stack:
        assert stack.put(HASHES, np.zeros((len(HASHES), BLOCK_BYTES), np.uint8)) == len(HASHES)
        assert stack.flush(60.0)
        yield stack


def url_of(stack: Stack) -> str:
    assert stack.server is not None
    return f"http://127.0.0.1:{stack.server.port}"


def ask(stack: Stack, page: str, **headers: str) -> tuple[int, Any]:
    assert stack.server is not None
    with closing(http.client.HTTPConnection("127.0.0.1", stack.server.port, timeout=60.0)) as connection:
        connection.request("GET", page, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text


def test_pages_have_each_key_once_the_hottest_first(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hottest, "PAGE_KEYS", 5)
    out = np.zeros((2, BLOCK_BYTES), np.uint8)
    assert stack.get(HASHES[10:], out) == 2
    status, page = ask(stack, "/hottest")
    assert status == 200
    assert page["next"] == 5
    digest = stack.config.identity.digest.hex()
    found = ask_hottest(url_of(stack), digest, BLOCK_BYTES, None, 100)
    assert found == [*KEYS[10:], *KEYS[:10]]
    assert found[:5] == [bytes.fromhex(key) for key in page["keys"]]
    assert ask_hottest(url_of(stack), digest, BLOCK_BYTES, None, 7) == found[:7]


def test_a_caller_costs_one_pass_over_the_rows(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    def count(_: object, most: int) -> list[OffloadKey]:
        passes.append(most)
        return KEYS

    monkeypatch.setattr(hottest, "hottest_keys", count)
    for _ in range(5):
        assert ask(stack, "/hottest")[0] == 200
    assert len(passes) == 1


def test_a_page_of_a_list_that_is_gone_is_refused(stack: Stack) -> None:
    for page in ("/hottest?first=4096", "/hottest?first=x", "/hottest?key=1", "/hottest?first=-1"):
        assert ask(stack, page)[0] == 400


def test_only_who_may_prefetch_gets_keys(tmp_path: Path) -> None:
    with open_stack(config_of(tmp_path, token=TOKEN)) as stack:
        assert ask(stack, "/hottest")[0] == 401
        assert ask(stack, "/hottest", Authorization=f"Bearer {TOKEN}")[0] == 200
        digest = stack.config.identity.digest.hex()
        assert ask_hottest(url_of(stack), digest, BLOCK_BYTES, TOKEN, 9) == []
        with pytest.raises(TierUnavailableError, match="401"):
            ask_hottest(url_of(stack), digest, BLOCK_BYTES, None, 9)
    with open_stack(config_of(tmp_path)) as stack:
        assert ask(stack, "/hottest", Host="attacker.example")[0] == 403


def test_a_call_that_is_none_takes_no_tier_out(stack: Stack) -> None:
    assert ask(stack, "/drain")[0] == 405
    assert stack.server is not None
    for body, content_type, expected in (
        (b"{}", "text/plain", 415),
        (b"no JSON", "application/json", 400),
        (b'{"tier": 1}', "application/json", 400),
        (b'{"tier": "other"}', "application/json", 400),
        (b'{"tier": "shared", "more": "x"}', "application/json", 400),
    ):
        with closing(http.client.HTTPConnection("127.0.0.1", stack.server.port, timeout=60.0)) as connection:
            connection.request("POST", "/drain", body, {"Content-Type": content_type})
            assert connection.getresponse().status == expected
    assert not manager_of(stack).removed_tiers()


def test_another_namespace_or_block_size_is_refused(stack: Stack) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        ask_hottest(url_of(stack), "00" * 16, BLOCK_BYTES, None, 9)
    with pytest.raises(FormatError, match="another namespace"):
        ask_hottest(url_of(stack), stack.config.identity.digest.hex(), 1, None, 9)


@pytest.mark.parametrize(
    "body",
    [
        b"no JSON",
        b"[]",
        b'{"keys": ["zz"], "next": null, "namespace": "", "block_bytes": 1}',
        b'{"keys": [""], "next": null, "namespace": "", "block_bytes": 1}',
        b'{"keys": [], "next": true, "namespace": "", "block_bytes": 1}',
        b'{"keys": [], "next": 0, "namespace": "", "block_bytes": 1}',
        b'{"keys": [], "next": 9, "namespace": "", "block_bytes": 1}',
    ],
)
def test_an_answer_that_is_no_page_is_an_error(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hottest, "fetch", lambda *_, **__: body)
    with pytest.raises(FormatError):
        ask_hottest("http://127.0.0.1:1", "", 1, None, 9)


def test_a_new_stack_has_what_another_one_has_in_memory(stack: Stack, tmp_path: Path) -> None:
    with open_stack(config_of(tmp_path, warm={"source": url_of(stack)})) as new:
        index = manager_of(new).primary.index
        wait_until(lambda: all(index.get(key, -1) >= 0 for key in KEYS))
        assert new.counters()["cpu"]["blocks_total"].get("hit", 0) == 0


def test_a_server_that_does_not_answer_leaves_memory_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_stack(config_of(tmp_path, warm={"source": "127.0.0.1:1"})):
        wait_until(lambda: "memory begins empty" in caplog.text)
