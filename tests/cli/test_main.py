"""The command: what each verb prints, and with which status it ends."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ConfigDict, Field

from tests.support.command import Command
from tests.support.disk_use import occupied_bytes
from tests.support.faulty import FourMethodTier
from tests.support.pages import undescribed
from tests.support.stacks import Register, plugged, stack_file
from tiered_kv import __version__
from tiered_kv.cli import output
from tiered_kv.cli.main import main
from tiered_kv.config.hooks import PluginState, TierType, tier_plugins
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.policies import RowTable
from tiered_kv.cpu.policies.recency import LRUPolicy
from tiered_kv.tiering.base import JobMetadata

ROOT = Path(__file__).parents[2]
SMALL_CHATS = ["--chats", "20", "--turns", "4", "--active-chats", "10", "--turn-blocks", "3"]
COMMAND = [sys.executable, "-c", "from tiered_kv.cli.main import main; raise SystemExit(main())"]


class FlippingTier(FourMethodTier):
    """Stores every block with its last byte flipped."""

    def submit_store(self, job_metadata: JobMetadata) -> None:
        super().submit_store(job_metadata)
        for key in job_metadata.keys:
            self.blocks[key] = self.blocks[key][:-1] + bytes([self.blocks[key][-1] ^ 1])


class FailingPolicy(LRUPolicy):
    def __init__(self, table: RowTable) -> None:
        raise RuntimeError(f"cannot order {table.num_blocks} blocks")


class FailingDescriptionTier(FourMethodTier):
    def describe(self) -> dict[str, object]:
        raise RuntimeError("no words")


class FailingShutdownTier(FourMethodTier):
    def shutdown(self) -> None:
        raise RuntimeError("no end")


class SecretDescriptionTier(FourMethodTier):
    def describe(self) -> dict[str, object]:
        return {"servers": ["redis://user:hunter2@host"], "nodes": {"a": "redis://:hunter2@host"}, "count": 2}


def nvme(directory: Path, name: str = "nvme") -> str:
    return f"type: nvme, name: {name}, path: {directory}, capacity: 64MiB"


MEMORY = "type: memory, capacity: 64MiB"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_check_shows_what_every_tier_can_do(tmp_path: Path, command: Command) -> None:
    stack = stack_file(tmp_path, nvme(tmp_path / "cache"))
    text = command.out("check", stack)
    assert "direct_io" in text
    assert "capacity: 64MiB" in text
    result = command.json("check", stack)
    assert result["ok"]
    assert [tier["name"] for tier in result["tiers"]] == ["cpu", "nvme"]
    assert result["tiers"][0]["details"]["blocks"] == 256
    assert result["tiers"][1]["details"]["free_bytes"] > 0
    assert len(result["namespace_digest"]) == 32


def test_check_shows_the_other_tiers_where_one_cannot_be_opened(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("not a directory")
    tiers = [
        nvme(tmp_path / "file", "bad"),
        "type: 'tests.cli.test_main:FailingDescriptionTier', name: failing",
        nvme(tmp_path / "cache", "good"),
    ]
    stack = stack_file(tmp_path, *tiers, capacity="1MiB, policy: 'tests.cli.test_main:FailingPolicy'")
    result = command.json("check", stack, status=1)
    assert not result["ok"]
    opens = [("cpu", False), ("bad", False), ("failing", False), ("good", True)]
    assert [(tier["name"], tier["ok"]) for tier in result["tiers"]] == opens
    cpu, bad, failing, _ = (tier["error"] for tier in result["tiers"])
    assert cpu.endswith("cannot be made for 256 blocks: RuntimeError: cannot order 256 blocks")
    assert "file" in bad
    assert failing == "RuntimeError: no words"
    assert "FAILED" in command.out("check", stack, status=1)


def test_a_tier_that_does_not_shut_down_costs_no_answer(
    tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    stack = stack_file(tmp_path, "type: 'tests.cli.test_main:FailingShutdownTier'")
    assert command.json("check", stack)["ok"]
    assert "failed to shut down: RuntimeError: no end" in caplog.text


def test_check_shows_no_password_of_a_tier_s_description(tmp_path: Path, command: Command) -> None:
    stack = stack_file(tmp_path, "type: 'tests.cli.test_main:SecretDescriptionTier'")
    shown = command.json("check", stack)["tiers"][1]["details"]
    assert shown == {"servers": ["redis://***@host"], "nodes": "{'a': 'redis://***@host'}", "count": 2}
    assert "hunter2" not in command.out("check", stack)


def test_check_finds_two_tiers_that_exclude_each_other(tmp_path: Path, command: Command) -> None:
    stack = stack_file(tmp_path, nvme(tmp_path / "cache", "one"), nvme(tmp_path / "cache", "two"))
    assert [tier["ok"] for tier in command.json("check", stack, status=1)["tiers"]] == [True, True, False]


@pytest.mark.parametrize("verb", ["check", "replay", "bench"])
def test_a_bad_file_is_one_clear_line(tmp_path: Path, command: Command, verb: str) -> None:
    stack = stack_file(tmp_path, "type: nvme, path: x, capacity: 64MiB, colour: red")
    error = command.err(verb, stack)
    assert error.startswith("error: ")
    assert "colour" in error
    assert "Traceback" not in error
    assert "Traceback" in command.err(verb, stack, "--debug")


def test_replay_counts_hits_by_tier_and_finds_no_corrupt_block(tmp_path: Path, command: Command) -> None:
    stack = stack_file(tmp_path, nvme(tmp_path / "cache"), capacity="400KiB")
    first = command.json("replay", stack, *SMALL_CHATS)
    assert set(first["step_us"]) == {"p50", "p99", "max"}
    assert first["spent_s"].keys() == {"bytes", "manager", "waiting"}
    assert 0 < sum(first["spent_s"].values()) <= first["seconds"] + 0.002
    assert {"blocks", "misses", "hit_rate", "stored_blocks", "skipped_stores", "seconds"} <= set(first)
    assert set(first["hits"]) == {"cpu", "nvme"}
    assert first["hits"]["cpu"] > 0
    assert first["verified_blocks"] == sum(first["hits"].values())
    assert first["corrupt_blocks"] == 0
    assert first["requests"] == 80
    second = command.json("replay", stack, "--requests", "10", *SMALL_CHATS)
    assert second["requests"] == 10
    assert second["first_request_hits"] > 0
    assert second["hits"]["nvme"] > 0
    dead = "type: redis, url: 'redis://127.0.0.1:1'"
    text = command.out("replay", stack_file(tmp_path, nvme(tmp_path / "new"), dead), *SMALL_CHATS)
    assert {"cpu", "nvme", "misses"} <= set(text.split())
    assert "compared byte by byte: all are right." in text
    assert "limits them" in text, "rates stand beside what limited them"
    assert re.search(r"redis +failed to store +unavailable +[\d,]+ +\w", text)
    assert not re.search(r"_total|[a-z]_[a-z]", text.replace(str(tmp_path), "")), "counters are for --json"


@pytest.mark.parametrize("verb", ["replay", "simulate"])
def test_fewer_requests_than_were_asked_for_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(output, "LINE_EVERY_S", math.inf)  # lines of progress, on a busy machine
    run = [verb, stack_file(tmp_path, MEMORY), "--requests", "30", "--json"]
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 16, "hash_ids": [1]}\n' * 3)
    for options, note in (
        (["--chats", "10", "--turns", "2"], "10 chats of 2 turns are 20 requests, fewer than --requests 30; --chats"),
        (["--trace", str(trace)], "the trace has 3 requests, fewer than --requests 30"),
    ):
        assert main([*run, *options]) == 0
        shown = capsys.readouterr()
        assert shown.err.startswith(f"note: {note}")
        json.loads(shown.out)
    assert main([*run, "--chats", "10", "--turns", "3"]) == 0
    assert capsys.readouterr().err == ""


def test_the_command_alone_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(list(arguments))
        return capsys.readouterr().out

    assert main([]) == 2
    assert capsys.readouterr().err == shown("--help") == shown("help")
    assert "replay" in shown("help")
    assert shown("help", "replay") == shown("replay", "--help")


def test_the_help_of_serve_shows_the_socket_as_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(["serve", *arguments])
        return "".join(capsys.readouterr())

    monkeypatch.delenv("LISTEN_FDS", raising=False)
    assert "--socket PATH" in printed("--help")
    assert "[--socket" not in printed("--help")
    assert "required: --socket" in printed("stack.yaml")
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert "[--socket" in printed("--help")


def test_replay_reads_a_trace(tmp_path: Path, command: Command) -> None:
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(3 * (json.dumps(line) + "\n"))
    replay = ["replay", stack_file(tmp_path, MEMORY), "--trace", str(trace)]
    result = command.json(*replay, "--concurrency", "1")
    assert (result["requests"], result["blocks"], result["misses"]) == (3, 6, 2)
    trace.write_text(json.dumps(line) + "\n" + json.dumps(line | {"timestamp": None}) + "\n")
    assert command.err(*replay) == f"error: {trace}:2: timestamp: this key is required\n"
    assert "--active-chats is for built-in chats" in command.err(*replay, "--active-chats", "3")


def test_a_corrupt_block_ends_replay_and_bench_with_status_1(
    tmp_path: Path, command: Command, register: Register
) -> None:
    register("flipping", FlippingTier)
    stack = stack_file(tmp_path, "type: flipping", capacity="400KiB")
    assert "CORRUPT: block" in command.out("replay", stack, *SMALL_CHATS, status=1)
    bench = command.out("bench", stack, "--blocks", "64", "--rounds", "1", status=1)
    assert "CORRUPT: 64 blocks came back from flipping with other bytes" in bench


@pytest.mark.slow
def test_ctrl_c_ends_a_replay_in_good_order(tmp_path: Path, command: Command) -> None:
    cache = tmp_path / "cache"
    stack = stack_file(tmp_path, nvme(cache))
    replay = [*COMMAND, "replay", stack, "--json", "--chats", "1000000", "--active-chats", "50"]
    process = subprocess.Popen(replay, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end_s = time.monotonic() + 300
    while occupied_bytes(cache) < 16 << 20:
        assert time.monotonic() < end_s
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert err == ""
    result = json.loads(out)
    assert result["interrupted"]
    assert result["requests"] > 0
    assert result["corrupt_blocks"] == 0
    assert command.json("check", stack)["ok"]


@pytest.mark.slow
def test_the_quickstart_hits_in_cpu_and_nvme(tmp_path: Path) -> None:
    example = ROOT / "examples/quickstart.yaml"
    done = subprocess.run(
        [*COMMAND, "replay", str(example), "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["hits"]["cpu"] > 1000
    assert result["hits"]["nvme"] > 5000, "stores began after the primary tier had evicted their blocks"
    assert result["corrupt_blocks"] == 0


def test_every_field_is_described(tmp_path: Path, command: Command) -> None:
    stack = stack_file(tmp_path, MEMORY)
    fields = {*command.json("replay", stack, "--requests", "5"), *command.json("check", stack)}
    fields |= set(command.json("bench", stack, "--blocks", "8", "--rounds", "1")["tiers"][0])
    assert undescribed(fields, "reference/command.md") == set()


def test_the_quickstart_enters_the_environment_before_it_calls_the_command_by_its_name() -> None:
    text = (ROOT / "docs/tutorial/quickstart.md").read_text()
    assert -1 < text.find(". .venv/bin/activate\n") < text.find("\ntiered-kv ")


def test_the_program_in_the_quickstart_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorial/quickstart.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0].replace("examples/", f"{ROOT}/examples/")
    program += "assert (stored, len(found)) == (100, 100)\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bench_measures_every_tier(tmp_path: Path, command: Command) -> None:
    bench = ["bench", stack_file(tmp_path, nvme(tmp_path / "cache"), MEMORY), "--blocks", "100", "--batch", "16"]
    result = command.json(*bench, "--rounds", "2")
    assert [tier["name"] for tier in result["tiers"]] == ["nvme", "memory"]
    for tier in result["tiers"]:
        assert tier["type"] == tier["name"]
        assert (tier["block_bytes"], tier["batch"], tier["verified_blocks"]) == (4096, 16, 200)
        assert tier["store_gb_per_s"] > 0
        assert all(each["store_cores"] > 0 and each["load_cores"] > 0 for each in tier["rounds"])
        assert tier["load_gb_per_s"] > 0
        assert {"p50", "p99"} <= set(tier["lookup_us"])
    text = command.out(*bench, "--rounds", "2", "--tier", "memory")
    assert "memory" in text
    assert "800KiB" in text  # what it wrote
    assert re.search(r"cores busy +lookup \(p99\)", text), "what limits the rates stands beside them"
    assert re.search(r"[\d.]+ / [\d.]+ +[\d.]+[num]?s \([\d.]+[num]?s\)", text)
    assert "no secondary tier 'tape'; it has: nvme, memory" in command.err(*bench, "--tier", "tape")
    assert "no secondary tier" in command.err("bench", stack_file(tmp_path))


def test_plugins_lists_tiers_with_their_settings(command: Command) -> None:
    result = command.json("plugins")
    tiers = {tier["name"]: {setting["name"]: setting for setting in tier["settings"]} for tier in result["tiers"]}
    assert {"nvme", "memory"} <= set(tiers)
    assert tiers["nvme"]["path"]["required"]
    assert tiers["nvme"]["capacity"]["accepts"] == "size"
    assert tiers["nvme"]["job_timeout"]["accepts"] == "duration"
    assert all(setting["description"] for setting in tiers["nvme"].values())
    assert {"nvme", "memory", "arc,"} <= set(command.out("plugins").split())
    text = command.out("plugins", "nvme")
    assert "job_timeout" in text
    assert "bucket" not in text, "the settings of one type"
    assert "reclaimed_segments_total" in text
    (nvme,) = command.json("plugins", "nvme")["tiers"]
    corrupt = next(metric for metric in nvme["metrics"] if metric["name"] == "corrupt_blocks_total")
    assert (corrupt["labels"], corrupt["unit"]) == (["reason"], "blocks")
    assert corrupt["help"]
    assert [tier["name"] for tier in command.json("plugins", "nvme")["tiers"]] == ["nvme"]
    assert "there is no tier type 'nvm' (did you mean 'nvme'?)" in command.err("plugins", "nvm")


def test_a_broken_plugin_is_shown(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    state = PluginState("tape", "tiered-kv-tape 1.0", (), "ImportError: no tape")
    monkeypatch.setattr(tier_plugins(), "states", lambda: [state])
    assert "broken: plugin 'tape' of tiered-kv-tape 1.0: ImportError: no tape" in command.out("plugins", status=1)
    assert command.json("plugins", status=1)["broken"][0]["error"] == "ImportError: no tape"


class OddSettings(TierSettings):
    """As a third-party tier's may be: an alias, and a type that JSON has not."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    folder: str = Field(alias="dir", description="The directory.")
    clock: Path | re.Pattern[str] | Command | None = Field(default=None, description="For tests.")
    place: object = object()


