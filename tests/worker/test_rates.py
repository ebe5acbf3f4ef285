"""Measuring copies: honest about what was measured, and clear where nothing can be."""

from __future__ import annotations

import json
import sys

import pytest

from tiered_kv._cli import copies
from tiered_kv.cli import main
from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.worker import rates

torch = pytest.importorskip("torch")


def test_copies_are_measured_beside_plain_ones() -> None:
    (result,) = rates.measure_copies("cpu", pages_bytes=[16 << 10], total_bytes=1 << 20, rounds=2)
    figures = result.as_json()
    assert figures["page_bytes"] == 16 << 10
    assert all(isinstance(value, float) and value > 0 for name, value in figures.items() if name != "page_bytes")
    assert figures["store_ratio"] == result.store_gb_per_s / result.plain_store_gb_per_s


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no GPU here"):
        rates.measure_copies("cuda")
    assert main(["bench", "--gpu"]) != 0
    assert "there is no GPU here" in capsys.readouterr().err


def test_a_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tiered-kv\[torch\]'"):
        rates.measure_copies("cpu")


def test_the_command_prints_a_table_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(copies, "DEFAULT_BYTES", 1 << 20)
    monkeypatch.setattr(copies, "PAGES_BYTES", [4 << 10, 16 << 10])
    assert main(["bench", "--gpu", "cpu", "--rounds", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [copy["page_bytes"] for copy in answer["copies"]] == [4 << 10, 16 << 10]
    assert main(["bench", "--gpu", "cpu", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "store GB/s" in printed
    assert "Medians of 1 round;" in printed


@pytest.mark.parametrize("arguments", [["--gpu", "cpu", "--tier", "nvme"], ["stack.yaml", "--gpu"], []])
def test_a_stack_and_a_gpu_are_measured_apart(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert "STACK" in capsys.readouterr().err
