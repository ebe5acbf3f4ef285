"""Inputs that are almost right, for everything that reads bytes from outside: it takes them or says why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.support import fuzzing
from tests.support.figures import Figures, Profile
from tests.support.fuzzing import Target, inputs
from tiered_kv.config.reading import FILE_BYTES_MAX

pytestmark = [pytest.mark.trust, pytest.mark.slow]

SHORT_INPUTS = {"segment": 250, "small-files": 250, "stack-file": 300, "answers": 600}
FULL_INPUTS = {"segment": 5000, "small-files": 5000, "stack-file": 8000}
"""Of targets that open directories or take long; the others get more."""
NEEDS = {"record": "cryptography", "replies": "redis", "answers": "boto3"}


def target_of(name: str) -> Target:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    return fuzzing.target(name)


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_the_seeds_are_taken(name: str) -> None:
    """A target that refuses what it begins with would look at nothing behind the refusal."""
    target = target_of(name)
    for seed in target.seeds:
        target.run(seed)


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_no_input_breaks_a_promise(name: str, profile: Profile, figures: Figures) -> None:
    target = target_of(name)
    sizes = FULL_INPUTS if profile is Profile.FULL else SHORT_INPUTS
    count = sizes.get(name, 20_000 if profile is Profile.FULL else 1000)
    tried = broken = 0

    @settings(max_examples=count)
    @given(inputs(target))
    def check(data: bytes) -> None:
        nonlocal tried, broken
        tried += 1
        try:
            target.run(data)
        except BaseException:
            broken += 1
            raise

    try:
        check()
    finally:
        figures.add(target.proof, tried, tried - broken, name)


LEDGER = b'\0{"total_bytes": %b, "pending_bytes": 0, "surveyed_s": 0, "holders": {}}'
FOUND = [
    ("stack-file", b"a: " + b"1:" * 400 + b"1.5"),  # a number to the base of 60 that no float holds
    ("stack-file", b"version: 0x" + b"f" * 5000),  # and one that no message could hold
    ("stack-file", b"block: {bytes: !!int 0b" + b"1" * 60_000 + b"}"),
    ("answers", b"HTTP/1.1 403 F\r\ndate: Thu, 02 Jan 2147502025 03:04:05 GMT\r\ncontent-length: 0\r\n\r\n"),
    ("answers", b"HTTP/1.1 200 F\r\ncontent-length: 113\r\n\r\n<ListBucketResult><Key>k</Key><Size>0</Size>"
     b"<LastModified>0001-01-01T00:00:00</LastModified></ListBucketResult>"),
    ("small-files", b"\0" + b"[" * 100_000),
    ("small-files", b"\0[]"),
    ("small-files", LEDGER % b'"1"'),
    ("small-files", LEDGER % b"-9"),
    ("small-files", b"\2" + b"[" * 100_000),
    ("segment", b"\x08" + b"[" * 100_000),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data"), FOUND, ids=[f"{name}-{number}" for number, (name, _) in enumerate(FOUND)])
def test_what_once_broke_a_promise_does_not_any_more(name: str, data: bytes) -> None:
    target_of(name).run(data)


@pytest.mark.full
def test_a_stack_file_of_the_greatest_size_is_read_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """A number to the base of 60 took as long as the square of its length: minutes, for a file of the greatest size."""
    path = tmp_path / "stack.yaml"
    for text in (
        "a: " + "1:" * (FILE_BYTES_MAX // 2 - 8) + "1",
        "a: 0x" + "f" * (FILE_BYTES_MAX - 8),
        "[" * FILE_BYTES_MAX,
        "\n".join(f"{number:x}a: 1" for number in range(40_000)),
    ):
        path.write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", _READ_BOUNDED, str(path)], capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr[-2000:]


_READ_BOUNDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from tiered_kv.stack_config import load_config
from tiered_kv.errors import ConfigError
try:
    load_config(sys.argv[1], environ={})
except ConfigError:
    print("refused")
"""
