"""Whatever the server does, a load gives right bytes or a miss, by the job's deadline, with a counted reason."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest

from tests.support.entries import rig_of
from tests.support.fake_azure import FakeAzure
from tests.support.fake_gcs import FakeGCS
from tests.support.fake_s3 import BLOCK_BYTES, WAIT_S, FakeS3, OpenRig, Request, error
from tests.support.fake_tokens import TOKEN, FakeTokens
from tests.support.stacks import block_hashes, stack_of
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.objects.verdict import BucketError
from tiered_kv.toolkit.record import record_bytes_max

pytest.importorskip("obstore", reason="obstore is not installed")


@pytest.mark.parametrize("fault", ["slow_down", "throttled", "error_500", "reset", "close", "garbage", "truncate"])
def test_a_passing_fault_is_retried(cloud: FakeS3, open_rig: OpenRig, fault: str) -> None:
    rig = open_rig()
    keys = make_keys(2)
    if fault != "truncate":
        cloud.faults["PUT"] += [fault]
        assert rig.store(keys).success
        cloud.faults["HEAD"] += [fault]
        assert all(rig.lookup(key) for key in keys)
    else:
        assert rig.store(keys).success
    cloud.faults["GET"] += [fault, fault]
    assert rig.load(keys) == set(keys)
    assert rig.tier.stats()["retried_requests_total"] >= 2


def test_flipped_bytes_are_read_again_and_then_deleted(cloud: FakeS3, open_rig: OpenRig) -> None:
    rig = open_rig()
    keys = make_keys(2)
    rig.store(keys)
    cloud.faults["GET"] += ["flip"]
    assert rig.load(keys) == set(keys)
    name = next(each for each in cloud.objects if "/blocks/" in each)
    data = cloud.objects[name]
    cloud.objects[name] = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    assert len(rig.load(keys)) == 1
    assert name not in cloud.objects
    assert rig.tier.stats()["corrupt_blocks_total"] == {"checksum": 1}


@pytest.mark.parametrize("change", [b"longer" * 10_000, b"short"], ids=["longer", "shorter"])
def test_an_object_of_a_wrong_length_is_a_miss_and_deleted(cloud: FakeS3, open_rig: OpenRig, change: bytes) -> None:
    rig = open_rig()
    keys = make_keys(1)
    rig.store(keys)
    name = next(each for each in cloud.objects if "/blocks/" in each)
    cloud.objects[name] = change
    assert rig.load(keys) == set()
    assert name not in cloud.objects


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("slow_down", "slow_down"),
        ("throttled", "slow_down"),
        ("error_500", "unavailable"),
        ("reset", "broken"),
        ("stall", "timeout"),
        ("denied", "denied"),
        ("no_bucket", "no_bucket"),
    ],
)
def test_a_lasting_fault_fails_the_load_with_its_reason_and_ends_with_it(
    cloud: FakeS3, open_rig: OpenRig, fault: str, reason: str
) -> None:
    (key,) = make_keys(1)
    assert open_rig().store([key]).success
    rig = open_rig(attempts=2, **({"request_timeout": 0.3} if fault == "stall" else {}))
    cloud.always["GET"] = fault
    (result,) = rig.wait([rig.submit_load([key])])
    assert (result.success, result.reason) == (False, reason)
    cloud.always.clear()
    wait_until(lambda: rig.load([key]) == {key}, what="the end of the fault")


def test_a_server_that_throttles_everything_opens_the_breaker_until_it_serves_again(cloud: FakeS3) -> None:
    keys, blocks = make_keys(4), np.ones((4, 512), np.uint8)
    others = [make_keys(1, f"prompt {number}") for number in range(4)]
    times = {"attempts": 2, "job_timeout": "60s", "lookup_timeout": "60s", "presence_ttl": 0}
    entry = {**cloud.entry, **times, "breaker_failures": 2, "breaker_cooldown": "50ms"}
    with open_stack(stack_of(entry, blocks=4, block_bytes=512)) as stack:
        assert stack.put(block_hashes(keys), blocks, timeout=WAIT_S) == 4
        assert stack.flush(WAIT_S)
        cloud.always |= dict.fromkeys(("GET", "HEAD", "PUT"), "throttled")

        def counted(*names: str) -> int:
            return count_of(stack.counters(), str(cloud.entry["type"]), *names)

        def has_opened() -> bool:
            for each in others:  # they take the rows of the blocks above
                stack.put(block_hashes(each), blocks[:1], timeout=WAIT_S)
                stack.flush(WAIT_S)
            return counted("breaker_opened_total") > 0

        wait_until(has_opened, what="the breaker's opening")
        assert counted("tier", "slow_down_answers_total") > 1
        assert set(stack.counters()[str(cloud.entry["type"])]["tier"]["failed_requests_total"]["put"]) == {"slow_down"}
        cloud.always.clear()
        wait_until(lambda: stack.get(block_hashes(keys), blocks, WAIT_S) == 4, what="its closing")


@pytest.mark.parametrize("timeout_s", [0.2, 30.0], ids=["of the request", "of the job"])
def test_a_server_that_hangs_keeps_no_job_past_its_deadline(cloud: FakeS3, open_rig: OpenRig, timeout_s: float) -> None:
    (key,) = make_keys(1)
    assert open_rig().store([key]).success
    rig = open_rig(attempts=100, job_timeout=1.0, request_timeout=timeout_s)
    cloud.always["GET"] = "stall"
    begin = time.monotonic()
    assert rig.load([key]) == set()
    assert time.monotonic() - begin < 15.0


def test_a_token_that_expires_while_its_server_is_silent_keeps_no_job_past_its_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeAzure() as server, FakeTokens(valid_s=1) as tokens:
        for name, value in tokens.environment.items():
            monkeypatch.setenv(name, value)
        entry = {name: value for name, value in server.entry.items() if name != "account_key"}
        times = {"request_timeout": 2.0, "job_timeout": 4.0, "attempts": 1, "presence_ttl": 0}
        with closing(rig_of({**entry, **times, "connections": 16}, block_bytes=4096, wait_s=60.0)) as rig:
            keys = make_keys(16)
            assert rig.store(keys).success
            assert rig.load(keys) == set(keys)
            tokens.is_silent = True
            time.sleep(1.1)  # until the token has expired
            begin = time.monotonic()
            (result,) = rig.wait([rig.submit_load(keys)])
            assert (result.success, result.reason) == (False, "timeout")
            assert time.monotonic() - begin < 15.0  # one after the other they would take 32 s
    assert "no server gave a token to the managed identity of this machine" in caplog.text
    assert TOKEN not in caplog.text


def test_a_refused_connection_is_told_apart_from_a_missing_block(
    cloud: FakeS3, open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(endpoint="http://127.0.0.1:1", attempts=1)
    assert rig.store(make_keys(1)).reason == "unavailable"
    assert "does not serve requests (Connection refused)" in caplog.text


def test_a_missing_bucket_is_told_apart_from_a_missing_block(cloud: FakeS3, open_rig: OpenRig) -> None:
    rig = open_rig(**{"container" if cloud.entry["type"] == "azure" else "bucket": "nonesuch"})
    assert rig.store(make_keys(1)).reason == "no_bucket"
    here = open_rig()
    here.store(make_keys(1))
    (result,) = here.wait([here.submit_load(make_keys(1, "absent"))])
    assert result.reason == "absent"


def test_what_a_rule_of_the_server_deletes_is_a_miss_and_is_stored_again(cloud: FakeS3, open_rig: OpenRig) -> None:
    rig = open_rig(presence_ttl="1h")
    keys = make_keys(3)
    assert rig.store(keys).success
    for name in [each for each in cloud.objects if "/blocks/" in each]:
        del cloud.objects[name]
    assert rig.load(keys) == set()
    assert not any(rig.lookup(key) for key in keys)
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_read_again_and_the_request_is_repeated(
    cloud: FakeS3, open_rig: OpenRig, status: int
) -> None:
    """As when a token is revoked in the middle."""
    rig = open_rig()
    keys = make_keys(2)
    assert rig.store(keys).success
    refused = [error(status, "AuthenticationFailed")]
    cloud.reply = lambda request: refused.pop() if refused and "/blocks/" in request.target else None
    assert rig.load(keys) == set(keys)
    assert refused == []
    cloud.reply = lambda request: error(status, "AuthenticationFailed")
    (result,) = rig.wait([rig.submit_load(keys)])
    assert result.reason == ("denied" if status == 403 else "credentials_expired")


def test_a_refusal_names_the_identity_and_no_secret(
    cloud: FakeS3, open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(attempts=1)
    cloud.reply = lambda request: error(403, "AuthorizationPermissionMismatch")
    assert rig.store(make_keys(1)).reason == "denied"
    setting = "account_key" if cloud.entry["type"] == "azure" else "access_token"
    assert f"refuses the setting '{setting}'" in caplog.text
    assert str(cloud.entry[setting]) not in caplog.text


def test_a_wrong_key_is_to_be_corrected_and_needs_no_role(
    cloud: FakeS3, open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(attempts=1)
    cloud.reply = lambda request: error(403, "AuthenticationFailed")
    assert rig.store(make_keys(1)).reason == "denied"
    assert "(AuthenticationFailed); correct or renew it" in caplog.text


def test_old_blocks_are_swept_and_used_ones_renewed(cloud: FakeS3, open_rig: OpenRig) -> None:
    rig = open_rig(ttl="1h", sweep_interval="100ms")
    keys = make_keys(4)
    rig.store(keys)
    names = [each for each in cloud.objects if "/blocks/" in each]
    now_s = time.time()
    cloud.written_s.update({names[0]: now_s - 7200.0, **dict.fromkeys(names[1:], now_s - 2000.0)})
    wait_until(lambda: names[0] not in cloud.objects, what="a sweep")
    assert len(rig.load(keys)) == 3
    wait_until(lambda: all(cloud.written_s[name] > now_s - 60.0 for name in names[1:]), what="their renewal")
    assert rig.tier.stats()["failed_renewals_total"] == 0


def test_what_a_process_leaves_beyond_the_capacity_is_deleted_by_the_next_sweep(
    cloud: FakeS3, open_rig: OpenRig
) -> None:
    """A process that ends before its first sweep leaves all that it stored."""

    def left() -> int:
        return sum("/blocks/" in each for each in cloud.objects)

    capacity = 2 * record_bytes_max(BLOCK_BYTES)
    rig = open_rig(capacity=capacity, sweep_interval="1d")
    assert rig.store(make_keys(4)).success
    rig.close()
    assert left() == 4
    rig = open_rig(capacity=capacity, sweep_interval="100ms")
    assert rig.store(make_keys(1, "another")).success
    wait_until(lambda: left() <= 2, what="a sweep")
    assert rig.tier.stats()["failed_sweeps_total"] == 0


def test_a_list_with_a_missing_object_is_deleted(cloud: FakeS3) -> None:
    from tiered_kv.config.hooks import tier_plugins
    from tiered_kv.toolkit.objects.verdict import BucketError
    from tiered_kv_object.client import ObjectClient
    from tiered_kv_object.control import ObstoreControl

    settings = tier_plugins().resolve(str(cloud.entry["type"])).settings.model_validate(cloud.entry)
    with closing(ObstoreControl(ObjectClient(settings, "x"))) as control:  # type: ignore[arg-type]  # of one of the two
        for number in range(5):
            control.write(f"kv/{number}", b"data")
        assert control.delete(["kv/0", "kv/missing", "kv/3"]) == {}
        assert sorted(name[-1] for name in cloud.objects) == ["1", "2", "4"]
        cloud.page_objects = 2
        assert [each.name for page in control.listed("kv/") for each in page] == ["kv/1", "kv/2", "kv/4"]
        cloud.objects["/bucket/kv/foreign//name"] = b""
        with pytest.raises(BucketError, match="foreign//name") as raised:
            list(control.listed("kv/"))
        assert raised.value.reason == "refused"
        cloud.always["DELETE"] = "denied"
        cloud.reply = lambda request: error(403, "AuthorizationFailure") if request.method == "DELETE" else None
        assert control.delete(["kv/1", "kv/2"]) == {0: "denied", 1: "denied"}


def test_a_listing_that_never_ends_is_an_error(cloud: FakeS3) -> None:
    from tiered_kv.config.hooks import tier_plugins
    from tiered_kv_object.client import ObjectClient
    from tiered_kv_object.control import PAGE_OBJECTS, ObstoreControl

    settings = tier_plugins().resolve(str(cloud.entry["type"])).settings.model_validate(cloud.entry)
    with closing(ObstoreControl(ObjectClient(settings, "x"))) as control:  # type: ignore[arg-type]  # of one of the two
        cloud.objects |= {f"/bucket/kv/{number:04}": b"data" for number in range(PAGE_OBJECTS + 1)}
        first: list[bytes] = []

        def same_page(request: Request) -> bytes:
            first[:] = first or [cloud.served(request)]
            return first[0]

        cloud.reply = same_page
        with pytest.raises(BucketError, match="the same page again"):
            for _ in control.listed("kv/"):
                pass


_FORKS = """
import os, sys
from tests.support.entries import rig_of
from tests.support.fake_gcs import FakeGCS
from tiered_kv.errors import ConfigError
from tiered_kv.testing.rig import make_keys

