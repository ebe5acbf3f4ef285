"""The operator's verbs take the stack of an engine, whose file has neither `block` nor the whole namespace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.command import Command
from tiered_kv.stack.open import open_engine_stack, open_stack

BLOCK_BYTES = 4096
ROOT = Path(__file__).parents[2]
PAGES = ("vllm", "transformers")


def tiers_of(folder: Path) -> list[dict[str, object]]:
    return [
        {"type": "nvme", "path": str(folder / "nvme"), "capacity": "64MiB"},
        {"type": "fs", "path": str(folder / "fs"), "capacity": "64MiB"},
    ]


def engine_file(folder: Path, *tiers: Mapping[str, object], **top: object) -> str:
    """Write a file as engines take it."""
    file = folder / "engine.yaml"
    file.write_text(yaml.safe_dump({"primary": {"capacity": "1MiB"}, "secondary": list(tiers), **top}))
    return str(file)


def completed(*tiers: Mapping[str, object], model: str = "llama", **top: Any) -> dict[str, Any]:
    """Return the stack as an engine completes it."""
    namespace = {"model": model, "dtype": "bfloat16", "layers": 3, "groups": ["full"], "extra": {"vllm": "1"}}
    block = {"bytes": BLOCK_BYTES, "tokens": 32}
    capacity = {"capacity": 256 * BLOCK_BYTES}
    return {"namespace": namespace, "block": block, "primary": capacity, "secondary": list(tiers), **top}


def run_engine(*tiers: Mapping[str, object], model: str = "llama") -> str:
    """Store three blocks as an engine; return the digest of its namespace."""
    with open_stack(completed(*tiers, model=model)) as stack:
        stack.put([bytes([number]) * 32 for number in range(3)], np.ones((3, BLOCK_BYTES), np.uint8), timeout=60.0)
        assert stack.flush(60.0)
        return stack.config.identity.digest.hex()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.mark.parametrize("verb", ["replay", "simulate"])
def test_a_verb_that_cannot_ask_an_engine_says_what_to_add(verb: str, tmp_path: Path, command: Command) -> None:
    file = engine_file(tmp_path, *tiers_of(tmp_path))
    error = " ".join(command.err(verb, file).split())
    assert f"{file} leaves the size of a block to the engine" in error
    block, namespace = re.findall(r"'(\w+: {.*?})'", error)
    raw = {**yaml.safe_load(Path(file).read_text()), **yaml.safe_load(block), **yaml.safe_load(namespace)}
    raw["primary"] = {"capacity": "64MiB"}
    command.out("simulate", engine_file(tmp_path, **{**raw, "secondary": []}), "--requests", "2")


@pytest.mark.parametrize("page", PAGES)
def test_every_verb_takes_the_stack_of_an_engine_s_page(page: str, tmp_path: Path, command: Command) -> None:
    text = (ROOT / f"docs/how-to/{page}.md").read_text()
    (found,) = re.findall(r"```yaml\n(# stack.yaml\n.*?)```", text, re.DOTALL)
    raw = yaml.safe_load(found)
    raw["primary"]["capacity"] = "1MiB"
    raw["secondary"] = [{**raw["secondary"][0], "path": str(tmp_path / "kv"), "capacity": "64MiB"}]
    model = raw.get("namespace", {}).get("model", "llama")
    own = run_engine(*raw["secondary"], model=model)
    file = engine_file(tmp_path, **raw)
    assert command.json("inspect", file)["namespace"] == own
    assert command.json("check", file)["ok"]
    command.out("bench", file, "--blocks", "4", "--rounds", "1")
    (tier,) = command.json("purge", file, "--yes")["tiers"]
    assert [each["namespace"] for each in tier["namespaces"]] == [own]


def test_block_and_namespace_come_from_the_storage(tmp_path: Path, command: Command) -> None:
    tiers = tiers_of(tmp_path)
    run_engine(tiers[1], model="another")
    own = run_engine(*tiers)
    file = engine_file(tmp_path, *tiers)
    shown = command.json("inspect", file, "--verify")
    assert (shown["namespace"], shown["namespace_from"], shown["ok"]) == (own, "the storage of its tiers", True)
    assert [each["own"] for each in shown["tiers"][1]["namespaces"]].count(True) == 1
    checked = command.json("check", file)
    assert (checked["ok"], checked["namespace_digest"], checked["block_bytes"]) == (True, own, BLOCK_BYTES)
    assert checked["identity"]["namespace"]["extra"] == {"vllm": "1"}
    result = command.json("bench", file, "--blocks", "8", "--rounds", "1", "--tier", "nvme")["tiers"][0]
    assert (result["block_bytes"], result["verified_blocks"]) == (BLOCK_BYTES, 8)


def test_without_a_stored_block_the_size_is_asked_for_and_nothing_is_claimed(tmp_path: Path, command: Command) -> None:
    tiers = tiers_of(tmp_path)
    file = engine_file(tmp_path, *tiers)
    for verb in (["check", file], ["bench", file]):
        assert "give --block-bytes" in command.err(*verb)
    for verb in (["check", file], ["bench", file, "--blocks", "8", "--rounds", "1"]):
        command.out(*verb, "--block-bytes", "4KiB")
    assert command.json("inspect", file)["namespace"] is None
    assert all(not tier["namespaces"] for tier in command.json("inspect", file)["tiers"])
    assert command.json("purge", file, "--yes")["ok"]
    run_engine(*tiers)


def test_an_option_that_changes_nothing_is_an_error(tmp_path: Path, command: Command) -> None:
    tier = tiers_of(tmp_path)[1]
    file, digest = engine_file(tmp_path, **completed(tier)), run_engine(tier)
    other = f"{0:032x}"
    for verb in ("check", "bench", "inspect", "purge"):
        assert "--block-bytes: expected 4KiB, since the file has 'block', found 8KiB; leave it out" in command.err(
            verb, file, "--block-bytes", "8KiB"
        )
        if verb != "purge":
            expected = f"--namespace: expected {digest}, since the file has 'block', found {other}"
            assert expected in command.err(verb, file, "--namespace", other)
    assert command.json("inspect", file, "--namespace", digest, "--block-bytes", "4KiB")["namespace"] == digest
    file = engine_file(tmp_path, tier)
    size = "--block-bytes", "4KiB"
    assert "--block-bytes: it is not with --offline" in command.err("check", file, "--offline", *size)
    for which in (["--tenant", "default"], ["--namespace", digest]):
        assert "--block-bytes: it does not narrow --tenant" in command.err("purge", file, "--yes", *which, *size)
    assert "--namespace: it needs --namespaces" in command.err("why", file, "--last", "--namespace", digest)
    assert command.json("inspect", file)["namespace"] == digest, "nothing was removed"


def test_one_of_several_namespaces_is_chosen_by_the_file_or_by_its_digest(tmp_path: Path, command: Command) -> None:
    tier = tiers_of(tmp_path)[1]
    own, other = run_engine(tier), run_engine(tier, model="another")
    file = engine_file(tmp_path, tier)
    for verb in (["check", file], ["bench", file], ["purge", file, "--yes"]):
        error = command.err(*verb)
        assert "give --namespace DIGEST" in error
        assert f"{own} (model llama, tenant default, blocks of 4KiB)" in error
    assert command.json("check", file, "--namespace", other)["namespace_digest"] == other
    file = engine_file(tmp_path, tier, namespace={"model": "llama", "extra": {"vllm": "1"}})
    assert command.json("inspect", file)["namespace"] == own
    command.json("purge", file, "--yes")
    (left,) = command.json("inspect", file)["tiers"][0]["namespaces"]
    assert left["namespace"] == other


def test_a_purge_says_which_process_to_stop(tmp_path: Path, command: Command) -> None:
    pytest.importorskip("prometheus_client")
    tier = tiers_of(tmp_path)[1]
    own = run_engine(tier)
    with open_engine_stack(completed(tier, metrics={"listen": "127.0.0.1:0"})) as stack:
        assert stack.server is not None
        listen = f"127.0.0.1:{stack.server.port}"
        file = engine_file(tmp_path, tier, metrics={"listen": listen})
        text = command.out("purge", file, "--dry-run")
        assert f"which answers at http://{listen}, has {own} open and may store again: stop it first" in text
        assert f"process {stack.server._pid}, " in command.json("purge", file, "--dry-run")["running"]
        listens = command.json("check", file, status=1)["listens"]
        assert f"cannot listen on {listen}: Address already in use" in listens[0]["error"]
