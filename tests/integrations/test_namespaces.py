"""Engines that differ in what shapes a block share nothing, and what does not shape it changes nothing.

The rows are those of the tables in vllm.md and sglang.md: every name in their last columns is an engine of a program
beside this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.pages import names_in
from tests.support.sglang_programs import run_program
from tests.support.vllm_programs import running

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
HOW_TO = HERE.parents[1] / "docs" / "how-to"
SGLANG = "sglang"

REFUSALS = {
    "vllm": {
        "adapters": '"extra": {"adapters": "1"}',
        "weights without a file": 'name them by "revision"',
        "a hub without a commit": 'name them by "revision"',
        "weights from elsewhere": 'name them by "revision"',
        "weights that are replaced": 'name the run by "revision"',
        "a name that is taken": "namespace.extra: vLLM sets 'weights'",
        "another connector": '"kv_connector": "TieredKVConnector"',
    },
    "sglang": {
        "weights without a file": 'name them by "revision" here',
        "weights from elsewhere": "load format remote",
        "adapters": '"extra": {"adapters": "1"}',
        "a name that is taken": "SGLang sets 'weights'",
    },
}


class Engines(NamedTuple):
    """What a program printed of its engines, by name, and the names in the tables of a page."""

    printed: Mapping[str, Mapping[str, Any]]
    differing: Sequence[str]
    same: Sequence[str]
    refusals: Mapping[str, str]

    def shares(self, name: str) -> set[bool]:
        """Return whether an engine's namespaces are those of the engine beside it."""
        engine = self.printed[name]
        beside = self.printed[engine["beside"]]
        return {engine[face] == beside[face] for face in ("spec", "tier", "namespace") if face in engine}


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(version, marks=pytest.mark.full) for version in ("0.32.0", "0.33.0")), SGLANG],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    directory = tmp_path_factory.mktemp("namespaces")
    if request.param == SGLANG:
        name, prefix = "sglang", ""
        messages = run_program(HERE / "sglang_namespace_program.py", directory, str(directory))
    else:
        name, prefix = "vllm", "same: "
        with running(request.param, HERE / "vllm_namespace_program.py", str(directory / "vllm")) as program:
            messages = list(program.messages())
    page = HOW_TO / f"{name}.md"
    return Engines(
        {message["engine"]: message for message in messages if "engine" in message},
        names_in(page, "What shapes the bytes"),
        [prefix + each for each in names_in(page, "What changes nothing")],
        REFUSALS[name],
    )


def test_engines_that_differ_in_a_row_share_nothing(engines: Engines) -> None:
    refused = {name for name in engines.differing if name.startswith("refused: ")}
    assert {name for name in engines.differing if "refusal" in engines.printed[name]} == refused
    assert [name for name in engines.differing if name not in refused and engines.shares(name) != {False}] == []


def test_what_does_not_shape_a_block_changes_nothing(engines: Engines) -> None:
    assert [name for name in engines.same if engines.shares(name) != {True}] == []


def test_every_engine_of_the_program_has_its_row(engines: Engines) -> None:
    compared_with = {engine["beside"] for engine in engines.printed.values()}
    assert engines.printed.keys() - compared_with - {*engines.differing, *engines.same} == set()


def test_what_an_engine_does_not_tell_is_asked_for(engines: Engines) -> None:
    for name, says in engines.refusals.items():
        assert says in engines.printed[f"refused: {name}"]["refusal"], name