with FakeGCS() as server:
    rig = rig_of(server.entry, block_bytes=4096)
    assert rig.store(make_keys(1)).success
    process = os.fork()
    if not process:
        try:
            rig_of(server.entry, block_bytes=4096)
        except ConfigError as error:
            os._exit(7 if "before this process was forked" in str(error) else 1)
        os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    rig.close()
"""


def test_a_process_that_was_forked_after_the_library_s_use_gets_an_error_and_does_not_hang() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS], capture_output=True, text=True, timeout=300, env={**os.environ}
    )
    assert done.stdout.strip() == "7", done.stderr


_WAITS = """
import os, sys, time
import obstore
from obstore.store import GCSStore
from tests.support.entries import rig_of
from tiered_kv.testing.rig import make_keys

endpoint, token = sys.argv[1:]
config = {"base_url": endpoint, "bearer_token": token}
store = GCSStore("bucket", config=config, client_options={"allow_http": True})
obstore.put(store, "other", b"code of the process")
process = os.fork()
if not process:
    times = {"request_timeout": 0.2, "lookup_timeout": 0.2, "job_timeout": 3.0, "attempts": 1, "presence_ttl": 0}
    entry = {"type": "gcs", "bucket": "bucket", "endpoint": endpoint, "access_token": token, **times}
    rig = rig_of(entry, block_bytes=4096, wait_s=60.0)
    assert not any(rig.lookup(key) for key in make_keys(4))  # so that the bucket is asked in the background
    time.sleep(1.0)
    os._exit(0 if not rig.store(make_keys(1)).success else 1)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


_INHERITS = """
import os, sys, time
from tests.support.fake_gcs import FakeGCS
from tiered_kv_object.client import ObjectClient
from tiered_kv_object.settings import GcsSettings
from tiered_kv_object.store import ObstoreStore

with FakeGCS() as server:
    settings = GcsSettings.model_validate({**server.entry, "name": "x", "request_timeout": 0.2, "attempts": 1})
    store = ObstoreStore(ObjectClient(settings, "x"))
    for _ in range(2):
        assert store.put("block", [b"data"], time.monotonic() + 60.0) == "done"
    process = os.fork()
    if not process:
        os._exit(7 if store.put("block", [b"data"], time.monotonic() + 60.0) == "timeout" else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    assert store.put("block", [b"data"], time.monotonic() + 60.0) == "done"
    store.close()
"""


@pytest.mark.slow
def test_a_request_of_a_forked_process_ends_and_its_parent_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _INHERITS], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout.strip(), done.returncode) == ("7", 0), done.stderr


@pytest.mark.slow
def test_requests_end_after_a_fork_although_other_code_had_used_the_library() -> None:
    with FakeGCS() as server:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _WAITS, server.url, server.token],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.stdout.strip() == "0", done.stderr
