"""The s3 tier on moto's server: sharing, limits that are kept together, TLS, and secrets that stay secret."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tiered_kv.base import OffloadKey
from tiered_kv.counters import count_of
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.testing.redis_servers import TlsFiles, make_tls_files
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.s3_servers import S3Server, missing_for_moto, moto_bucket, moto_server, start_moto
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.sweeper import Sweeper

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3 import tier as tier_module
from tiered_kv_s3.tier import S3Tier

__all__ = ["moto_bucket", "moto_server"]

pytestmark = pytest.mark.slow

BLOCK_BYTES = 4096
RECORD_BYTES = HEADER_BYTES + BLOCK_BYTES
SECRETS = ("PLANTED-KEY-ID", "planted-secret-key", "planted-session-token")

WAIT_S = 60.0
PATIENCE = {"job_timeout": WAIT_S, "request_timeout": WAIT_S, "lookup_timeout": WAIT_S}
"""So much that a slow machine makes no answer of a tier another."""

MakeRig = Callable[..., TierRig]


@pytest.fixture
def make_rig(moto_server: S3Server, moto_bucket: str) -> Iterator[MakeRig]:
    rigs: list[TierRig] = []

    def make(spec: TierSpec | None = None, **changes: object) -> TierRig:
        entry = moto_server.settings(moto_bucket, connections=4, **PATIENCE)
        settings = S3Settings.model_validate({**entry, **changes})
        rigs.append(
            TierRig(
                lambda spec, view: S3Tier(spec, view, "s3", settings),
                num_blocks=1024,
                block_bytes=BLOCK_BYTES,
                wait_s=2 * WAIT_S,
                spec=spec,
            )
        )
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def stored_bytes(server: S3Server, bucket: str) -> int:
    client = server.client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    total = sum(entry["Size"] for page in pages for entry in page.get("Contents", ()) if "/blocks/" in entry["Key"])
    client.close()
    return int(total)


def names_in(client: Any, bucket: str) -> list[str]:
    return [str(entry["Key"]) for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


# -- sharing ---------------------------------------------------------------------------------------

OTHER_PROCESS = """
import json, sys
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.tier import S3Tier

