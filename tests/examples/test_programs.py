"""Example programs print what their comments and the pages about them say."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import yaml

from tests.support.pages import commands
from tests.support.redis_servers import PATIENT, RedisServer
from tests.support.s3_servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server
from tests.support.server_process import free_port
from tiered_kv.cli.main import main
from tiered_kv.cli.output import Status
from tiered_kv.config.stack_config import load_config
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier, make_keys

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED: dict[str, list[str]] = {
    "events.py": [
        "10 blocks stored: {'CPU': 10, 'nvme': 10}",
        "40 blocks stored: {'CPU': 16, 'nvme': 40}",
        "after a reset: {}",
    ],
    "router.py": [
        "brought to memory: 2",
        "served by: {'cpu': 2}",
        "used: 2",
    ],
    "async_stack.py": [
        "summary: 0 of 3 blocks found",
        "who: 2 of 3 blocks found",
        "when: 2 of 3 blocks found",
        "where: 2 of 3 blocks found",
        "stored: 3",
    ],
    "values.py": [
        "2 of 2 computed",
        "[(1, 2), (2, 2)]",
        "1 of 3 computed",
        "[(2, 2), (3, 2), (1, 2)]",
    ],
    "why_a_miss.py": [
        "a prompt that nobody has asked before: 0 of 4 blocks; the first: cpu unknown, small unknown, picky unknown",
        "an old prompt: 0 of 4 blocks; the first: cpu evicted, small evicted, picky admission",
        "a recent prompt: 4 of 4 blocks; the first: cpu present, small stored, picky stored",
        "a recent prompt: 0 of 4 blocks; the first: cpu reset, small reset, picky reset",
        "cpu: {'hit': 4, 'miss': 12}, misses {'absent': 4, 'evicted': 4, 'reset': 4}",
        "small: {'miss': 12}, misses {'absent': 4, 'evicted': 4, 'reset': 4}",
        "picky: {'miss': 12}, misses {'absent': 4, 'reset': 4, 'admission': 4}",
    ],
    "keyed_names.py": [
        "found 0 of 4 blocks, stored 4",
        "found 4 of 4 blocks, stored 4",
        "found 0 of 4 blocks, stored 4",
        "the files contain 0 keys",
    ],
    "hints.py": [
        "a document: 4 blocks stored",
        "a secret: 0 blocks stored",
        "a summary that nobody asks for again: 4 blocks stored",
        "an agent that calls a tool: 4 blocks stored",
        "a chat: 4 blocks stored",
        "another chat: 4 blocks stored",
        "a summary that nobody asks for again: 0 blocks found",
        "a document: 4 blocks found",
        "a document: 0 blocks found",
        "4 requests with hints, 0 refused",
    ],
}


def run(example: str, directory: Path) -> tuple[str, str]:
    """Run an example in a directory; return what it printed, and its log."""
    command = [sys.executable, str(EXAMPLES / example)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.one_quick(9)
@pytest.mark.parametrize("example", PRINTED)
def test_an_example_prints_its_lines(example: str, tmp_path: Path) -> None:
    assert run(example, tmp_path)[0].splitlines() == PRINTED[example]


def test_the_example_of_metrics_shows_metrics_and_status(tmp_path: Path) -> None:
    output, log = run("metrics.py", tmp_path)
    assert f'tiered_kv_restored_tokens_total{{tier="cpu"}} {64 * 16:.1f}' in output
    assert 'tiered_kv_tier_used_bytes{tier="nvme"}' in output
    assert "cpu: 1048576 of 1048576 bytes" in output
    assert log == ""


@pytest.mark.slow
def test_the_example_of_the_audit_catches_swapped_weights_and_stops_the_tier(tmp_path: Path) -> None:
    output, log = run("audit/audit.py", tmp_path)
    first, second = output.split("a process with weights 2\n")
    assert "different" not in first
    assert "stopped 0" in first
    found = [int(line.split(":")[1].split()[0]) for line in second.splitlines() if "prompt" in line]
    assert found == [8, 8, 8, *[0] * 9], "wrong blocks are found until the audit stops their tier"
    assert "stopped 1" in second
    assert log.count("log: audit:") == 1


# The example of a wrapper keeps the contract of a tier.


class TestKeyedNames(TierConformance):
    survives_reopen: ClassVar[bool] = True

    @pytest.fixture
    def open_tier(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenTier:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        keyed_names = importlib.import_module("keyed_names").KeyedNames
        nvme = {"type": "nvme", "path": str(tmp_path), "capacity": "64MiB", "segment": "1MiB"}
        return lambda spec, view: keyed_names(spec, view, "keyed", secret="5a" * 32, inner=nvme)


# The stacks over tiers that machines share: what one stores, another that is opened later loads.


def check(name: str, **changes: object) -> None:
    """Store blocks through a stack of the example, and load them through another."""
    entries = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    entries["secondary"][0] |= {"lookup_timeout": "60s", **changes}  # so that a busy machine makes no block a miss
    keys = make_keys(6)
    blocks = np.random.default_rng(0).integers(0, 256, (6, load_config(entries).block.bytes), dtype=np.uint8)
    with open_stack(entries) as stack:
        assert stack.put(keys, blocks, timeout=60.0) == 6
        assert stack.flush(timeout=60.0)
    out = np.zeros_like(blocks)
    with open_stack(entries) as stack:
        assert stack.get(keys, out, timeout=60.0) == 6
    assert (out == blocks).all()


def test_fs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check("fs")


def test_redis(redis_server: RedisServer) -> None:
    check("redis", **PATIENT, url=redis_server.url)


@pytest.mark.slow
def test_s3(moto_server: S3Server, moto_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT", moto_server.url)
    monkeypatch.setenv("S3_BUCKET", moto_bucket)
    monkeypatch.setenv("S3_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("S3_SECRET", SECRET_ACCESS_KEY)
    check("s3")


# The commands that the pages about inspection, reports and the live view show do what the pages say.


QUICKSTART = EXAMPLES / "quickstart.yaml"


@pytest.mark.slow
@pytest.mark.usefixtures("drawing_library")
def test_the_commands_on_the_pages_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "quickstart.yaml").write_text(QUICKSTART.read_text())
    config = {**yaml.safe_load(QUICKSTART.read_text()), "metrics": {"listen": f"127.0.0.1:{free_port()}"}}
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(config))

    def run(command: str) -> str:
        capsys.readouterr()
        assert main(shlex.split(command, comments=True)[1:]) == Status.OK, command
        return capsys.readouterr().out

    replayed, measured = commands("reference/command.md")
    for command in (replayed, measured):
        run(command)
        page = Path(re.findall(r"\S+\.html", command)[0]).read_text()
        assert "<svg" in page, command
    with open_stack(str(tmp_path / "stack.yaml")) as stack:
        keys = [bytes([number]) for number in range(8)]
        assert stack.put(keys, np.ones((8, 64 << 10), np.uint8)) == 8
        assert stack.flush()
    found, verified, repaired = (run(command) for command in commands("how-to/inspect.md"))
    assert "example/quickstart" in found
    assert "checksum" in verified
    assert "checksum" in repaired
    with open_stack(str(tmp_path / "stack.yaml")):
        once, as_json = [run(each) for each in commands("how-to/monitoring.md") if "--once" in each or "--json" in each]
    assert "nvme" in once
    assert '"tiers"' in as_json
