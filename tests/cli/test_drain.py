"""`tiered-kv drain` and `attach`: what an operator sees, and who may ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.stacks import forget_memory, manager_of, stack_of
from tiered_kv.cli.ask import fetch, url_of
from tiered_kv.cli.main import main
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until

TOKEN = "a-token-of-a-test"
HASHES = [bytes(24) + number.to_bytes(8, "big") for number in range(1, 5)]


def config_of(directory: Path, token: str | None = None) -> dict[str, object]:
    disk = {"type": "nvme", "name": "disk", "path": str(directory / "kv"), "capacity": "8MiB"}
    return stack_of(disk, blocks=16, metrics={"listen": "127.0.0.1:0", "token": token})


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with open_stack(config_of(tmp_path)) as stack:
        yield stack


def address(stack: Stack) -> str:
    assert stack.server is not None
    return f"127.0.0.1:{stack.server.port}"


def test_a_tier_is_taken_out_and_put_back(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = np.zeros((4, 4096), np.uint8)
    assert stack.put(HASHES, blocks) == 4
    assert stack.flush(60.0)
    assert main(["drain", address(stack), "disk"]) == 0
    assert "disk is out: its files are closed" in capsys.readouterr().out
    assert main(["top", address(stack), "--interval", "0.1s", "--once"]) == 1
    assert "DRAINED" in capsys.readouterr().out
    forget_memory(manager_of(stack))
    assert stack.get(HASHES, blocks) == 0
    assert main(["attach", address(stack), "disk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tier": "disk", "removal": "", "note": ""}
    assert stack.get(HASHES, blocks) == 4


def test_a_tier_that_does_not_open_in_time_is_said(
    stack: Stack,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered_kv.tiering.late.RETRY_S", 0.01)
    assert main(["drain", address(stack), "disk"]) == 0
    (tmp_path / "kv").rename(tmp_path / "moved")
    (tmp_path / "kv").write_text("no directory")
    assert main(["attach", address(stack), "disk", "--wait", "10ms"]) == 1
    why = f"{tmp_path / 'kv'} is a file; give a directory"
    wait_until(lambda: manager_of(stack).removals.notes(with_errors=True) == {"disk": why})
    assert main(["attach", address(stack), "disk", "--wait", "10ms"]) == 1
    assert f"disk is attaching: {why}" in capsys.readouterr().out
    assert [each.levelname for each in caplog.records if "'disk': cannot be opened" in each.message] == ["WARNING"]
    (tmp_path / "kv").unlink()
    assert main(["attach", address(stack), "disk"]) == 0


@pytest.mark.parametrize("verb", ["drain", "attach"])
def test_an_unknown_tier_and_a_wrong_address_are_errors(
    verb: str, stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, address(stack), "other"]) == 2
    assert "there is no tier 'other'" in capsys.readouterr().err
    assert main([verb, "127.0.0.1:1", "disk"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_only_who_has_the_token_may_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_stack(config_of(tmp_path, TOKEN)) as stack:
        assert main(["drain", address(stack), "disk"]) == 2
        assert "token" in capsys.readouterr().err
        assert not manager_of(stack).removed_tiers()
        monkeypatch.setenv("TIERED_KV_TOKEN", TOKEN)
        assert main(["drain", address(stack), "disk"]) == 0


def test_who_has_no_token_does_not_see_the_text_of_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a path: the status of others has none."""
    monkeypatch.setattr("tiered_kv.tiering.late.RETRY_S", 0.01)
    with open_stack(config_of(tmp_path, TOKEN)) as stack:
        manager = manager_of(stack)
        manager.removals.ask("drain", "disk")
        wait_until(lambda: manager.removed_tiers() == {"disk": "drained"})
        (tmp_path / "kv").rename(tmp_path / "moved")
        (tmp_path / "kv").write_text("no directory")
        manager.removals.ask("attach", "disk")
        wait_until(lambda: str(tmp_path) in manager.removals.notes(with_errors=True).get("disk", ""))
        shown = fetch(url_of(address(stack)), "/status")
        assert str(tmp_path) not in shown.decode()
        told = fetch(url_of(address(stack)), "/status", headers={"Authorization": f"Bearer {TOKEN}"})
        assert str(tmp_path) in told.decode()


def away(directory: Path, token: str | None = None) -> dict[str, object]:
    """Return a stack whose tier is not required, and cannot be opened."""
    (directory / "kv").write_text("no directory")
    config = config_of(directory, token)
    config["secondary"][0]["required"] = False  # type: ignore[index]
    return config


def test_a_tier_that_was_away_at_the_start_is_attaching_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.tiering.late.RETRY_S", 0.01)
    why = f"{tmp_path / 'kv'} is a file; give a directory"
    with open_stack(away(tmp_path)) as stack:
        assert main(["top", address(stack), "--interval", "0.1s", "--once"]) == 1
        shown = capsys.readouterr().out
        assert "ATTACHING" in shown
        assert why in shown.replace("\n", "")
        assert main(["attach", address(stack), "disk", "--wait", "10ms"]) == 1
        assert f"disk is attaching: {why}" in capsys.readouterr().out
        (tmp_path / "kv").unlink()
        put_until_attached(stack)
        assert main(["top", address(stack), "--interval", "0.1s", "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tiers"][1]["note"] == ""


def put_until_attached(stack: Stack) -> None:
    """Make steps until the tier is in use: it is taken in by one."""

    def is_attached() -> bool:
        stack.contains(HASHES)
        return not manager_of(stack).removed_tiers()

    wait_until(is_attached)


def test_who_has_no_token_sees_that_a_tier_is_away_and_not_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_stack(away(tmp_path, TOKEN)) as stack:
        assert main(["top", address(stack), "--interval", "0.1s", "--once", "--json"]) == 1
        (tier,) = json.loads(capsys.readouterr().out)["tiers"][1:]
        assert (tier["removal"], tier["note"]) == ("attaching", "")
        monkeypatch.setenv("TIERED_KV_TOKEN", TOKEN)
        assert main(["top", address(stack), "--interval", "0.1s", "--once", "--json"]) == 1
        (tier,) = json.loads(capsys.readouterr().out)["tiers"][1:]
        assert str(tmp_path) in tier["note"]


def test_an_open_breaker_has_the_reason(tmp_path: Path) -> None:
    """A Redis that is away is opened, and fails when it is asked."""
    url = "redis://127.0.0.1:1/0"
    shared = {"type": "redis", "name": "shared", "url": url, "required": False, "breaker_failures": 1}
    with open_stack(stack_of(shared, blocks=16, metrics={"listen": "127.0.0.1:0", "token": TOKEN})) as stack:

        def note(**headers: str) -> str:
            status = json.loads(fetch(url_of(address(stack)), "/status", headers=headers))
            return str(status["tiers"][1]["note"])

        assert note() == ""
        stack.contains(HASHES)
        wait_until(lambda: "127.0.0.1:1 cannot be reached" in note(Authorization=f"Bearer {TOKEN}"))
        assert note() == ""


def test_a_tier_that_was_away_at_the_start_is_taken_out_and_put_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_stack(away(tmp_path)) as stack:
        assert main(["drain", address(stack), "disk"]) == 0
        assert "disk is out" in capsys.readouterr().out
        assert manager_of(stack).removals.notes(with_errors=True) == {"disk": "an operator has taken it out"}
        (tmp_path / "kv").unlink()
        assert main(["attach", address(stack), "disk"]) == 0
        assert manager_of(stack).removals.notes(with_errors=True) == {}
        assert stack.put(HASHES, np.ones((4, 4096), np.uint8)) == 4