settings = S3Settings.model_validate(json.loads(sys.argv[1]))
rig = TierRig(lambda spec, view: S3Tier(spec, view, "s3", settings), num_blocks=64, block_bytes=4096, wait_s=120.0)
theirs = rig.load(make_keys(8, "parent")) == set(make_keys(8, "parent"))
print(json.dumps([theirs, rig.store(make_keys(8, "child")).success]))
rig.close()
"""


def test_two_processes_load_each_other_s_blocks(moto_server: S3Server, moto_bucket: str, make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.store(make_keys(8, "parent")).success
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, json.dumps(moto_server.settings(moto_bucket, **PATIENCE))],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert json.loads(done.stdout) == [True, True]
    theirs = make_keys(8, "child")
    assert all(rig.lookup(key) for key in theirs)
    assert rig.load(theirs) == set(theirs)


def test_namespaces_share_a_bucket_and_no_block(make_rig: MakeRig) -> None:
    rig = make_rig()
    other = make_rig(replace(rig.spec, namespace_digest=b"another space, 2"))
    keys = make_keys(4)
    rig.store(keys)
    assert not any(other.lookup(key) for key in keys)
    assert other.load(keys) == set()


def test_the_namespace_is_readable_beside_the_blocks(
    moto_server: S3Server, moto_bucket: str, make_rig: MakeRig
) -> None:
    rig = make_rig(prefix="prod/kv")
    rig.store(make_keys(1))
    client = moto_server.client()
    name = f"prod/kv/{rig.spec.namespace_digest.hex()}/namespace.json"

    assert name in names_in(client, moto_bucket)
    assert all(found.startswith("prod/kv/") for found in names_in(client, moto_bucket))
    assert json.loads(client.get_object(Bucket=moto_bucket, Key=name)["Body"].read())["namespace"] == {
        "model": "conformance"
    }
    client.close()


def test_after_a_reset_others_keep_their_epoch_and_newcomers_take_the_new_one(make_rig: MakeRig) -> None:
    first, second = make_rig(), make_rig()
    keys = make_keys(4)
    first.store(keys)
    assert second.load(keys) == set(keys)
    first.tier.reset_cache()
    assert first.load(keys) == set()
    assert second.load(keys) == set(keys), "it was not told to forget"
    assert first.store(make_keys(2, "new")).success
    third = make_rig()
    assert third.load(keys) == set()
    assert third.load(make_keys(2, "new")) == set(make_keys(2, "new"))


def test_a_reset_holds_if_the_tier_is_shut_down_at_once(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_SHUTDOWN_S", WAIT_S)  # half of it is the time that writing the epoch has
    rig = make_rig()
    keys = make_keys(4)
    rig.store(keys)
    rig.tier.reset_cache()
    rig.reopen()
    assert rig.load(keys) == set()


# -- requests --------------------------------------------------------------------------------------


def heads(rig: TierRig) -> int:
    return count_of(rig.tier.stats(), "requests_total", "head")


def ask(rig: TierRig, keys: list[OffloadKey]) -> list[bool]:
    """Look up all keys for a new request, as one batch."""
    request = rig.new_request()
    wait_until(lambda: None not in rig.tier.lookup_many(keys, request), "no answer")
    return [bool(answer) for answer in rig.tier.lookup_many(keys, request)]


def wait_for_runner(rig: TierRig) -> None:
    """Return once nobody looks for further keys: who does may take the first few of a batch that is being asked."""
    assert isinstance(rig.tier, S3Tier)
    ticket = rig.tier._probe_ticket
    assert ticket is not None
    wait_until(lambda: ticket.ended_blocks, "it looks for keys for ever")


def test_a_prompt_of_a_thousand_blocks_takes_48_requests_and_repeated_it_takes_none(make_rig: MakeRig) -> None:
    keys = make_keys(1000)
    make_rig().store(keys[:300])
    rig = make_rig(presence_ttl=3600)
    ask(rig, make_keys(1, "warm"))
    wait_for_runner(rig)
    before = heads(rig)
    assert ask(rig, keys) == [True] * 300 + [False] * 700
    assert heads(rig) <= before + 2 * 48, "twice, where the first keys were looked up before the others had come"
    before = heads(rig)
    assert ask(rig, keys[:300]) == [True] * 300
    assert heads(rig) <= before + 48


def test_the_prompts_of_two_requests_are_searched_each_by_itself(make_rig: MakeRig) -> None:
    prompts = [make_keys(100, "one"), make_keys(100, "two")]
    rig = make_rig(presence_ttl=0)
    rig.store([*prompts[0][:60], *prompts[1][:30]])
    requests = [rig.new_request() for _ in prompts]

    def are_answered() -> bool:
        answers = [rig.tier.lookup_many(keys, request) for keys, request in zip(prompts, requests, strict=True)]
        return not any(None in each for each in answers)

    wait_until(are_answered, "no answer")
    assert [
        rig.tier.lookup_many(keys, request).count(True) for keys, request in zip(prompts, requests, strict=True)
    ] == [
        60,
        30,
    ]


def test_few_lookups_take_a_head_each_and_an_own_store_needs_none(make_rig: MakeRig) -> None:
    make_rig().store(make_keys(3))
    rig = make_rig(presence_ttl=3600)
    assert ask(rig, make_keys(5)) == [True] * 3 + [False] * 2
    assert heads(rig) == 5
    rig.store(make_keys(5))
    assert count_of(rig.tier.stats(), "requests_total", "put") >= 2
    assert rig.tier.stats()["present_blocks_total"] == 3
    assert ask(rig, make_keys(5)) == [True] * 5
    assert heads(rig) == 5


# -- limits ----------------------------------------------------------------------------------------


def test_a_sweep_returns_to_the_capacity_that_was_exceeded_meanwhile(
    moto_server: S3Server, moto_bucket: str, make_rig: MakeRig
) -> None:
    make_rig().store(make_keys(30, "there at start"))
    capacity = 20 * RECORD_BYTES
    rigs = [make_rig(capacity=capacity, sweep_interval=0.3) for _ in range(2)]
    for number, rig in enumerate(rigs):
        assert rig.store(make_keys(12, f"from {number}")).success
    wait_until(lambda: stored_bytes(moto_server, moto_bucket) == capacity, "the oldest were not deleted")
    wait_until(lambda: rigs[0].tier.stats()["used_bytes"] == capacity, "it was not counted")


def test_a_block_that_is_renewed_stays_what_it_is(moto_server: S3Server, moto_bucket: str, make_rig: MakeRig) -> None:
    rig = make_rig(ttl=3600, storage_class="ONEZONE_IA")
    keys = make_keys(1)
    rig.store(keys)
    client = moto_server.client()
    name = next(each for each in names_in(client, moto_bucket) if "/blocks/" in each)
    before = client.head_object(Bucket=moto_bucket, Key=name)
    assert isinstance(rig.tier, S3Tier)
    rig.tier._control.renew(name)
    after = client.head_object(Bucket=moto_bucket, Key=name)
    client.close()
    assert (after["StorageClass"], after["ETag"]) == ("ONEZONE_IA", before["ETag"])
    assert rig.load(keys) == set(keys)


def test_a_capacity_below_one_record_is_refused(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError, match="do not hold one record of 4224 bytes"):
        make_rig(capacity=RECORD_BYTES - 1)


def test_blocks_past_their_time_are_misses_and_are_deleted(
    moto_server: S3Server, moto_bucket: str, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(4)
    with monkeypatch.context() as patch:
        patch.setattr(Sweeper, "sweep", lambda *_: None)  # the first would delete them if it came a second late
        rig = make_rig(ttl=1, presence_ttl=0, sweep_interval=300)
        rig.store(keys)
        wait_until(lambda: not any(rig.lookup(key) for key in keys), "they are still there")
        assert rig.load(keys) == set()
        assert rig.tier.stats()["expired_blocks_total"] == 4
    sweeping = make_rig(ttl=1, sweep_interval=0.2)
    sweeping.store(make_keys(1, "another"))
    wait_until(lambda: stored_bytes(moto_server, moto_bucket) == 0, "they were not deleted")


# -- what an operator sees -------------------------------------------------------------------------


def test_objects_get_the_storage_class_and_encryption_that_were_asked_for(
    moto_server: S3Server, moto_bucket: str, make_rig: MakeRig
) -> None:
    rig = make_rig(
        storage_class="ONEZONE_IA", server_encryption="aws:kms", kms_key_id="alias/kv", sign_payload=True, codec="raw"
    )
    assert rig.store(make_keys(1)).success
    client = moto_server.client()
    (entry,) = client.list_objects_v2(Bucket=moto_bucket, Prefix=f"tiered-kv/{rig.spec.namespace_digest.hex()}/b")[
        "Contents"
    ]
    head = client.head_object(Bucket=moto_bucket, Key=entry["Key"])
    client.close()
    assert (head["StorageClass"], head["ServerSideEncryption"]) == ("ONEZONE_IA", "aws:kms")
    assert head["SSEKMSKeyId"].endswith("alias/kv")


def test_a_bucket_that_is_not_there_is_described_as_such(make_rig: MakeRig) -> None:
    rig = make_rig(bucket="no-such-bucket")
    with pytest.raises(TierUnavailableError, match="no_bucket"):
        rig.tier.describe()
    (result,) = rig.wait([rig.submit_store(make_keys(1))])
    assert result.reason == "no_bucket"


def test_no_secret_is_shown_anywhere(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key_id, secret, token = SECRETS
    planted = {"access_key_id": key_id, "secret_access_key": secret, "session_token": token}
    shown: list[object] = []
    for changes in ({}, {"bucket": "no-such-bucket"}, {"endpoint_url": "http://127.0.0.1:1", "attempts": 1}):
        settings = S3Settings.model_validate({"bucket": "bucket", **planted})
        rig = make_rig(**{**planted, **changes})
        shown += [settings, repr(settings), settings.public_dict(), rig.tier, vars(rig.tier)]
        shown += rig.wait([rig.submit_store(make_keys(2)), rig.submit_load(make_keys(2))])
        shown += [rig.lookup(make_keys(1)[0]), rig.tier.stats()]
        try:
            shown.append(rig.tier.describe())
        except TierUnavailableError as error:
            shown += [error, repr(error), error.__cause__, vars(error)]
    with pytest.raises(ValidationError) as refused:
        S3Settings.model_validate({"bucket": "b", "session_token": token, "endpoint_url": f"http://{secret}@h"})
    shown += [refused.value, Path("/proc/self/cmdline").read_text()]
    text = "\n".join(f"{item!s} {item!r}" for item in shown) + caplog.text
    found = [planted_secret for planted_secret in SECRETS if planted_secret in text]
    assert found == []


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> TlsFiles:
    """A certificate of our own for 127.0.0.1, its key, and its authority's certificate."""
    return make_tls_files(tmp_path)


