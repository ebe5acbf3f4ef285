"""The command's verbs on stacks of gcs and azure, as their pages show them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.command import Command
from tests.support.fake_s3 import FakeS3

SETTINGS = ("--blocks", "8", "--rounds", "1")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def stack_file(folder: Path, cloud: FakeS3, **top: object) -> str:
    cloud.has_mark = False  # nothing is stored yet
    file = folder / "stack.yaml"
    entry = {**cloud.entry, "ttl": "7d", "job_timeout": "60s", "lookup_timeout": "60s"}
    file.write_text(yaml.safe_dump({"primary": {"capacity": "256KiB"}, "secondary": [entry], **top}))
    return str(file)


@pytest.mark.one_quick(2)
def test_an_engine_s_stack_is_checked_and_measured_and_nothing_stays(
    cloud: FakeS3, tmp_path: Path, command: Command
) -> None:
    file = stack_file(tmp_path, cloud)
    assert command.json("check", file, "--block-bytes", "4KiB")["ok"]
    (result,) = command.json("bench", file, "--block-bytes", "4KiB", *SETTINGS)["tiers"]
    assert (result["verified_blocks"], result["corrupt_blocks"], result["left"]) == (8, 0, "")
    assert not any("/blocks/" in each for each in cloud.objects)


def test_a_bench_says_that_its_blocks_are_left(cloud: FakeS3, tmp_path: Path, command: Command) -> None:
    file = stack_file(tmp_path, cloud)
    cloud.always["DELETE"] = "denied"
    shown = " ".join(command.out("bench", file, "--block-bytes", "4KiB", *SETTINGS).split())
    assert "blocks of this command are left" in shown
    cloud.always.clear()
    digest = shown.rpartition("purge --namespace ")[2]
    command.out("purge", file, "--namespace", digest, "--yes")
    assert not any("/blocks/" in each for each in cloud.objects)


@pytest.mark.one_quick(2)
def test_a_stack_is_replayed_inspected_and_purged(cloud: FakeS3, tmp_path: Path, command: Command) -> None:
    block = {"bytes": "4KiB", "tokens": 16}
    file = stack_file(tmp_path, cloud, namespace={"model": "m"}, block=block)
    chats = ("--chats", "4", "--turns", "3", "--active-chats", "2", "--turn-blocks", "4", "--requests", "12")
    assert command.json("replay", file, *chats)["corrupt_blocks"] == 0
    shown = command.json("inspect", file, "--verify")
    (found,) = shown["tiers"][0]["namespaces"]
    assert shown["ok"]
    assert found["blocks"] > 0
    (tier,) = command.json("purge", file, "--yes")["tiers"]
    assert tier["namespaces"][0]["blocks"] == found["blocks"]
    assert not any("/blocks/" in each for each in cloud.objects)