def test_settings_of_any_form_are_shown(command: Command) -> None:
    with plugged(TierType("odd", OddSettings, lambda: FourMethodTier)):
        _check_odd_settings(command)


def _check_odd_settings(command: Command) -> None:
    shown = {each["name"]: each for each in command.json("plugins", "odd")["tiers"][0]["settings"]}
    assert shown["dir"]["description"] == "The directory."
    assert shown["place"]["accepts"] == "anything"
    assert "anything" in shown["clock"]["accepts"]
    assert {"dir", "clock"} <= set(command.out("plugins", "odd").split())
    assert "tier-odd" in command.json("schema")["$defs"]


def test_schema_is_printed_as_json(command: Command) -> None:
    assert "tier-nvme" in json.loads(command.out("schema"))["$defs"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tiered-kv {__version__}\n"


def test_a_wrong_number_of_chats_names_its_option(command: Command) -> None:
    assert command.err("simulate", "--active-chats", "0") == "error: --active-chats: expected at least 1, found 0\n"


def test_bad_usage_shows_the_usage_of_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, problem in [
        (["check", "x", "--colour"], "unknown arguments: --colour"),
        (["check"], "required: STACK"),
        (["replay", "x", "--turns", "many"], "argument --turns: invalid int value: 'many'"),
        (["replay", "x", "--request-timeout", "soon"], "expected a duration such as 250ms"),
        (["top", "--interval", "10ms"], "expected a duration from 100ms to 1d, found '10ms'"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"usage: tiered-kv {arguments[0]} ")
        assert problem in error


def test_output_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "schema"], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300
        )
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = subprocess.Popen([*COMMAND, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=300) == 2


@pytest.mark.slow
def test_output_that_was_closed_is_no_error() -> None:
    done = subprocess.run(
        [*COMMAND, "schema"], preexec_fn=lambda: os.close(1), capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
