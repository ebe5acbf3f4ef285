"""`tiered-kv purge`: what it asks, says and refuses; what it removes is proved in `trust/test_security_purge.py`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.stacks import plugged
from tiered_kv.cli import main
from tiered_kv.config.namespace import Namespace
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError
from tiered_kv.hooks import TierType
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.tiering.administration import Purged, StoredNamespace, Survey, TierAdministration, believed

ALICE = Namespace(model="m", tenant="alice").identify(block_bytes=4096, block_tokens=16)
OTHER = "ab" * 16


class Ledger(TierAdministration):
    """Stores two namespaces, one of alice's and one of nobody knows whose."""

    purged: ClassVar[list[str]]
    left: tuple[str, ...] = ()
    error: Exception | None = None
    open_ones = 0

    def __init__(self, settings: TierSettings) -> None:
        type(self).open_ones += 1

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        found = [StoredNamespace(ALICE.digest.hex(), ALICE.described, 3, 4096), StoredNamespace(OTHER)]
        return Survey(tuple(each for each in found if only in (None, each.digest)))

    def purge(self, digest: str, deadline: float) -> Purged:
        if self.error is not None:
            raise self.error
        self.purged.append(digest)
        return Purged(3, 4096, self.left, ("a note",))

    def close(self) -> None:
        type(self).open_ones -= 1


@pytest.fixture(autouse=True)
def ledger() -> Iterator[type[Ledger]]:
    """What tiers of the type "kept" have stored."""

    class Mine(Ledger):
        purged: ClassVar[list[str]] = []

    with plugged(
        TierType("kept", TierSettings, lambda: FourMethodTier, "", lambda: Mine),
        TierType("closed", TierSettings, lambda: FourMethodTier),
    ):
        yield Mine
    assert Mine.open_ones == 0


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    return write(tmp_path, "kept")


def write(folder: Path, *types: str) -> Path:
    file = folder / "stack.yaml"
    tiers = ", ".join(f"{{type: {each}}}" for each in types)
    file.write_text(
        f"namespace: {{model: m, tenant: alice}}\nblock: {{bytes: 4096}}\nprimary: {{capacity: 64KiB}}\n"
        f"secondary: [{tiers}]\n"
    )
    return file


def test_without_a_choice_the_stack_s_own_namespace_is_purged(
    stack: Path, ledger: type[Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["purge", str(stack), "--yes"]) == 0
    assert ledger.purged == [ALICE.digest.hex()]
    out = capsys.readouterr().out
    assert "a note" in out
    assert "alice" in out


def test_a_tenant_s_namespaces_are_found_and_those_that_may_be_its_are_told(
    stack: Path, ledger: type[Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["purge", str(stack), "--yes", "--json", "--tenant", "alice"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert ledger.purged == [ALICE.digest.hex()]
    assert report["of"] == "tenant 'alice'"
    (tier,) = report["tiers"]
    assert (tier["unknown"], tier["ok"], tier["namespaces"][0]["purged"]) == ([OTHER], False, True)


def test_a_namespace_may_be_named_by_its_digest(stack: Path, ledger: type[Ledger]) -> None:
    assert main(["purge", str(stack), "--yes", "--namespace", OTHER]) == 0
    assert ledger.purged == [OTHER]


@pytest.mark.parametrize("digest", ["", "ab", "../../../etc", "AB" * 16, "ab" * 16 + "\n", "*" * 32])
def test_a_digest_that_is_none_is_refused(stack: Path, digest: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["purge", str(stack), "--yes", "--namespace", digest])
    assert "expected 32 hexadecimal digits" in capsys.readouterr().err


def test_a_dry_run_removes_nothing(stack: Path, ledger: type[Ledger], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["purge", str(stack), "--dry-run"]) == 0
    assert ledger.purged == []
    assert ALICE.digest.hex() in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "status"), [("yes\n", 0), ("y\n", 2), ("", 2), ("no\n", 2)])
def test_at_a_terminal_somebody_is_asked(
    stack: Path,
    ledger: type[Ledger],
    answer: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert main(["purge", str(stack)]) == status
    assert len(ledger.purged) == (status == 0)
    assert "Remove 1 stored namespaces for good?" in capsys.readouterr().err


def test_without_a_terminal_nothing_is_removed_unasked(
    stack: Path, ledger: type[Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["purge", str(stack)]) == 2
    assert ledger.purged == []
    assert "give --yes" in capsys.readouterr().err


def test_a_tier_that_cannot_be_purged_is_told_and_the_others_are_purged(
    tmp_path: Path, ledger: type[Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["purge", str(write(tmp_path, "closed", "memory, capacity: 64KiB", "kept")), "--yes", "--json"]) == 1
    tiers = json.loads(capsys.readouterr().out)["tiers"]
    assert tiers[0]["error"] == "tiers of type 'closed' cannot be purged by this command"
    assert "cannot be purged" in tiers[1]["error"]
    assert tiers[2]["ok"]
    assert ledger.purged == [ALICE.digest.hex()]


def test_what_is_left_is_told_and_the_status_says_so(
    stack: Path, ledger: type[Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.left = ("3 blocks",)
    assert main(["purge", str(stack), "--yes"]) == 1
    assert f"kept: LEFT of {ALICE.digest.hex()}: 3 blocks" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_name_of_a_file_that_is_left_may_be_any_bytes(stack: Path, ledger: type[Ledger], encoding: str) -> None:
    ledger.left = (os.fsdecode(b"caf\xe9"),)
    told = io.BytesIO()
    with io.TextIOWrapper(told, encoding) as out, contextlib.redirect_stdout(out):
        assert main(["purge", str(stack), "--yes"]) == 1
        out.flush()
        assert rb"caf\udce9" in told.getvalue()


@pytest.mark.parametrize("error", [RuntimeError("broken"), ConfigError("broken"), OSError(5, "broken")])
def test_whatever_an_administration_raises_is_the_tier_s_error(
    stack: Path, ledger: type[Ledger], error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.error = error
    assert main(["purge", str(stack), "--yes"]) == 1
    assert "broken" in capsys.readouterr().out
    assert main(["purge", str(stack), "--yes", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["tiers"][0]["namespaces"]
    assert (found["blocks"], found["size_bytes"], found["purged"]) == (None, None, False), "it does not say it is gone"


def test_a_readable_form_is_believed_only_if_its_digest_bears_it_out() -> None:
    assert believed(ALICE.described, ALICE.digest.hex()) == ALICE.described
    others: list[object] = [{**ALICE.described, "format": 2}, {}, [], None, "alice", {1: {2}}]
    others.append({"namespace": {"tenant": "alice"}})
    for other in others:
        assert believed(other, ALICE.digest.hex()) == {}
