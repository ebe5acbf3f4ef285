"""The page of guarantees has the figures of every proof that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.figures import PROOFS, Figures, main

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "guarantees.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| +([\d,-]+) \| +([\d,-]+) \|", re.MULTILINE)


def test_the_page_has_a_figure_for_every_proof() -> None:
    rows = {name: (of, tried, passed) for name, of, tried, passed in ROW.findall(PAGE.read_text())}
    assert set(rows) == set(PROOFS)
    for name, (of, tried, passed) in rows.items():
        assert of == PROOFS[name].promise
        assert tried == passed != "-", f"{name} did not pass, or was not run"


def test_figures_add_up_and_can_be_written_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, other = Figures(), Figures()
    assert not figures
    figures.add("soak", 1, 1, "seed 1")
    figures.add("soak", 2, 1, "seed 2")
    other.add("simulation", 1000, 1000)
    other.add("simulation", 500, 500, "of another run")
    with pytest.raises(KeyError):
        figures.add("nonesuch", 1, 1)
    paths = [tmp_path / "table.json", tmp_path / "other.json"]
    figures.write(paths[0])
    other.write(paths[1])
    assert main([str(paths[1])]) == 0
    assert "| `soak` | limits | - | - | seconds; not run |" in capsys.readouterr().out
    assert main(list(map(str, paths))) == 1, "a soak is broken"
    printed = capsys.readouterr().out
    assert "| `soak` | limits | 3 | 2 | seconds; seed 1; seed 2 |" in printed
    assert "| `simulation` | wrong bytes | 1,500 | 1,500 | seeds; of another run |" in printed
