"""`tiered-kv size`: the stack that it prints can be checked and opened, and bad input gets one line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import Command
from tests.support.model_facts import FACTS, PAGE, write_model
from tests.support.pages import undescribed
from tests.support.stacks import stack_of
from tiered_kv import open_stack
from tiered_kv.cli.main import main
from tiered_kv.config.stack_config import load_config

LOAD = ["--users", "200", "--context", "32k", "--turn-gap", "5m"]
SMALL = ["--layers", "2", "--kv-heads", "2", "--head-size", "32"]
"""A model whose blocks have 8 KiB."""


@pytest.fixture
def size(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "size")


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "check")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "llama", FACTS["Llama 3.1 8B"]))


def printed_stack(text: str) -> str:
    return text.partition("A stack that fits:\n\n")[2].partition("\nCheck it")[0]


# The stack.


@pytest.mark.parametrize("whole", [[], ["--whole"]])
def test_the_printed_stack_opens_and_stores(whole: list[str], tmp_path: Path, size: Command, check: Command) -> None:
    file, path = tmp_path / "stack.yaml", tmp_path / "a # path: with 'marks'"
    load = ["--users", "100", "--context", "4k", "--turn-gap", "1m", "--prefill", "5000", "--path", str(path)]
    text = size.out(*SMALL, *load, *whole, "--write", str(file))
    assert printed_stack(text) == file.read_text()
    words = re.search(r"tiered-kv check (.*)", text)
    assert words is not None
    found = check.json(*words[1].split())
    assert found["ok"], found
    assert [tier["name"] for tier in found["tiers"]] == ["cpu", "nvme"]
    assert found["block_bytes"] == 2 * 2 * 2 * 32 * 2 * 16
    assert path.is_dir()


@pytest.mark.parametrize("name", FACTS)
def test_a_stack_for_each_known_model_can_be_read(name: str, tmp_path: Path, size: Command, check: Command) -> None:
    file = tmp_path / "stack.yaml"
    model = str(write_model(tmp_path / name.replace("/", "-"), FACTS[name]))
    found = size.json(model, *LOAD, "--whole", "--write", str(file))
    config = load_config(str(file))
    assert (config.block.bytes, config.block.tokens) == (found["block_bytes"], found["block_tokens"])
    assert config.namespace.model == name
    assert check.json(str(file), "--offline")["ok"]
    assert yaml.safe_load(found["yaml"]) == yaml.safe_load(file.read_text())


def test_every_number_of_the_stack_has_a_reason(llama: str, size: Command) -> None:
    lines = printed_stack(size.out(llama, *LOAD, "--memory", "6GiB", status=1)).splitlines()
    assert lines[0] == "# For llama: 200 users, prompts of 32,768 tokens, one every 5min."
    numbers = [line for line in lines[1:] if re.search(r": .*\d", line)]
    assert len(numbers) == 4
    assert all("  # " in line for line in numbers)
    assert any("load_budget: 3GiB" in line for line in numbers)


def test_users_whose_prompts_fit_into_memory_need_no_disk(llama: str, size: Command) -> None:
    found = size.json(llama, *LOAD, "--memory", "900GiB")
    assert found["disk"] is None
    assert found["stack"] == {"primary": {"capacity": "900GiB"}}
    assert found["rates"]["disk_load_bytes_per_s"] == 0
    assert size.json(llama, *LOAD, "--memory", "900GiB", "--disk", "2TiB")["disk"]["prompts"] >= 200


def test_a_file_that_is_there_is_not_written_over(llama: str, tmp_path: Path, size: Command) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text("mine")
    assert "File exists" in size.err(llama, *LOAD, "--write", str(file))
    assert file.read_text() == "mine"


def test_the_commands_of_the_page_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "Llama-3.1-8B-Instruct", FACTS["Llama 3.1 8B"])
    monkeypatch.chdir(tmp_path)
    shells = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(shells).replace("\\\n", " ").splitlines()
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) == 0, line
    assert capsys.readouterr().out.endswith("tiered-kv check stack.yaml --block-bytes 2MiB\n")
    assert main(["check", "stack.yaml", "--offline"]) == 0


# What it says.


def test_the_bytes_of_a_model_are_shown_without_a_load(llama: str, size: Command) -> None:
    text = size.out(llama)
    assert "llama: 32 x full attention, 8 KV heads of 128" in text
    assert re.search(r"bfloat16 +1 +128KiB +128KiB +- +- +2MiB \(16 tokens\)", text)
    assert re.search(r"fp8 +8 +64KiB +8KiB +- +- +1MiB \(16 tokens\)", text)
    one = size.out(llama, "--kv-dtype", "fp8", "--tensor-parallel", "2", "--block-tokens", "64")
    assert re.findall(r"fp8 +(\d) .*\((\d+) tokens\)", one) == [("2", "64")]
    assert "bfloat16" not in one


def test_ranks_that_cannot_share_the_heads_are_left_out_of_the_table(tmp_path: Path, size: Command) -> None:
    phi = str(write_model(tmp_path / "phi", FACTS["Phi-4"]))
    assert re.findall(r"bfloat16 +(\d)", size.out(phi)) == ["1", "2"]
    assert "4 ranks cannot share 10 KV heads" in size.err(phi, "--tensor-parallel", "4")


def test_windows_and_states_are_named(tmp_path: Path, size: Command) -> None:
    gemma = str(write_model(tmp_path / "gemma", FACTS["Gemma 3 27B"]))
    jamba = str(write_model(tmp_path / "jamba", FACTS["Jamba v0.1"]))
    assert "52 x sliding window of 1,024 tokens, 16 KV heads of 128" in size.out(gemma)
    assert "whole blocks, the last window" in size.out(gemma, *LOAD)
    assert "28 x recurrent state (Mamba)" in size.out(jamba)
    assert "whole blocks, a state" in size.out(jamba, *LOAD)


def test_a_model_by_its_numbers_is_that_model(llama: str, size: Command) -> None:
    numbers = ["--layers", "32", "--kv-heads", "8", "--head-size", "128"]
    ours, theirs = size.json(*numbers, *LOAD), size.json(llama, *LOAD)
    assert {**ours, "model": "", "yaml": ""} == {**theirs, "model": "", "yaml": ""}
    hybrid = size.json(*numbers, "--window-layers", "32", "--window", "4k", "--state-layers", "4", "--state", "1MiB")
    assert (hybrid["window_token_bytes"], hybrid["state_bytes"]) == (ours["token_bytes"], 4 << 20)
    assert size.json("--layers", "61", "--latent-size", "576")["token_bytes"] == 61 * 576 * 2


def test_the_break_even_needs_a_prefill_rate(llama: str, size: Command) -> None:
    assert re.search(r"break-even of a disk +0.13 GB/s +for each 1,000 tokens/s", size.out(llama, *LOAD))
    text = size.out(llama, *LOAD, "--prefill", "20000/s", "--disk-rate", "5GB/s")
    assert re.search(r"break-even of a disk +2.62 GB/s +a disk that reads more beats computing", text)
    assert re.search(r"this disk +1.91 x", text)


def test_a_running_engine_says_what_a_prompt_costs(llama: str, size: Command) -> None:
    with open_stack(stack_of(metrics={"listen": "127.0.0.1:0"}, prefill={"tokens_per_s": 2000})) as stack:
        assert stack.server is not None
        found = size.json(llama, *LOAD, "--prefill", f"http://127.0.0.1:{stack.server.port}/metrics", status=1)
    assert found["rates"]["prefill_tokens_per_s"] == pytest.approx(2000)
    assert found["problems"], "so slow an engine has no time for what is new"
    with open_stack(stack_of(metrics={"listen": "127.0.0.1:0"})) as stack:
        assert stack.server is not None
        assert "has not measured" in size.err(llama, *LOAD, "--prefill", f"127.0.0.1:{stack.server.port}")
    assert "give a number of tokens a second" in size.err(llama, *LOAD, "--prefill", "127.0.0.1:1")


def test_the_reference_describes_every_field(llama: str, size: Command) -> None:
    found = size.json(llama, *LOAD, "--disk", "1TiB", "--prefill", "20000")
    nested = [*found["layers"], *(found[name] for name in ("memory", "disk", "rates"))]
    names = {*found, *(name for each in nested for name in each)}
    assert undescribed(names, "reference/command.md", "size") == set()


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a model's folder, its config.json, or --layers"),
        (["meta-llama/Llama-3.1-8B-Instruct"], "there is no such folder or file"),
        (["MODEL", "--layers", "32"], "give MODEL, or its numbers, not both"),
        (["--kv-heads", "8", "--head-size", "128"], "expected --layers"),
        (["--layers", "32"], "expected --kv-heads and --head-size, or --latent-size"),
        (["--layers", "32", "--kv-heads", "8"], "--kv-heads needs --head-size"),
        (["--layers", "32", "--latent-size", "576", "--kv-heads", "8", "--head-size", "128"], "--latent-size is for"),
        (["--layers", "99999", "--kv-heads", "8", "--head-size", "128"], "at most 10,000"),
        ([*SMALL, "--tensor-parallel", "3"], "3 ranks cannot share 2 KV heads"),
        ([*SMALL, "--window", "4k"], "--window needs --window-layers"),
        ([*SMALL, "--users", "200"], "--users needs --context"),
        (["--layers", "32", "--latent-size", "576", "--tensor-parallel", "9" * 400], "expected at most 1,024"),
        ([*SMALL, "--users", "9" * 400, "--context", "32k", "--turn-gap", "5m"], "expected at most 1,073,741,824"),
        (["--latent-size", "576", "--state-layers", "2", "--state", "1MiB"], "expected --layers"),
        (["--kv-heads", "8", "--head-size", "128", "--state-layers", "2", "--state", "1MiB"], "expected --layers"),
        (["--window-layers", "2", "--window", "4k"], "expected --kv-heads and --head-size"),
        ([*SMALL, "--users", "200", "--context", "8", "--turn-gap", "5m"], "8 tokens has no whole block"),
        ([*SMALL, "--memory", "4GiB"], "--memory needs a load"),
        ([*SMALL, "--whole"], "--whole needs a load"),
        ([*SMALL, *LOAD, "--memory", "4KiB"], "expected room for at least 2 blocks"),
        ([*SMALL, *LOAD, "--prefill", "fast"], "expected tokens a second, such as 20000"),
        ([*SMALL, *LOAD, "--prefill", "0"], "expected tokens a second, such as 20000"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], message: str, llama: str, size: Command) -> None:
    error = size.err(*(llama if each == "MODEL" else each for each in arguments))
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", [["--context", "32kk"], ["--context", "-1"], ["--hit-rate", "nan"], ["--users", "0"], ["--turn-gap", "0"]]
)
def test_a_wrong_value_of_an_option_is_named(
    wrong: list[str], capsys: pytest.CaptureFixture[str], size: Command
) -> None:
    with pytest.raises(SystemExit):
        size.out(*SMALL, *LOAD, *wrong)
    assert f"argument {wrong[0]}: expected" in capsys.readouterr().err


def test_an_error_is_an_object_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", str(tmp_path), "--json"]) == 2
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert "has no config.json" in answer["error"]
