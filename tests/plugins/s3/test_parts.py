"""Parts of the s3 tier: settings, names, signatures, and the requests of lookups."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from tiered_kv.metrics.counters import Counters
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.objects.naming import Naming
from tiered_kv.toolkit.objects.presence import Presence
from tiered_kv.toolkit.objects.verdict import Verdict
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.connection import EMPTY_PAYLOAD, UNSIGNED_PAYLOAD, Credentials, Endpoint, Signer
from tiered_kv_s3.metrics import METRICS
from tiered_kv_s3.settings import S3Settings

NAMING = Naming("kv", bytes(range(16)))
FIRST_EPOCH = "0123456789abcdef"


def soon() -> float:
    return time.monotonic() + 60.0


def test_names_that_are_only_similar_are_foreign() -> None:
    block = NAMING.block(FIRST_EPOCH, make_keys(1)[0])
    own = [NAMING.namespace, NAMING.epoch, block]
    assert [name for name in own if not NAMING.owns(name)] == []
    assert [name for name in own if NAMING.is_block(name)] == [block]
    foreign = [f"{name}{more}" for name in own for more in ("x", "/x", "\n", ".bak")]
    foreign += [f"x{name}" for name in own] + [NAMING.root, NAMING.blocks, block.upper()]
    foreign.append(block.replace(block[-32:-30], "zz"))
    assert [name for name in foreign if NAMING.owns(name) or NAMING.is_block(name)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket": "a/b"},
        {"prefix": "/a"},
        {"prefix": "a//b"},
        {"prefix": "a b"},
        {"prefix": ".."},
        {"prefix": "a/./b"},
        {"endpoint_url": "localhost:9000"},
        {"endpoint_url": "http://user:password@host"},
        {"endpoint_url": "http://host:port"},
        {"access_key_id": "id"},
        {"session_token": "token"},
        {"profile": "p", "access_key_id": "i", "secret_access_key": "s"},
        {"kms_key_id": "k"},
        {"server_encryption": "ROT13"},
    ],
    ids=str,
)
def test_settings_are_strict(wrong: dict[str, object]) -> None:
    S3Settings.model_validate({"bucket": "kv-blocks"})
    with pytest.raises(ValidationError):
        S3Settings.model_validate({"bucket": "kv-blocks", **wrong})


class FakeBucket:
    """Names of objects; counts requests."""

    def __init__(self) -> None:
        self.objects: set[str] = set()
        self.rounds = 0
        self.asked: list[str] = []
        self.answers: dict[str, Verdict] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.heard_s = math.inf  # it answers others

    def head_all(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        self.rounds += 1
        self.asked += names
        verdicts = {True: Verdict.DONE, False: Verdict.ABSENT}
        answers = [self.answers.get(name) or verdicts[name in self.objects] for name in names]
        self.meanwhile()
        return answers


def presence_of(bucket: FakeBucket, answer_ttl_s: float = 60.0) -> tuple[Presence, Counters]:
    counters = Counters(METRICS)
    return Presence(cast(Bucket, bucket), counters, answer_ttl_s), counters


def names_of(label: str, count: int) -> list[str]:
    return [NAMING.block(FIRST_EPOCH, key) for key in make_keys(count, label)]


@pytest.mark.parametrize("existing", [0, 1, 15, 16, 17, 64, 499, 500, 983, 984, 998, 999, 1000])
def test_a_prompt_of_a_thousand_blocks_is_located_with_48_requests_and_three_round_trips(existing: int) -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 1000)
    bucket.objects = set(names[:existing])
    presence, _ = presence_of(bucket)
    assert presence.ask([names], soon()) == set(names[:existing])
    assert len(bucket.asked) <= 48
    assert bucket.rounds <= 3
    assert bucket.asked[0] == names[0], "the first block is always asked for"


def test_prompts_are_located_side_by_side() -> None:
    bucket = FakeBucket()
    prompts = [names_of(f"prompt {number}", 1000) for number in range(3)]
    bucket.objects = {name for number, names in enumerate(prompts) for name in names[: 300 * number]}
    assert presence_of(bucket)[0].ask(prompts, soon()) == bucket.objects
    assert bucket.rounds <= 3


def test_a_hole_counts_as_present_until_its_load_finds_it() -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 1000)
    bucket.objects = {*names[:5], *names[6:700]}
    presence, _ = presence_of(bucket)
    assert presence.ask([names], soon()) == set(names[:700])
    presence.note(names[5], Verdict.ABSENT, time.monotonic())  # as the load does
    assert names[5] not in presence.ask([names], soon())


@pytest.mark.parametrize("count", [3, 16, 40, 300])
def test_blocks_in_another_order_are_found_too(count: int) -> None:
    bucket = FakeBucket()
    names = names_of("window", count)[::-1]  # as for sliding windows: the last first
    bucket.objects = set(names[1:])
    assert presence_of(bucket)[0].ask([names], soon()) == bucket.objects


def test_a_missing_first_block_is_found_although_later_ones_are_remembered() -> None:
    names = names_of("prompt", 100)
    presence, _ = presence_of(FakeBucket())
    presence.note(names[60], Verdict.DONE, time.monotonic())
    assert names[0] not in presence.ask([names], soon())


def test_an_unanswered_block_does_not_cost_a_request_for_each_of_its_prompt() -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 1000)
    bucket.objects = set(names)
    bucket.answers[names[66]] = Verdict.SLOW_DOWN  # the second that is asked for
    presence, counters = presence_of(bucket)
    for _ in range(2):
        found = presence.ask([names], soon())
        assert [name in found for name in names[:67]] == [True] * 66 + [False]
    assert bucket.asked.count(names[66]) == 1, "it is a miss for a while"
    assert len(bucket.asked) <= 48
    assert (counters["unanswered_blocks_total"], counters["unanswered_lookups_total"]) == (1, 0)


def test_the_next_lookup_asks_for_blocks_that_there_was_no_time_for() -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 4)
    bucket.objects = set(names)
    bucket.answers = dict.fromkeys(names[2:], Verdict.UNASKED)
    presence, counters = presence_of(bucket)
    assert presence.ask([names], soon()) == set(names[:2])
    assert (counters["unanswered_blocks_total"], counters["unanswered_lookups_total"]) == (2, 0)
    bucket.answers.clear()
    assert presence.ask([names], soon()) == set(names)


def test_a_store_during_a_lookup_overrules_its_answer() -> None:
    bucket = FakeBucket()
    (name,) = names_of("block", 1)
    presence, _ = presence_of(bucket)
    bucket.meanwhile = lambda: presence.note(name, Verdict.DONE, time.monotonic())
    presence.ask([[name]], soon())
    assert presence.known(name) is Verdict.DONE


def test_answers_are_kept_for_presence_ttl() -> None:
    names = names_of("block", 10)
    for answer_ttl_s, heads in ((60.0, 10), (0.0, 20)):
        bucket = FakeBucket()
        bucket.objects = set(names[:4])
        presence, _ = presence_of(bucket, answer_ttl_s)
        for _ in range(2):
            assert presence.ask([names], soon()) == bucket.objects
        assert len(bucket.asked) == heads


def test_missing_answers_are_counted_misses_that_are_not_kept() -> None:
    bucket = FakeBucket()
    presence, counters = presence_of(bucket)
    names = names_of("block", 3)
    bucket.objects = set(names)
    bucket.answers = dict.fromkeys(names, Verdict.TIMEOUT)
    assert presence.ask([names], soon()) == set()
    assert counters["unanswered_lookups_total"] == 3
    bucket.answers.clear()
    assert presence.ask([names], soon()) == set(names)


botocore_auth = pytest.importorskip("botocore.auth", reason="boto3 is not installed")

NOW_S = 1_764_201_599.5  # half a second before a day ends
PUT_HEADERS = {
    "content-length": "1048704",
    "content-type": "application/octet-stream",
    "x-amz-storage-class": "ONEZONE_IA",
    "x-amz-server-side-encryption": "aws:kms",
    "x-amz-server-side-encryption-aws-kms-key-id": "arn:aws:kms:eu-west-1:1:key/a-b",
}


def botocore_signature(
    method: str, url: str, headers: dict[str, str], payload_hash: str, credentials: Credentials, region: str, at: float
) -> str:
    from botocore.awsrequest import AWSRequest

    frozen = SimpleNamespace(
        access_key=credentials.access_key_id,
        secret_key=credentials.secret_access_key,
        token=credentials.session_token or None,
    )
    signer = botocore_auth.S3SigV4Auth(frozen, "s3", region)
    signer.payload = lambda request: payload_hash
    request = AWSRequest(method=method, url=url, headers=headers)
    # The steps of `add_auth`, whose clock is another function in each generation of botocore.
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    request.context["timestamp"] = moment.strftime(botocore_auth.SIGV4_TIMESTAMP)
    signer._modify_request_before_signing(request)
    text = signer.string_to_sign(request, signer.canonical_request(request))
    signer._inject_signature_to_request(request, signer.signature(text, request))
    return str(request.headers["Authorization"])


@pytest.mark.parametrize("token", ["", "a-session-token=="])
@pytest.mark.parametrize(("method", "headers"), [("GET", {}), ("HEAD", {}), ("DELETE", {}), ("PUT", PUT_HEADERS)])
@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("https://bucket.s3.eu-west-1.amazonaws.com", "tiered-kv/00ff/blocks/0000/ab/abcdef"),
        ("http://127.0.0.1:9000/bucket", "it's (prod)!_~x.y/00ff/epoch"),
    ],
)
def test_signatures_equal_botocore_s(method: str, headers: dict[str, str], base: str, name: str, token: str) -> None:
    credentials = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", token)
    endpoint = Endpoint.of_url(f"{base}/x")
    payload_hash = UNSIGNED_PAYLOAD if method == "PUT" else EMPTY_PAYLOAD
    signer = Signer("eu-west-1")
    url = f"{base}{endpoint.path_of(name).removeprefix(endpoint.base_path)}"
    for at in (NOW_S, NOW_S + 1, NOW_S):  # the derived key is kept for a day, and made again for another
        signed = signer.sign(
            method, endpoint.path_of(name), {"host": endpoint.authority, **headers}, payload_hash, credentials, at
        )
        expected = botocore_signature(method, url, headers, payload_hash, credentials, "eu-west-1", at)
        assert signed["authorization"] == expected


def test_another_secret_signs_with_another_key() -> None:
    signer = Signer("us-east-1")
    one, other = (
        signer.sign("GET", "/b/k", {"host": "h"}, EMPTY_PAYLOAD, Credentials("id", secret), NOW_S)
        for secret in ("secret-1", "secret-2")
    )
    assert one["authorization"] != other["authorization"]
    assert "secret" not in repr(Credentials("id", "secret-1", "secret-token"))


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("https://b.s3.us-east-1.amazonaws.com/x", "b.s3.us-east-1.amazonaws.com", "/a/b"),
        ("https://host:8443/b/x", "host:8443", "/b/a/b"),
        ("http://host:80/b/x", "host", "/b/a/b"),
        ("http://[::1]:9000/b/x", "[::1]:9000", "/b/a/b"),
    ],
)
def test_an_endpoint_has_a_host_header_and_paths(url: str, authority: str, path: str) -> None:
    endpoint = Endpoint.of_url(url)
    assert (endpoint.authority, endpoint.path_of("a/b")) == (authority, path)
