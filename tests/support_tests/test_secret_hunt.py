"""A tier that tells its secret is found out, in each way of telling; so the tests that look for secrets can fail."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr, create_model

from tests.support.faulty import FourMethodTier
from tests.support.secret_hunt import (
    QUICK,
    STACK,
    Sheet,
    hunt_in_configuration,
    hunt_in_running_stacks,
    new_marker,
    show_running_stack,
)
from tests.support.stacks import plugged
from tiered_kv.cli.main import main
from tiered_kv.config.hooks import TierType
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import TierError
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
        if self._settings.leak == "describe":
            secret = self._told("describe")
            raise OSError(f"cannot log in at http://me:{secret}@host/ with {secret}")
        return {"server": self._told("description")}

    def stats(self) -> Mapping[str, int]:
        return {self._told("counter"): 1}

    def submit_store(self, job_metadata: JobMetadata) -> None:
        threading.current_thread().name = self._told("thread")
        if self._settings.leak == "submit_store":
            raise OSError(f"cannot log in with {self._told('submit_store')}")
        super().submit_store(job_metadata)

    def _told(self, leak: str) -> str:
        return self._settings.sauce.get_secret_value() if self._settings.leak == leak else "nothing"


LEAKS = ("log", "base64", "hex", "percent", "error", "cause", "attribute", "description", "counter", "thread")


@pytest.mark.parametrize("leak", ["", *LEAKS])
def test_a_tier_that_tells_its_secret_is_found_out_and_one_that_keeps_it_is_not_blamed(
    leak: str, tmp_path: Path
) -> None:
    settings = create_model("Settings", __base__=LeakySettings, leak=(str, leak))
    with plugged(TierType("leaky", settings, lambda: LeakyTier)):
        findings = hunt_in_running_stacks("leaky", 1, tmp_path, wait_s=60.0).findings()
    assert bool(findings) == bool(leak)
    assert all(finding.startswith("sauce, ") for finding in findings)


def test_settings_that_print_their_secret_are_found_out() -> None:
    class TalkativeSettings(TierSettings):
        sauce: SecretStr = SecretStr("")

        def __repr__(self) -> str:
            return f"TalkativeSettings(sauce={self.sauce.get_secret_value()})"

    with plugged(TierType("talkative", TalkativeSettings, lambda: FourMethodTier)):
        findings = hunt_in_configuration("talkative", QUICK, secret_only=True).findings()
    assert any("talkative.sauce" in finding for finding in findings)


def test_what_a_stranger_s_error_says_is_shown_without_the_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, stack = new_marker(), tmp_path / "stack.yaml"
    entry = {"type": "leaky", "leak": "describe", "sauce": planted}
    stack.write_text(yaml.safe_dump({**STACK, "secondary": [entry]}))
    with plugged(TierType("leaky", LeakySettings, lambda: LeakyTier)):
        assert main(["check", str(stack), "--json"]) == 1
    shown = capsys.readouterr().out
    assert "OSError: cannot log in at http://***@host/ with ***" in shown
    assert planted not in shown


def test_the_log_of_a_tier_s_exception_leaves_its_text_out(caplog: pytest.LogCaptureFixture) -> None:
    class PromptTier(LeakyTier):
        is_nonblocking = True  # so that the manager logs its exceptions

    planted = new_marker()
    sheet, entry = Sheet({"sauce": planted}), {"type": "prompt", "leak": "submit_store", "sauce": planted}
    with plugged(TierType("prompt", LeakySettings, lambda: PromptTier)):
        show_running_stack(sheet, "a failing store", {**STACK, "secondary": [entry]})
    sheet.note("the log", caplog.text)
    assert sheet.findings() == []
    assert "OSError" in caplog.text
    assert "submit_store" in caplog.text
