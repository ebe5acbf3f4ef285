"""Inputs that are almost right, for everything that reads bytes from outside: it takes them or says why not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.support import fuzzing
from tests.support.figures import Figures, Profile
from tests.support.fuzzing import Target, inputs

pytestmark = [pytest.mark.trust, pytest.mark.slow]

SHORT_INPUTS = {"segment": 250, "answers": 600}
FULL_INPUTS = {"segment": 5000}
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


FOUND = [
    ("answers", b"HTTP/1.1 403 F\r\ndate: Thu, 02 Jan 2147502025 03:04:05 GMT\r\ncontent-length: 0\r\n\r\n"),
    ("answers", b"HTTP/1.1 200 F\r\ncontent-length: 113\r\n\r\n<ListBucketResult><Key>k</Key><Size>0</Size>"
     b"<LastModified>0001-01-01T00:00:00</LastModified></ListBucketResult>"),
    ("segment", b"\x08" + b"[" * 100_000),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data"), FOUND, ids=[f"{name}-{number}" for number, (name, _) in enumerate(FOUND)])
def test_what_once_broke_a_promise_does_not_any_more(name: str, data: bytes) -> None:
    target_of(name).run(data)
