"""Engines that differ in what shapes a block share nothing, and what does not shape it changes nothing.

The cases are those of `namespaces.toml`. Transformers needs no engine, and has a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from tests.support.engines import LMCACHE, SGLANG, printed_by
from tests.support.namespaces import ENGINES, FIRST, Cell, cases, cells_of_the_page, rows


def test_the_page_has_a_row_for_each_thing_and_no_other() -> None:
    cells = list(cells_of_the_page())
    for section in ("counts", "same"):
        proved_elsewhere = {cell.row for cell in cells if cell.words.endswith("¹")}
        shown = {cell.row for cell in cells if cell.section == section}
        assert rows(section).keys() <= shown
        assert shown - rows(section).keys() <= proved_elsewhere


@pytest.mark.parametrize("engine", ENGINES)
def test_the_page_says_of_each_thing_what_its_cases_prove(engine: str) -> None:
    assert [(cell, doubt) for cell in cells_of_the_page() if cell.engine == engine and (doubt := _doubt(cell))] == []


def _doubt(cell: Cell) -> str:
    """Return what a cell says without a case that proves it, or ""."""
    found = rows(cell.section).get(cell.row, {}).get(cell.engine, {})
    if not cell.words or cell.words.endswith("¹"):
        return "it has cases" if found else ""
    if cell.section == "same":
        return "" if found and cell.words.startswith("no") else "nothing proves it"
    if cell.words.startswith("**you**"):
        found = found or {"revision": cases(cell.engine, "counts")["revision"]}
    if not found or cell.words.startswith("no"):
        return "nothing proves it"
    says_refused = any(word in cell.words for word in ("refused", "no start"))
    is_refused = any("refused" in case for case in found.values())
    return "" if says_refused or not is_refused else "a case is refused"


class Engines(NamedTuple):
    """An engine's name, and what its program printed of each case."""

    name: str
    printed: Mapping[str, Mapping[str, Any]]

    def shares(self, name: str) -> set[bool]:
        """Return whether a case's blocks are those of the case beside it."""
        case = {**cases(self.name, "counts"), **cases(self.name, "same")}[name]
        engine, beside = self.printed[name], self.printed[case.get("beside", FIRST)]
        if "found" in engine:
            return set(engine["found"])
        return {engine[face] == beside[face] for face in ("spec", "tier", "namespace") if face in engine}


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(version, marks=pytest.mark.full) for version in ("0.32.0", "0.33.0")), SGLANG, LMCACHE],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    directory = tmp_path_factory.mktemp("namespaces") / "engines"
    directory.mkdir()
    name, program, *arguments = {
        SGLANG: ("sglang", "sglang_namespace_program.py"),
        LMCACHE: ("lmcache", "lmcache_adapter_program.py", "namespaces"),
    }.get(request.param, ("vllm", "vllm_namespace_program.py"))
    messages = printed_by(request.param, program, str(directory), *arguments)
    return Engines(name, {message["engine"]: message for message in messages if "engine" in message})


@pytest.mark.slow
def test_engines_that_differ_in_a_row_share_nothing_or_are_refused(engines: Engines) -> None:
    wrong = {}
    for name, case in cases(engines.name, "counts").items():
        refusal = engines.printed[name].get("refusal", "")
        if "refused" in case:
            is_right = bool(refusal) and case["refused"] in refusal
        else:
            is_right = not refusal and engines.shares(name) == {False}
        if not is_right:
            wrong[name] = engines.printed[name]
    assert wrong == {}


@pytest.mark.slow
def test_what_does_not_shape_a_block_changes_nothing(engines: Engines) -> None:
    assert [name for name in cases(engines.name, "same") if engines.shares(name) != {True}] == []
