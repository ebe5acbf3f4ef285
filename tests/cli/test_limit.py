"""`/limits` and `tiered-kv limit`: shares of a running stack are shown, changed, taken back, and kept by a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stack.exporters.test_prefetch import TOKEN, ask
from tests.support.host_server import serving
from tests.support.stacks import manager_of, stack_of
from tiered_kv.cli.main import main
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.stack.exporters.server import StatusServer
from tiered_kv.stack.limits import limits_path
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.toolkit.record import HEADER_BYTES

BLOCK_BYTES = 4096
LISTEN = {"listen": "127.0.0.1:0"}


@pytest.fixture
def stack() -> Iterator[Stack]:
    with open_stack(stack_of(blocks=100, metrics=LISTEN, limits={"a": "20%", "default": "80%"})) as stack:
        yield stack


def url_of(stack: Stack) -> str:
    assert stack.server is not None
    return f"http://127.0.0.1:{stack.server.port}"


def put(stack: Stack, tenant: str, count: int, first: int = 0) -> None:
    keys = [f"{tenant}-{number}".encode() for number in range(first, first + count)]
    assert stack.put(keys, bytes(count * BLOCK_BYTES), hints={"tenant": tenant}) == count


def held(stack: Stack) -> dict[str, int]:
    used: dict[str, int] = stack.counters()["cpu"]["tenant_used_bytes"]
    return {name: count // BLOCK_BYTES for name, count in used.items() if count}


def memory(**more: object) -> dict[str, object]:
    """Return the entry of a memory tier with shares, of 20 blocks."""
    return {"type": "memory", "capacity": 20 * (BLOCK_BYTES + HEADER_BYTES), "limits": {"a": "25%"}, **more}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["limit", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_changed_share_counts_from_the_next_store_until_it_is_taken_back(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    put(stack, "a", 20)
    put(stack, "b", 80)
    changed = run(capsys, url_of(stack), "a", "60%")
    assert changed["tenants"]["a"] == {
        "limit": "60%",
        "is_changed": True,
        "share_bytes": 60 * BLOCK_BYTES,
        "used_bytes": 20 * BLOCK_BYTES,
        "evicted_blocks": 0,
    }
    assert changed["is_kept"] is False
    run(capsys, url_of(stack), "default", "40%")
    assert held(stack) == {"a": 20, "b": 80}, "a change evicts nothing"
    for first in range(20, 120, 20):
        put(stack, "a", 20, first)
    assert held(stack) == {"a": 60, "b": 40}
    for name in ("a", "default"):
        taken_back = run(capsys, url_of(stack), name, "--take-back")
    assert taken_back["tenants"]["a"]["limit"] == "20%"
    for first in range(100, 200, 20):
        put(stack, "b", 20, first)
    assert held(stack) == {"a": 20, "b": 80}


def test_the_table_shows_what_each_tenant_holds(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    put(stack, "b", 10)
    assert main(["limit", url_of(stack)]) == 0
    text = capsys.readouterr().out
    assert [line.split() for line in text.splitlines() if line.split()[:2] == ["cpu", "b"]] == [
        ["cpu", "b", "80%", "320KiB", "40KiB", "0"]
    ]
    assert main(["limit", url_of(stack), "c", "0"]) == 0
    text = capsys.readouterr().out
    assert "0 (changed)" in text
    assert "only `tiered-kv serve` keeps it" in text


def test_each_tier_has_shares_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with open_stack(stack_of(memory(), blocks=100, metrics=LISTEN, limits={"a": "20%"})) as stack:
        put(stack, "b", 5)
        assert stack.flush(60.0)
        assert run(capsys, url_of(stack), "a", "50%", "--tier", "memory").keys() == {"tiers", "is_kept"}
        changed = run(capsys, url_of(stack))
        assert (changed["tenants"]["a"]["limit"], changed["tenants"]["a"]["is_changed"]) == ("20%", False)
        record_bytes = BLOCK_BYTES + HEADER_BYTES
        assert changed["tiers"]["memory"]["capacity_bytes"] == 20 * record_bytes
        assert changed["tiers"]["memory"]["tenants"]["a"] == {
            "limit": "50%",
            "is_changed": True,
            "share_bytes": 10 * record_bytes,
            "used_bytes": 0,
            "evicted_blocks": 0,
        }
        assert changed["tiers"]["memory"]["tenants"]["b"]["used_bytes"] == 5 * record_bytes
        assert run(capsys, url_of(stack), "--tier", "memory") == {"tiers": changed["tiers"]}
        assert run(capsys, url_of(stack), "--tier", "cpu").keys() == {"capacity_bytes", "tenants"}
        run(capsys, url_of(stack), "a", "30%")
        found = run(capsys, url_of(stack))
        assert (found["tenants"]["a"]["limit"], found["tiers"]["memory"]["tenants"]["a"]["limit"]) == ("30%", "50%")
        assert main(["limit", url_of(stack), "a"]) == 0
        text = capsys.readouterr().out
        rows = [line.split()[:3] for line in text.splitlines()]
        assert [row for row in rows if row[1:2] == ["a"]] == [["cpu", "a", "30%"], ["memory", "a", "50%"]]
        assert main(["limit", url_of(stack), "a", "--tier", "memory"]) == 0
        assert "cpu" not in capsys.readouterr().out
        for more in ([], ["10%"], ["--take-back"]):
            assert main(["limit", url_of(stack), "a", *more, "--tier", "disk"]) == 2
            assert "the tier 'disk' has no shares; those with shares: cpu, memory" in capsys.readouterr().err
        assert ask(stack.server, "POST", "/limits", {"tenant": "a", "limit": "1%", "tier": 7})[0] == 400


def test_the_shares_of_a_tier_that_was_taken_out_are_said_to_be_drained(capsys: pytest.CaptureFixture[str]) -> None:
    with open_stack(stack_of(memory(), blocks=100, metrics=LISTEN)) as stack:
        manager_of(stack).removals.ask("drain", "memory")
        wait_until(lambda: manager_of(stack).removed_tiers() == {"memory": "drained"})
        assert run(capsys, url_of(stack))["tiers"]["memory"]["removal"] == "drained"
        assert main(["limit", url_of(stack), "a"]) == 0
        (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["memory", "a"]]
        assert row == ["memory", "a", "25%", "drained", "-", "0"]
        manager_of(stack).removals.ask("attach", "memory")
        wait_until(lambda: not manager_of(stack).removed_tiers())
        assert run(capsys, url_of(stack))["tiers"]["memory"]["removal"] == ""


def test_a_stack_whose_only_shares_are_a_memory_tier_s_says_which_tier_to_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open_stack(stack_of(memory(), metrics=LISTEN)) as stack:
        assert main(["limit", url_of(stack), "a", "10%"]) == 2
        assert "the tier 'cpu' has no shares; those with shares: memory" in capsys.readouterr().err
        answer = run(capsys, url_of(stack), "a", "10%", "--tier", "memory")
        assert answer.keys() == {"tiers", "is_kept"}
        assert answer["tiers"]["memory"]["tenants"]["a"]["limit"] == "10%"


def test_a_stack_whose_only_shares_are_the_primary_tier_s_answers_without_tiers(stack: Stack) -> None:
    assert ask(stack.server, "GET", "/limits")[1].keys() == {"capacity_bytes", "tenants"}


def test_a_tenant_of_whom_nothing_is_known_is_said(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["limit", url_of(stack), "nobody"]) == 1
    said = "nobody has no limit of its own, and has made no request: 'default' counts for it\n"
    assert capsys.readouterr().out == said
    assert main(["limit", url_of(stack), "a"]) == 0
    assert "20%" in capsys.readouterr().out


def test_names_that_come_and_go_take_a_bounded_amount_of_memory(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.stack.limits.NAMES_MAX", 12)
    monkeypatch.setattr("tiered_kv.shares.TENANTS_MAX", 6)
    answers = []
    for number in range(40):
        change = {"tenant": f"t{number}", "limit": "1%"}
        answers.append(ask(stack.server, "POST", "/limits", change))
        put(stack, f"t{number}", 1)
        put(stack, f"u{number}", 1)
        ask(stack.server, "POST", "/limits", {**change, "limit": None})
    assert len(stack.counters()["cpu"]["tenant_used_bytes"]) <= 12 + 6
    assert answers[0][0] == 200
    assert answers[-1][0] == 400
    assert "12 tenants have had a limit or a request" in answers[-1][1]["error"]
    assert ask(stack.server, "POST", "/limits", {"tenant": "a", "limit": "30%"})[0] == 200, "it is known"


@pytest.mark.parametrize("verb", ["limit", "drain", "attach", "top"])
def test_a_token_that_no_header_holds_is_named_and_not_shown(
    stack: Stack, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in ("sesame-of-the-test\n", "sesame of the test", "sesame-öf-the-test"):
        monkeypatch.setenv("TIERED_KV_TOKEN", token)
        more = {"limit": ["a", "10%"], "top": ["--once"]}.get(verb, ["a"])
        assert main([verb, url_of(stack), *more]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: TIERED_KV_TOKEN: the token has ")
        assert "sesame" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "110%"], "SIZE|PERCENT: expected a size such as 200GiB, or a percentage"),
        (["two words", "10%"], "tenant: expected a name"),
        (["a", "10%", "--take-back"], "--take-back: expected a tenant, and no size"),
        (["--take-back"], "--take-back: expected a tenant, and no size"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(
    stack: Stack, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["limit", url_of(stack), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not any(each["is_changed"] for each in run(capsys, url_of(stack))["tenants"].values())


def test_a_stack_without_limits_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    with open_stack(stack_of(metrics=LISTEN)) as stack:
        assert main(["limit", url_of(stack)]) == 2
    assert "the stack has no shares: add 'limits: {}' to its file" in capsys.readouterr().err


def test_only_a_caller_that_is_heard_changes_a_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = stack_of(blocks=100, metrics={**LISTEN, "token": TOKEN}, limits={})
    change = {"tenant": "a", "limit": "10%"}
    with open_stack(config) as stack:
        assert ask(stack.server, "POST", "/limits", change)[0] == 401
        assert ask(stack.server, "POST", "/limits", change, Authorization="Bearer wrong")[0] == 401
        assert main(["limit", url_of(stack), "a", "10%"]) == 2
        assert "metrics.token" in capsys.readouterr().err
        assert ask(stack.server, "GET", "/limits")[1]["tenants"].keys() == {"default"}
        assert stack.server is not None
        file = tmp_path / "stack.yaml"
        listen = f"127.0.0.1:{stack.server.port}"
        file.write_text(yaml.safe_dump({"metrics": {"listen": listen, "token": TOKEN}}))
        assert run(capsys, str(file), "a", "10%")["tenants"]["a"]["limit"] == "10%"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[" * 100_000, 400),
        ({"tenant": "a"}, 400),
        ({"tenant": 7, "limit": "10%"}, 400),
        ({"tenant": "a", "limit": True}, 400),
        ({"tenant": "a", "limit": "10%", "more": 1}, 400),
        ({"tenant": "a", "limit": "10%", "namespace": "ffff"}, 400),
        ({"tenant": "a", "limit": "10%", "namespace": 7}, 400),
    ],
)
def test_calls_that_cannot_be_understood_change_nothing(stack: Stack, body: object, status: int) -> None:
    assert ask(stack.server, "POST", "/limits", body)[0] == status
    assert ask(stack.server, "POST", "/limits", {"tenant": "a", "limit": "1%"}, Content_Type="text/plain")[0] == 415
    assert ask(stack.server, "GET", "/limits")[1]["tenants"]["a"]["limit"] == "20%"


# A host's server.


def served(tmp_path: Path, limits: dict[str, str] | None) -> tuple[Namespaces, ServedStack, StatusServer]:
    config = stack_of(blocks=100, metrics=LISTEN)
    namespaces = Namespaces(config if limits is None else {**config, "limits": limits})
    namespaces.socket_path = tmp_path / "kv.sock"
    namespaces.open_own()
    pages = namespaces.open_pages()
    assert pages is not None
    return namespaces, namespaces.stacks[0], pages


def test_a_server_keeps_changes_over_its_restart_and_they_go_before_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespaces, stack, pages = served(tmp_path, {"a": "20%"})
    path = limits_path(tmp_path / "kv.sock", stack.config.identity.digest.hex())
    try:
        answer = run(capsys, f"http://127.0.0.1:{pages.port}", "a", "60%")
        assert answer["is_kept"] is True
    finally:
        pages.close()
        namespaces.close()
    assert path.stat().st_mode & 0o777 == 0o600
    namespaces, _, pages = served(tmp_path, {"a": "30%", "b": "5%"})
    try:
        shown = run(capsys, f"http://127.0.0.1:{pages.port}")["tenants"]
        assert (shown["a"]["limit"], shown["a"]["is_changed"], shown["b"]["limit"]) == ("60%", True, "5%")
        run(capsys, f"http://127.0.0.1:{pages.port}", "a", "--take-back")
        assert run(capsys, f"http://127.0.0.1:{pages.port}")["tenants"]["a"]["limit"] == "30%"
    finally:
        pages.close()
        namespaces.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is damaged, or holds no changed limits"),
        ("{", "it is damaged, or holds no changed limits"),
        ("[]", "it is damaged, or holds no changed limits"),
        ("[" * 100_000, "it is damaged, or holds no changed limits"),
        ('{"version": 2, "limits": {}}', "it has format version 2, and this release reads 1"),
        ('{"version": 1, "limits": {"a": "x"}}', "limits.a: expected a size such as 200GiB, or a percentage"),
        ('{"version": 1}', "limits: Input should be a valid dictionary"),
        ('{"version": 1, "limits": {}, "tiers": {"memory": {"a": "x"}}}', "tiers.memory.a: expected a size"),
    ],
)
def test_a_file_of_changes_that_cannot_be_used_changes_none(
    tmp_path: Path, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    namespaces, stack, pages = served(tmp_path, {"a": "20%"})
    path = limits_path(tmp_path / "kv.sock", stack.config.identity.digest.hex())
    pages.close()
    namespaces.close()
    path.write_text(text)
    namespaces, _, pages = served(tmp_path, {"a": "20%"})
    try:
        assert ask(pages, "GET", "/limits")[1]["tenants"]["a"]["limit"] == "20%"
        (said,) = [each.message for each in caplog.records if "changed limits" in each.message]
        assert f"{path}: {why}" in said
        status, answer = ask(pages, "POST", "/limits", {"tenant": "a", "limit": "60%"})
        if "version 2" in why:  # a newer release may read it again
            assert status == 400
            assert f"{path}: {why}; move the file away" in answer["error"]
            assert path.read_text() == text
        else:
            assert status == 200
    finally:
        pages.close()
        namespaces.close()


@contextmanager
def serving_pages(directory: Path, **more: Any) -> Iterator[str]:
    """Serve a stack that listens, and yield its address."""
    with serving(directory, stack_of(memory(), blocks=100, metrics=LISTEN, **more)) as served:
        pages = served.namespaces.open_pages()
        assert pages is not None
        with closing(pages):
            yield f"http://127.0.0.1:{pages.port}"


def test_a_server_keeps_the_changes_of_each_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_pages(tmp_path, limits={"a": "20%"}) as url:
        assert run(capsys, url, "a", "60%", "--tier", "memory")["is_kept"] is True
        run(capsys, url, "b", "5%")
    with serving_pages(tmp_path, limits={"a": "20%"}) as url:
        shown = run(capsys, url)
        limits = {name: each["limit"] for name, each in shown["tenants"].items()}
        assert limits == {"default": "100%", "a": "20%", "b": "5%"}
        assert shown["tiers"]["memory"]["tenants"]["a"]["limit"] == "60%"
        assert main(["drain", url, "memory"]) == main(["attach", url, "memory"]) == 0
        capsys.readouterr()
        assert run(capsys, url)["tiers"]["memory"]["tenants"]["a"]["limit"] == "60%", "it was put back"
        taken_back = run(capsys, url, "a", "--take-back", "--tier", "memory")
        assert taken_back["tiers"]["memory"]["tenants"]["a"]["limit"] == "25%"
    with serving_pages(tmp_path) as url:
        assert run(capsys, url).keys() == {"tiers"}, "the file's changes of the primary tier have none to count for"
        run(capsys, url, "a", "70%", "--tier", "memory")
    with serving_pages(tmp_path, limits={"a": "20%"}) as url:
        shown = run(capsys, url)
        assert shown["tenants"]["b"]["limit"] == "5%", (
            "until it is taken back, also if the tier had no shares meanwhile"
        )
        assert shown["tiers"]["memory"]["tenants"]["a"]["limit"] == "70%"


def test_a_change_that_cannot_be_kept_is_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    namespaces, _, pages = served(folder, {"a": "20%"})
    try:
        folder.rename(tmp_path / "away")
        status, answer = ask(pages, "POST", "/limits", {"tenant": "a", "limit": "60%"})
        assert status == 400
        assert "cannot be kept, and was not made" in answer["error"]
        assert ask(pages, "GET", "/limits")[1]["tenants"]["a"]["limit"] == "20%"
        (tmp_path / "away").rename(folder)
    finally:
        pages.close()
        namespaces.close()
