"""Engines that differ in what shapes a page share nothing, and what does not shape it changes nothing.

The rows are those of the table in sglang.md: every name in its last column is an engine of the program beside this.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import names_in
from tests.support.sglang_programs import run_program
from tests.support.vllm_programs import Message

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("sglang_namespace_program.py")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sglang.md"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Message]:
    directory = tmp_path_factory.mktemp("sglang")
    told = run_program(PROGRAM, directory, str(directory))
    return {engine["engine"]: engine for engine in told if "engine" in engine}


def test_engines_that_differ_in_it_share_nothing(engines: dict[str, Message]) -> None:
    names = names_in(PAGE, "What shapes the bytes")
    refused = {name for name in names if name.startswith("refused: ")}
    assert {name for name in names if "refusal" in engines[name]} == refused
    told = {name: engines[name]["namespace"] for name in names if name not in refused}
    beside = {name: engines[engines[name]["beside"]]["namespace"] for name in told}
    assert [name for name in told if told[name] == beside[name]] == []


def test_what_does_not_shape_a_page_changes_nothing(engines: dict[str, Message]) -> None:
    names = names_in(PAGE, "What changes nothing")
    beside = {name: engines[engines[name]["beside"]]["namespace"] for name in names}
    assert {name: engines[name]["namespace"] for name in names} == beside


def test_every_engine_of_the_program_stands_in_the_tables(engines: dict[str, Message]) -> None:
    named = {*names_in(PAGE, "What shapes the bytes"), *names_in(PAGE, "What changes nothing")}
    besides = {engine["beside"] for engine in engines.values()}
    assert set(engines) - besides - named == set()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("weights without a file", 'name them by "revision" here'),
        ("weights from elsewhere", "load format remote"),
        ("adapters", '"extra": {"adapters": "1"}'),
        ("a name that is taken", "SGLang tells 'weights'"),
    ],
)
def test_what_sglang_does_not_tell_is_asked_for(name: str, says: str, engines: dict[str, Message]) -> None:
    assert says in engines[f"refused: {name}"]["refusal"]
