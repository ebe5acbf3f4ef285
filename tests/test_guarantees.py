"""The page of guarantees has the figures of every proof that there is."""

from __future__ import annotations

import json
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
    figures = Figures()
    assert not figures
    figures.add("soak", 1, 1, "seed 1")
    figures.add("soak", 2, 1, "seed 2")
    figures.add("simulation", 1000, 1000)
    assert figures.broken == ["soak"]
    assert set(figures.missing) == set(PROOFS) - {"soak", "simulation"}
    with pytest.raises(KeyError):
        figures.add("nonesuch", 1, 1)
    (line,) = (line for line in figures.lines() if line.startswith("soak"))
    assert line.split() == ["soak", "limits", "3", "2", "seconds", "(seed", "1;", "seed", "2)"]
    path = tmp_path / "table.json"
    figures.write(path)
    assert json.loads(path.read_text())["soak"] == {"tried": 3, "passed": 2, "note": "seed 1; seed 2"}
    other = Figures()
    other.add("upgrades", 5, 5)
    other.add("simulation", 500, 500, "of another run")
    other_path = tmp_path / "other.json"
    other.write(other_path)
    assert main(["--markdown", str(other_path)]) == 0
    printed = capsys.readouterr().out
    assert "| `simulation` | wrong bytes | 500 | 500 | seeds; of another run |" in printed
    assert "| `races` | wrong bytes | - | - | races; not run |" in printed
    assert main([str(path), str(other_path)]) == 1, "a soak is broken"
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["simulation", "wrong", "bytes", "1,500", "1,500", "seeds", "(of", "another", "run)"] in cells
    assert ["upgrades", "upgrades", "5", "5", "golden", "files", "and", "foreign", "versions"] in cells
