"""Errors about a file: the line of each setting, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import Command
from tiered_kv import ConfigError, load_config
from tiered_kv.workload.simulation import load_prices

STACK = """\
namespace: {model: m}
block:
  bytes: 4096
primary:
  capacity: 1MiB
secondary:
  - type: nvme
    path: /tmp/kv
    capacity: 64MiB
  - {type: memory, capacity: 1MiB}
"""


def error_of(directory: Path, text: str) -> str:
    file = directory / "stack.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    return str(raised.value).removeprefix(str(file))


@pytest.mark.parametrize(
    ("found", "written", "line", "location"),
    [
        ("bytes: 4096", "bytes: lots", 3, "block.bytes"),
        ("capacity: 64MiB", "capacity: -1", 9, "secondary.0.capacity"),
        ("    capacity: 64MiB\n", "", 7, "secondary.0.capacity"),  # the entry that lacks it
        ("path: /tmp/kv", "pth: /tmp/kv", 8, "secondary.0.pth"),
        ("type: memory", "type: memry", 10, "secondary.1.type"),
        ("type: memory", "type: nvme, path: x", 10, "secondary.1.name"),
        ("block:\n  bytes: 4096\n", "", 1, "block"),
        ("capacity: 1MiB\ns", "capacity: 4KiB\ns", 5, "primary.capacity"),
        ("capacity: 1MiB\ns", "capacity: ${NONESUCH}\ns", 5, "primary.capacity"),
        ("model: m", "model: m, 1: 2", 1, "namespace.1"),
    ],
)
def test_an_error_names_its_line(tmp_path: Path, found: str, written: str, line: int, location: str) -> None:
    text = STACK.replace(found, written, 1)
    assert text != STACK
    places = error_of(tmp_path, text)
    assert f"{line}: {location}: " in places


def test_several_errors_name_their_lines(tmp_path: Path) -> None:
    lines = error_of(tmp_path, STACK.replace("4096", "x").replace("1MiB\n", "y\n", 1)).splitlines()
    assert [line.partition(": expected")[0] for line in lines] == [
        ": 2 settings cannot be used:",
        "  line 3: block.bytes",
        "  line 5: primary.capacity",
    ]


def test_the_lines_of_prices_are_named(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("currency: EUR\ntiers:\n  cpu: {gib: 1}\n")
    with pytest.raises(ConfigError, match=r"prices\.yaml:3: tiers\.cpu\.gib: unknown key"):
        load_prices(tmp_path / "prices.yaml", ["cpu"])


def test_an_error_after_the_file_was_read_names_its_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(STACK.replace("capacity: 1MiB\n", "capacity: 1MiB\n  policy: tests.nonesuch:Policy\n", 1))
    error = Command(capsys, "replay").err(str(file))
    assert error.startswith(f"error: {file}:6: primary.policy: cannot import the policy")


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (
            'metrics: {listen: "9464"}',
            "metrics.listen: expected a text such as 127.0.0.1:9464 or [::1]:9464, found '9464'",
        ),
        ("audit_action: stopp", "expected 'report' or 'stop', found 'stopp' (did you mean 'stop'?)"),
        ("metrcs: {}", "metrcs: unknown key, with the value {} (did you mean 'metrics'?)"),
        ("events: {publish: 'localhost'}", "expected a text such as tcp://127.0.0.1:5557 or ipc:///run/kv-events"),
    ],
)
def test_an_error_says_what_to_write(tmp_path: Path, added: str, problem: str) -> None:
    assert problem in error_of(tmp_path, f"{STACK}{added}\n")


def test_a_wrong_policy_or_codec_gets_the_nearest_right_one(tmp_path: Path) -> None:
    policy = error_of(tmp_path, STACK.replace("1MiB\n", "1MiB\n  policy: ark\n", 1))
    assert policy.startswith(":6: primary.policy: expected lru, arc, density, or 'module:Class' of a policy")
    assert policy.endswith(" (did you mean 'arc'?), found 'ark'")
    codec = error_of(tmp_path, STACK.replace("type: memory", "type: memory, codec: zstandard"))
    assert codec.endswith("found 'zstandard' (did you mean 'zstd'?)")
