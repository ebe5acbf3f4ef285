"""The table of figures: the number of cases that each proof tried, and that kept the promise."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

T = TypeVar("T")


class Profile(Enum):
    SHORT = "short"
    """What continuous integration has time for: every kind of case, and of the many a sample."""
    FULL = "full"
    """Every case, or where thousands are alike a larger sample that the proof names; and ten minutes of load."""

    def pick(self, short: T, full: T) -> T:
        return full if self is Profile.FULL else short


class Proof(NamedTuple):
    """A row of the table: the promise of `docs/explanation/guarantees.md`, and the unit of its cases."""

    promise: str
    unit: str


WRONG_BYTES, PHANTOM, ENGINE, SECRECY = "wrong bytes", "phantoms", "engine", "secrecy"

PROOFS: Mapping[str, Proof] = {
    "crash/nvme": Proof(PHANTOM, "system calls killed at"),
    "crash/fs": Proof(PHANTOM, "system calls killed at"),
    "crash/redis": Proof(PHANTOM, "system calls killed at"),
    "crash/s3": Proof(PHANTOM, "system calls killed at"),
    "crash/host": Proof(WRONG_BYTES, "system calls killed at"),
    "copies": Proof(WRONG_BYTES, "copies killed, damaged, to full and evicting targets"),
    "kills": Proof(WRONG_BYTES, "engines, workers and servers killed or stopped"),
    "io-errors/nvme": Proof(ENGINE, "system calls that failed or came short"),
    "io-errors/fs": Proof(ENGINE, "system calls that failed or came short"),
    "resources": Proof(ENGINE, "threads, descriptors and mappings refused"),
    "full-disk": Proof(ENGINE, "tiers on a full file system"),
    "power-loss": Proof(PHANTOM, "file systems shut down"),
    "corruption/nvme": Proof(WRONG_BYTES, "damages"),
    "corruption/fs": Proof(WRONG_BYTES, "damages"),
    "corruption/redis": Proof(WRONG_BYTES, "damages"),
    "corruption/s3": Proof(WRONG_BYTES, "damages"),
    "corruption/memory": Proof(WRONG_BYTES, "damages"),
    "fuzz/record": Proof(WRONG_BYTES, "inputs"),
    "fuzz/segment": Proof(WRONG_BYTES, "inputs"),
    "fuzz/replies": Proof(WRONG_BYTES, "inputs"),
    "wire-faults": Proof(WRONG_BYTES, "kinds of fault, each at many bytes"),
    "simulation": Proof(WRONG_BYTES, "seeds"),
    "races": Proof(WRONG_BYTES, "races"),
    "interrupts": Proof(ENGINE, "interrupted calls"),
    "soak": Proof("limits", "seconds"),
    "paced-load": Proof("slower", "loads of an engine, with a stack and without"),
    "hanging-openings": Proof("waits", "calls of an opening that hang"),
    "frozen-servers": Proof("waits", "runs with all servers stopped for 30 s"),
    "security": Proof(SECRECY, "checks"),
    "encryption": Proof(SECRECY, "damages and wrong keys"),
    "upgrades": Proof("upgrades", "golden files and foreign versions"),
    "planted-defects": Proof("the proofs themselves", "defects planted, and found"),
}
"""Every row that the table has; one that no test filled is shown as not run."""


@dataclass
class Figure:
    tried: int = 0
    passed: int = 0
    note: str = ""


class Figures:
    """The counts of one run."""

    def __init__(self) -> None:
        self._figures: dict[str, Figure] = {}

    def add(self, proof: str, tried: int, passed: int, note: str = "") -> None:
        """Count cases of a proof in `PROOFS`; the table shows the note."""
        PROOFS[proof]
        figure = self._figures.setdefault(proof, Figure())
        figure.tried += tried
        figure.passed += passed
        notes = [*figure.note.split("; "), *note.split("; ")]
        figure.note = "; ".join(dict.fromkeys(each for each in notes if each))

    def __bool__(self) -> bool:
        return bool(self._figures)

    def lines(self) -> Iterable[str]:
        """Return the table; `docs/explanation/guarantees.md` shows it with other words in the last column."""
        yield "| proof | of | tried | passed | what |"
        yield "| --- | --- | ---: | ---: | --- |"
        for name, proof in PROOFS.items():
            figure = self._figures.get(name)
            tried, passed = (f"{figure.tried:,}", f"{figure.passed:,}") if figure else ("-", "-")
            what = "; ".join(filter(None, (proof.unit, figure.note if figure else "not run")))
            yield f"| `{name}` | {proof.promise} | {tried} | {passed} | {what} |"

    def rows(self) -> dict[str, dict[str, Any]]:  # Any: as `add` takes them
        """Return the figures for JSON, one object a proof."""
        return {name: asdict(figure) for name, figure in self._figures.items()}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.rows(), indent=1) + "\n")

    def add_rows(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the figures of another process or run."""
        for name, row in rows.items():
            self.add(name, **row)


FIGURES = pytest.StashKey[Figures]()
"""Where a run keeps its figures."""


def main(paths: Sequence[str]) -> int:
    """Print what `pytest --trust-table PATH` wrote, of one run or several, as one table; return 1 if one failed."""
    figures = Figures()
    for path in paths:
        figures.add_rows(json.loads(Path(path).read_text()))
    print("\n".join(figures.lines()))
    return int(any(figure.passed != figure.tried for figure in figures._figures.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
