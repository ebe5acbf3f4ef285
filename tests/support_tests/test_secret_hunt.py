"""A tier that tells its secret is found out, in each way of telling; so the tests that look for secrets can fail."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from pydantic import SecretStr

from tests.support import secret_hunt
from tests.support.plugged import plugged
from tests.support.secret_hunt import Sheet, new_marker, show_running_stack
from tests.support.secret_plants import ENTRIES, QUICK, STACK, hunt_in_configuration, hunt_in_running_stacks
from tiered_kv.cli import main
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import TierError
from tiered_kv.hooks import TierType
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.tiering.base import JobMetadata


class LeakySettings(TierSettings):
    sauce: SecretStr = SecretStr("")
    leak: str = ""


class LeakyTier(FourMethodTier):
    """Tells its secret in the way that `leak` names."""

    def __init__(self, spec: Any, view: memoryview, tier_type: str, settings: LeakySettings) -> None:
        super().__init__(spec, view, tier_type)
        self._settings = settings
        if settings.leak == "attribute":
            self.password = settings.sauce.get_secret_value()
        log = logging.getLogger("some.library")
        log.debug("logging in with %s", self._told("log"))
        log.debug("authorization: Basic %s", base64.b64encode(b"me:" + self._told("base64").encode()).decode())
        log.debug("sent %s", self._told("hex").encode().hex())
        log.debug("asked http://host/?token=%s", "".join(f"%{byte:02X}" for byte in self._told("percent").encode()))
        if settings.leak == "error":
            raise TierError(f"cannot log in with {self._told('error')}", tier="leaky")
        if settings.leak == "cause":
            raise TierError("cannot log in", tier="leaky") from OSError(self._told("cause"))

    def describe(self) -> Mapping[str, object]:
        return {"server": self._told("description")}

    def stats(self) -> Mapping[str, int]:
        return {self._told("counter"): 1}

    def submit_store(self, job_metadata: JobMetadata) -> None:
        threading.current_thread().name = self._told("thread")
        super().submit_store(job_metadata)

    def _told(self, leak: str) -> str:
        return self._settings.sauce.get_secret_value() if self._settings.leak == leak else "nothing"


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The type of a tier that tells its secret; the thread that it renames gets its name back."""
    # It ends whatever it is given: what is waited for is its thread, which a busy machine may hold up.
    monkeypatch.setattr(secret_hunt, "_WAIT_S", 60.0)
    monkeypatch.setattr(threading.current_thread(), "name", threading.current_thread().name)
    with plugged(TierType("leaky", LeakySettings, lambda: LeakyTier)):
        yield "leaky"


LEAKS = ("log", "base64", "hex", "percent", "error", "cause", "attribute", "description", "counter", "thread")


@pytest.mark.parametrize("leak", LEAKS)
def test_a_tier_that_tells_its_secret_is_found_out(
    leaky: str, leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENTRIES, leaky, {"leak": leak})
    findings = hunt_in_running_stacks(leaky, 1, tmp_path).findings()
    assert findings
    assert all(finding.startswith("sauce, ") for finding in findings)


def test_a_tier_that_keeps_its_secret_is_not_blamed(leaky: str, tmp_path: Path) -> None:
    assert hunt_in_running_stacks(leaky, 1, tmp_path).findings() == []


def test_settings_that_print_their_secret_are_found_out() -> None:
    class TalkativeSettings(TierSettings):
        sauce: SecretStr = SecretStr("")

        def __repr__(self) -> str:
            return f"TalkativeSettings(sauce={self.sauce.get_secret_value()})"

    with plugged(TierType("talkative", TalkativeSettings, lambda: FourMethodTier)):
        findings = hunt_in_configuration("talkative", QUICK, secret_only=True).findings()
    assert any("talkative.sauce" in finding for finding in findings)


def test_what_a_stranger_s_error_says_is_shown_without_the_secret(
    leaky: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = new_marker()

    def describe(tier: LeakyTier) -> NoReturn:
        raise OSError(f"cannot log in at http://me:{planted}@host/ with {planted}")

    monkeypatch.setattr(LeakyTier, "describe", describe)
    stack = tmp_path / "stack.yaml"
    stack.write_text(yaml.safe_dump({**STACK, "secondary": [{"type": leaky, "sauce": planted}]}))
    assert main(["check", str(stack), "--json"]) == 1
    shown = capsys.readouterr().out
    assert "OSError: cannot log in at http://***@host/ with ***" in shown
    assert planted not in shown


def test_the_log_of_a_tier_s_exception_leaves_its_text_out(
    leaky: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = new_marker()

    def submit_store(tier: LeakyTier, job_metadata: JobMetadata) -> NoReturn:
        raise OSError(f"cannot log in with {planted}")

    monkeypatch.setattr(LeakyTier, "submit_store", submit_store)
    monkeypatch.setattr(LeakyTier, "is_nonblocking", True)
    sheet = Sheet({"sauce": planted})
    show_running_stack(sheet, "a failing store", {**STACK, "secondary": [{"type": leaky, "sauce": planted}]})
    sheet.note("the log", caplog.text)
    assert sheet.findings() == []
    assert "OSError" in caplog.text
    assert "submit_store" in caplog.text
