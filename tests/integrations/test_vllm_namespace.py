"""Engines that differ in what shapes a block share nothing, and what does not shape it changes nothing.

The rows are those of the table in vllm.md: every name in its last column is an engine of the program beside this.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.pages import names_in
from tests.support.vllm_programs import VERSIONS, our_spec, running

pytestmark = [pytest.mark.slow, pytest.mark.full]

PROGRAM = Path(__file__).with_name("vllm_namespace_program.py")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md"

Engines = dict[str, dict[str, str]]


COUNTS = names_in(PAGE, "What shapes the bytes")
SAME = names_in(PAGE, "What changes nothing")


@pytest.fixture(scope="module", params=VERSIONS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    directory = tmp_path_factory.mktemp("vllm") / "namespaces"
    with running(request.param, PROGRAM, str(directory)) as program:
        return {line.pop("engine"): line for line in program.messages()}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("face", ["spec", "tier"])
def test_engines_that_differ_in_it_share_nothing(name: str, face: str, engines: Engines) -> None:
    engine = engines[name]
    if name.startswith("refused: "):
        assert "refusal" in engine
    else:
        assert engine[face] != engines[engine["beside"]][face]


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("face", ["spec", "tier"])
def test_what_does_not_shape_a_block_changes_nothing(name: str, face: str, engines: Engines) -> None:
    assert engines[f"same: {name}"][face] == engines[engines[f"same: {name}"]["beside"]][face]


def test_every_engine_of_the_program_has_its_row(engines: Engines) -> None:
    rows = {*COUNTS, *(f"same: {name}" for name in SAME)}
    assert rows == {name for name in engines if not name.startswith("first")}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adapters", 'extra: {adapters: "1"}'),
        ("weights without a file", "name them by `revision`"),
        ("a hub without a commit", "name them by `revision`"),
        ("weights from elsewhere", "name them by `revision`"),
        ("weights that are replaced", "name the run by `revision`"),
        ("a name that is taken", "namespace.extra: vLLM tells 'weights'"),
        ("another connector", '"kv_connector": "TieredKVConnector"'),
    ],
)
def test_what_vllm_does_not_tell_is_asked_for(name: str, says: str, engines: Engines) -> None:
    assert says in engines[f"refused: {name}"]["refusal"]


@pytest.mark.full
def test_scheduler_and_worker_are_of_one_namespace(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    options = {"mode": "namespaces", "threads": 1, "kv_transfer_config": our_spec(1 << 20, [nvme])}
    program = PROGRAM.with_name("vllm_engine_program.py")
    with running("0.32.0", program, str(tmp_path / "model"), json.dumps(options)) as engine:
        (result,) = engine.messages()
    assert [namespace for _, namespace in result["workers"]] == [result["scheduler"]]
