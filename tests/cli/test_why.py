"""`stack.explain`, `/explain`, and `tiered-kv why`, which asks it of the process that has the stack open."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.obedient import Engine, obedient, obedient_plugin, put, put_below, stack_of
from tests.support.stacks import block_hashes, manager_of
from tests.support.threads import meanwhile
from tiered_kv.cli.main import main
from tiered_kv.config.namespace import differences
from tiered_kv.errors import ConfigError
from tiered_kv.reasons import SENTENCES, Fate
from tiered_kv.stack.exporters.server import Body, StatusServer, routes_of
from tiered_kv.stack.exporters.status import KEYS_MAX, explain_query
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.pace import FIRST_LOADS

__all__ = ["obedient_plugin"]

KEYS = make_keys(4)
OBEDIENT: dict[str, object] = {"type": "obedient", "name": "disk"}


@pytest.fixture
def stack() -> Iterator[Stack]:
    """A stack in which request "r" has missed blocks that were evicted."""
    with open_stack(stack_of(OBEDIENT)) as stack:
        put_below(stack, KEYS)
        obedient(stack).present.clear()
        assert Engine(manager_of(stack)).request(KEYS, "r") == 0
        yield stack


@contextmanager
def served(stack: Stack) -> Iterator[str]:
    """Serve the stack as its setting `metrics` does; yield the URL."""
    server = StatusServer("127.0.0.1", 0)
    server.start(routes_of(lambda: {"a digest": stack.observed()}))
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.close()


@pytest.fixture
def url(stack: Stack) -> Iterator[str]:
    with served(stack) as url:
        yield url


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["why", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# The stack.


def test_a_stack_whose_last_requests_were_hits_does_not_say_that_none_was_a_miss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open_stack(stack_of()) as stack, served(stack) as url:
        assert main(["why", url, "--last"]) == 0
    assert capsys.readouterr().out == "none of the last requests that ended missed a block\n"


def test_a_stack_without_a_history_says_so() -> None:
    with open_stack(stack_of(history=0)) as stack:
        with pytest.raises(ConfigError, match="history"):
            stack.explain(block_hashes(KEYS))
        with pytest.raises(ConfigError, match="history"):
            explain_query(stack.observed(), {})


def test_a_closed_stack_still_explains(stack: Stack) -> None:
    stack.close()
    assert [each.fate for each in stack.explain(block_hashes(KEYS))[0].tiers] == ["evicted", "evicted"]


def test_threads_may_ask_while_an_engine_runs() -> None:
    with open_stack(stack_of(OBEDIENT)) as stack:

        def ask() -> None:
            assert len(stack.explain(block_hashes(KEYS))) == 4
            explain_query(stack.observed(), {"last": ["3"]})
            stack.counters()

        with meanwhile(ask, threads=3):
            for number in range(100):
                Engine(manager_of(stack)).store(make_keys(8, str(number)), f"w{number}")
                Engine(manager_of(stack)).request(KEYS, f"r{number}")
        ask()  # unlike `counters`, `explain` waits until the history has taken what was noted
        assert stack.counters()["cpu"]["blocks_total"] == {"miss": 100}


# The question.


def test_an_answer_has_keys_and_requests(stack: Stack) -> None:
    answer = explain_query(
        stack.observed(), {"key": [KEYS[0].hex(), KEYS[1].hex().upper()], "request": ["r", "unknown"]}
    )
    assert answer["namespace"] == stack.config.identity.digest.hex()
    assert answer["tiers"] == ["cpu", "disk"]
    keys: Any = answer["keys"]
    assert [key["key"] for key in keys] == [KEYS[0].hex(), KEYS[1].hex()]
    assert keys[0]["tiers"]["disk"]["fate"] == "evicted"
    requests: Any = answer["requests"]
    (request,) = requests
    assert (request["request"], request["missed_blocks"], request["hits"]) == ("r", 1, {})
    assert request["misses"] == {"cpu": {"evicted": 1}, "disk": {"evicted": 1}}
    assert request["first_missed"]["key"] == KEYS[0].hex()
    assert request["first_missed_because"] == {"cpu": "evicted", "disk": "evicted"}
    json.dumps(answer)


def test_blocks_are_told_by_kv_cache_group(stack: Stack, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    states = make_keys(3, "state", group_idx=1)
    engine = Engine(manager_of(stack))
    context = engine.begin("hybrid")
    for key in (*make_keys(1, "new"), *states, states[0]):
        assert engine.look_up([key], context) == 0
    engine.end(context)
    assert answer(capsys, url, "--request", "hybrid")["requests"][0]["missed_groups"] == {"0": 1, "1": 3}
    assert main(["why", url, "--request", "hybrid"]) == 0
    assert "4 blocks missed (1 of KV cache group 0, 3 of KV cache group 1)" in capsys.readouterr().out


def test_the_last_requests_are_those_that_missed_something(stack: Stack) -> None:
    put(stack, KEYS)
    assert Engine(manager_of(stack)).request(KEYS, "hit") == 4
    assert Engine(manager_of(stack)).request(make_keys(1, "new"), "s") == 0
    requests: Any = explain_query(stack.observed(), {"last": ["1"]})["requests"]
    assert [request["request"] for request in requests] == ["s"]
    requests = explain_query(stack.observed(), {"last": ["9"], "request": ["hit"]})["requests"]
    assert [request["request"] for request in requests] == ["s", "hit", "r"]


@pytest.mark.parametrize(
    "query",
    [
        {"key": ["xyz"]},
        {"key": ["abc"]},
        {"key": [""]},
        {"key": ["00"] * (KEYS_MAX + 1)},
        {"request": ["r"] * (KEYS_MAX + 1)},
        {"last": ["-1"]},
        {"last": ["9999"]},
        {"last": ["1" * 50]},
        {"path": ["/etc/passwd"]},
    ],
)
def test_a_question_that_is_none_is_refused(stack: Stack, query: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        explain_query(stack.observed(), query)


def test_every_fate_has_words() -> None:
    assert set(SENTENCES) == {*(fate.label for fate in Fate), "present"}


# The command.


def test_why_asks_the_process(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, url, KEYS[0].hex())["keys"][0]["tiers"]["cpu"]["fate"] == "evicted"
    assert answer(capsys, url, "--request", "r")["requests"][0]["missed_blocks"] == 1
    assert answer(capsys, url, "--last")["requests"][0]["request"] == "r"
    assert main(["why", url, "--last"]) == 0
    shown = capsys.readouterr().out
    assert re.search("request r, ended .* ago: 1 block missed", shown)
    assert "evicted 1" in shown
    assert KEYS[0].hex() in shown


def test_why_says_by_which_estimate_a_tier_was_too_slow(capsys: pytest.CaptureFixture[str]) -> None:
    with open_stack(stack_of(OBEDIENT, prefill={"tokens_per_s": 1 << 40})) as stack, served(stack) as url:
        for number in range(len(FIRST_LOADS) + 1):
            put_below(stack, KEYS)
            Engine(manager_of(stack)).request(KEYS, f"r{number}")
        estimates = answer(capsys, url, "--last")["estimates"]
        assert main(["why", url, "--last"]) == 0
    shown = capsys.readouterr().out
    assert estimates["cpu"]["compute_block_seconds"] == 16 / (1 << 40)
    assert estimates["disk"]["expected_load_seconds"] + estimates["disk"]["expected_block_seconds"] > 0.0
    assert "disk: too_slow 1: the engine computes it sooner than it would have come" in shown


def test_a_request_that_is_not_known_is_said_to_be(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", url, "--request", "unknown"]) == 1
    assert "still running" in capsys.readouterr().out


def test_without_a_process_why_says_so_and_opens_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(stack_of({"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"})))
    assert main(["why", str(file), "--last"]) == 2
    assert "metrics" in capsys.readouterr().err
    assert main(["why", "http://127.0.0.1:1", "--last"]) == 2
    assert "no process answers" in capsys.readouterr().err
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["file:///etc/passwd", "--last"], "expected a URL"),
        (["http://127.0.0.1:1"], "expected keys"),
        (["http://127.0.0.1:1", "--namespaces"], "needs the stack's file"),
    ],
)
def test_what_why_cannot_do(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_the_process_refuses_is_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", url, "no-key"]) == 2
    assert "hexadecimal" in capsys.readouterr().err


# Other namespaces.


@pytest.mark.parametrize(
    "wrong", [{"keys": [], "requests": [{}]}, {"keys": 1, "requests": 5}, {"keys": [None], "requests": []}]
)
def test_an_answer_of_another_server_is_an_error(wrong: object, capsys: pytest.CaptureFixture[str]) -> None:
    server = StatusServer("127.0.0.1", 0)
    server.start({"/explain": lambda query: Body(json.dumps(wrong).encode(), "application/json")})
    try:
        assert main(["why", f"http://127.0.0.1:{server.port}", "--last"]) == 2
    finally:
        server.close()
    assert "no stack of this kind" in capsys.readouterr().err


def test_a_request_s_id_is_cut_and_nothing_in_it_is_obeyed_by_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = "\x1b]0;title\x07\nforged\x1b[2J" + "x" * 100_000
    with open_stack(stack_of(OBEDIENT)) as stack:
        Engine(manager_of(stack)).request(KEYS, chosen)
        with served(stack) as url:
            assert len(json.dumps(answer(capsys, url, "--last"))) < 10_000
            assert answer(capsys, url, "--request", chosen[:5000])["requests"]
            assert main(["why", url, "--last"]) == 0
    shown = capsys.readouterr().out
    assert "request \\x1b]0;title\\x07\\nforged" in shown
    assert not [each for each in shown if each != "\n" and not each.isprintable()]


def test_why_takes_the_address_from_the_stack_s_file_and_needs_no_secret_of_it(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(
        f"metrics: {{listen: '{url.removeprefix('http://')}'}}\nsecondary: [{{password: '${{NOT_SET_HERE}}'}}]\n"
    )
    assert answer(capsys, str(path), "--last")["requests"]


def test_the_fields_in_which_another_namespace_differs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with open_stack({**stack_of(entry), "namespace": {"model": "m", "revision": "v2"}}) as stack:
        put(stack, KEYS)
    file = tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(stack_of(entry)))
    assert main(["why", str(file), "--namespaces"]) == 0
    found = f"{stack.config.identity.digest.hex()} is another namespace: namespace.revision is 'v2', not 'main'"
    assert found in capsys.readouterr().out
    assert answer(capsys, str(file), "--namespaces")["tiers"]


def test_fields_that_only_one_of_two_namespaces_has() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "d": []}) == {"a.c": (2, None), "d": (None, [])}