def test_a_server_with_tls_is_used_if_its_authority_is_trusted_and_refused_if_not(
    certificate: TlsFiles, make_rig: MakeRig
) -> None:
    if missing := missing_for_moto():
        pytest.skip(missing)
    authority = str(certificate.ca)
    server = start_moto((certificate.cert, certificate.key))
    try:
        client = server.client(verify=authority)
        client.create_bucket(Bucket="tls-bucket")
        client.close()
        rig = make_rig(endpoint_url=server.url, bucket="tls-bucket", ca_file=authority)
        keys = make_keys(20)
        assert rig.store(keys).success
        assert all(rig.lookup(key) for key in keys)
        assert rig.load(keys) == set(keys)
        wary = make_rig(endpoint_url=server.url, bucket="tls-bucket", attempts=1)
        (result,) = wary.wait([wary.submit_store(make_keys(1, "other"))])
        assert not result.success
        with pytest.raises(TierUnavailableError, match="untrusted"):
            wary.tier.describe()
    finally:
        server.stop()


def test_a_file_of_authorities_that_is_missing_is_refused(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        make_rig(endpoint_url="https://127.0.0.1:1", ca_file="/nowhere/ca.pem")


# -- a server that hangs ---------------------------------------------------------------------------


def test_while_the_server_is_frozen_nothing_waits_and_afterwards_it_is_used_again(make_rig: MakeRig) -> None:
    if missing := missing_for_moto():
        pytest.skip(missing)
    server = start_moto()
    try:
        # Who waited for more than a job's deadline or a lookup's time-out would wait for longer than the rig does.
        changes = server.settings(server.make_bucket(), presence_ttl=0, lookup_timeout=1.0, job_timeout=5 * WAIT_S)
        rig = make_rig(**changes, request_timeout=5 * WAIT_S)
        keys = make_keys(30)
        assert rig.store(keys).success
        server.process.send_signal(signal.SIGSTOP)
        late = time.monotonic() + 1.0
        jobs = [rig.submit_load(keys, deadline=late), rig.submit_store(make_keys(30, "frozen"), deadline=late)]
        assert not any(rig.lookup(key) for key in keys[:2])
        assert not any(ask(rig, keys))
        assert not any(result.success for result in rig.wait(jobs))
        server.process.send_signal(signal.SIGCONT)
        wait_until(lambda: rig.load(keys) == set(keys), "it was not used again")
        wait_until(lambda: all(ask(rig, keys)), "lookups did not recover")
        rig.tier.shutdown()
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.stop()
