"""The command `tiered-kv`, run in the test's process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiered_kv.cli.main import main


class Command:
    """The command, or one verb."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *verb: str) -> None:
        self._capsys = capsys
        self._verb = verb

    def out(self, *arguments: str, status: int = 0) -> str:
        """Return what it prints; it must end with this status."""
        assert main([*self._verb, *arguments]) == status
        return self._capsys.readouterr().out

    def err(self, *arguments: str) -> str:
        """Return the error of a wrong command line, which prints nothing to standard output."""
        assert main([*self._verb, *arguments]) == 2
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return captured.err

    def json(self, *arguments: str, status: int = 0) -> Any:  # Any: JSON
        return json.loads(self.out(*arguments, "--json", status=status))
