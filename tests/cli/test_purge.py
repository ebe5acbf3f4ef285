"""`tiered-kv purge`: what it asks, says and refuses; what it removes is proved in `trust/test_security_purge.py`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.command import Command
from tests.support.faulty import FourMethodTier
from tests.support.stacks import plugged, stack_file, stack_of
from tiered_kv.cli.main import main
from tiered_kv.config.hooks import TierType
from tiered_kv.config.namespace import Namespace
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import open_stack
from tiered_kv.toolkit.administration import Purged, StoredNamespace, Survey, TierAdministration, matching_description

IDENTITY = Namespace(model="test").identify(block_bytes=4096, block_tokens=16)
OWN = IDENTITY.digest.hex()
OTHER = "ab" * 16


class DirectoryLedger(TierAdministration):
    """Stores two namespaces, one of the stack and one of an unknown tenant."""

    purged: ClassVar[list[str]]
    left: tuple[str, ...] = ()
    error: Exception | None = None
    opened = 0

    def __init__(self, settings: TierSettings) -> None:
        type(self).opened += 1

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        found = [StoredNamespace(OWN, IDENTITY.described, 3, 4096), StoredNamespace(OTHER)]
        return Survey(tuple(each for each in found if only in (None, each.digest)))

    def purge(self, digest: str, deadline: float) -> Purged:
        if self.error is not None:
            raise self.error
        self.purged.append(digest)
        return Purged(3, 4096, self.left, ("a note",))

    def close(self) -> None:
        type(self).opened -= 1


@pytest.fixture(autouse=True)
def ledger() -> Iterator[type[DirectoryLedger]]:
    """The storage of tiers of the type "kept"."""

    class Mine(DirectoryLedger):
        purged: ClassVar[list[str]] = []

    with plugged(
        TierType("kept", TierSettings, lambda: FourMethodTier, "", lambda: Mine),
        TierType("closed", TierSettings, lambda: FourMethodTier),
    ):
        yield Mine
    assert Mine.opened == 0


@pytest.fixture
def stack(tmp_path: Path) -> str:
    return stack_file(tmp_path, "type: kept")


@pytest.fixture
def purge(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "purge")


@pytest.mark.parametrize(
    ("options", "purged"), [(["--yes"], [OWN]), (["--yes", "--namespace", OTHER], [OTHER]), (["--dry-run"], [])]
)
def test_the_chosen_namespace_is_purged_and_by_default_the_stack_s_own(
    stack: str, ledger: type[DirectoryLedger], purge: Command, options: list[str], purged: list[str]
) -> None:
    out = purge.out(stack, *options)
    assert ledger.purged == purged
    assert (OTHER if OTHER in options else OWN) in out
    assert ("a note" in out) is bool(purged)


def test_what_was_said_before_a_purge_is_not_said_again_and_processes_are_to_be_stopped_first(
    tmp_path: Path, purge: Command
) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with open_stack(stack_of(nvme, block_bytes=4096) | {"namespace": {"model": "test"}}) as opened:
        assert opened.put([b"a", b"b"], bytes(2 * 4096)) == 2
        assert opened.flush()
    file = stack_file(tmp_path, f"type: nvme, path: {tmp_path}/kv, capacity: 64MiB", "type: kept")
    shown = purge.out(file, "--yes", "--namespace", opened.config.identity.digest.hex())
    assert shown.count("nvme: looked at") == 1
    assert shown.count("processes that have this open may store again: stop them first") == 1
    assert len(re.findall(r"nvme +[0-9a-f]{32} +default +2 ", shown)) == 2, "all that were stored were removed"


def test_a_tenant_s_namespaces_are_purged_and_those_of_unknown_tenants_reported(
    stack: str, ledger: type[DirectoryLedger], purge: Command
) -> None:
    report = purge.json(stack, "--yes", "--tenant", "default", status=1)
    assert ledger.purged == [OWN]
    assert report["of"] == "tenant 'default'"
    (tier,) = report["tiers"]
    assert (tier["unknown"], tier["ok"], tier["namespaces"][0]["purged"]) == ([OTHER], False, True)


@pytest.mark.parametrize("digest", ["", "ab", "../../../etc", "AB" * 16, "ab" * 16 + "\n", "*" * 32])
def test_an_invalid_digest_is_refused(stack: str, digest: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["purge", stack, "--yes", "--namespace", digest])
    assert "expected 32 hexadecimal digits" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "status", "says"),
    [
        (Terminal("yes\n"), 0, "Remove 1 stored namespace for good?"),
        (Terminal("y\n"), 2, "nothing was removed"),
        (Terminal(""), 2, "nothing was removed"),
        (io.StringIO("yes\n"), 2, "give --yes"),
    ],
)
def test_without_yes_a_user_at_a_terminal_is_asked(
    stack: str,
    ledger: type[DirectoryLedger],
    terminal: io.StringIO,
    status: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["purge", stack]) == status
    assert len(ledger.purged) == (status == 0)
    assert says in capsys.readouterr().err


def test_a_tier_that_cannot_be_purged_is_reported_and_the_others_are_purged(
    tmp_path: Path, ledger: type[DirectoryLedger], purge: Command
) -> None:
    stack = stack_file(tmp_path, "type: closed", "type: memory, capacity: 64KiB", "type: kept")
    tiers = purge.json(stack, "--yes", status=1)["tiers"]
    assert tiers[0]["error"] == "tiers of type 'closed' cannot be purged by this command"
    assert "cannot be purged" in tiers[1]["error"]
    assert tiers[2]["ok"]
    assert ledger.purged == [OWN]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_file_that_is_left_is_reported_whatever_bytes_its_name_has(
    stack: str, ledger: type[DirectoryLedger], encoding: str
) -> None:
    ledger.left = (os.fsdecode(b"caf\xe9"),)
    output = io.BytesIO()
    with io.TextIOWrapper(output, encoding) as out, contextlib.redirect_stdout(out):
        assert main(["purge", stack, "--yes"]) == 1
        out.flush()
        assert rb"kept: LEFT of %s: caf\udce9" % OWN.encode() in output.getvalue()


@pytest.mark.parametrize("error", [RuntimeError("broken"), ConfigError("broken")])
def test_an_exception_of_an_administration_is_the_tier_s_error(
    stack: str, ledger: type[DirectoryLedger], purge: Command, error: Exception
) -> None:
    ledger.error = error
    assert "broken" in purge.out(stack, "--yes", status=1)
    (found,) = purge.json(stack, "--yes", status=1)["tiers"][0]["namespaces"]
    assert (found["blocks"], found["size_bytes"], found["purged"]) == (None, None, False), "it may still be stored"


def test_a_readable_form_counts_only_if_it_has_the_digest() -> None:
    assert matching_description(IDENTITY.described, OWN) == IDENTITY.described
    others: list[object] = [{**IDENTITY.described, "format": 2}, {}, [], None, "default", {1: {2}}]
    others.append({"namespace": {"tenant": "default"}})
    for other in others:
        assert matching_description(other, OWN) == {}
