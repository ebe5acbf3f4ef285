"""Every tier keeps the contract of a secondary tier, with each kind of stored blocks, also on slow and bad wires.

What the tiers store of blocks that compress is shorter than the blocks are.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tests.support.azurite import Azurite
from tests.support.doors import codec_id_of
from tests.support.entries import s3_entry
from tests.support.fake_azure import FakeAzure
from tests.support.fake_gcs import FakeGCS
from tests.support.fake_s3 import FakeS3
from tests.support.figures import Profile
from tests.support.host_server import serving
from tests.support.patient_nvme import PATIENCE_S, opening_nvme
from tests.support.places import Place, PlaceOf
from tests.support.redis_servers import PASSWORD, RedisServer
from tests.support.s3_servers import S3Server
from tests.support.segment_map import SegmentMap
from tests.support.stacks import stack_of
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.proxy import FaultProxy, Faults
from tiered_kv.testing.rig import OpenTier, compressible_content, make_keys
from tiered_kv.testing.wire_faults import ByteFault, TierUnderWireFaults
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.codecs import ZSTD_ID
from tiered_kv.toolkit.record import HEADER_BYTES

ZSTD: dict[str, object] = {"codec": "zstd"}
AES: dict[str, object] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: "11" * 32}}}
ZSTD_AES: dict[str, object] = {**AES, "codec": "zstd+aes-256-gcm"}
SLOW_WIRE = Faults(latency_s=0.002, bytes_per_s=20e6)
"""Another datacenter: 20 MB/s for each connection."""


class OfPlace(TierConformance):
    """A tier of a kind on new storage."""

    kind: ClassVar[str]
    settings: ClassVar[dict[str, object]] = {}
    place: Place

    @pytest.fixture
    def open_tier(self, place_of: PlaceOf) -> OpenTier:
        self.place = place_of(self.kind)
        return self.opening()

    def opening(self, **changes: object) -> OpenTier:
        return self.place.opener(**self.settings, **changes)

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        self.place.damage(tier)
        return True


class TestMemoryTier(OfPlace):
    kind = "memory"


@pytest.mark.slow
class TestMemoryTierWithCompression(TestMemoryTier):
    settings = ZSTD
    compressible = True


@pytest.mark.slow
class TestMemoryTierWithEncryption(TestMemoryTier):
    settings = AES


class TestFsTier(OfPlace):
    kind = "fs"
    survives_reopen = True


@pytest.mark.slow
class TestFsTierWithCompressionAndEncryption(TestFsTier):
    settings = ZSTD_AES
    compressible = True
    block_bytes = 1000


class TestHostTier(TierConformance):
    survives_reopen = True  # its server

    @pytest.fixture
    def open_tier(self, tmp_path: Path) -> Iterator[OpenTier]:
        memory = 16 * self.num_blocks * self.block_bytes
        with serving(tmp_path, {"primary": {"capacity": memory}}, namespaces=2) as served:
            entry = {"type": "host", "socket": served.address, "lookup_timeout": "60s"}
            yield lambda spec, view: SecondaryTierFactory.create(spec, view, entry)


@pytest.mark.usefixtures("patient_nvme")
class TestNvmeTier(OfPlace):
    kind = "nvme"
    survives_reopen = True
    wait_s = 2 * PATIENCE_S

    def opening(self, **changes: object) -> OpenTier:
        return opening_nvme({**self.place.entry, **self.settings})


@pytest.mark.slow
class TestNvmeTierThroughThePageCache(TestNvmeTier):
    settings: ClassVar[dict[str, object]] = {"direct": False}
    block_bytes = 1000


@pytest.mark.slow
class TestNvmeTierWithCompressionAndEncryption(TestNvmeTier):
    settings = ZSTD_AES
    compressible = True
    block_bytes = 1000


@pytest.fixture
def slow_wire(request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    """A wire before the server of the class's tier."""
    server = request.getfixturevalue("redis_server" if request.cls.kind == "redis" else "moto_server")
    with FaultProxy(server.address) as proxy:
        proxy.set_faults(SLOW_WIRE)
        yield proxy


class TestRedisTier(OfPlace):
    kind = "redis"
    survives_reopen = True


@pytest.mark.slow
class TestRedisTierWithCompressionAndEncryption(TestRedisTier):
    settings: ClassVar[dict[str, object]] = {**ZSTD_AES, "ttl": "1h", "connections": 1, "pipeline": 10_000}
    compressible = True
    block_bytes = 3000


@pytest.mark.slow
class TestRedisTierOverTls(TestRedisTier):
    @pytest.fixture
    def open_tier(self, tls_redis_server: RedisServer, tmp_path: Path) -> OpenTier:
        self.place = Place("redis", tmp_path, lambda name: tls_redis_server)
        tls = tls_redis_server.tls
        assert tls is not None
        return self.opening(password=PASSWORD, tls_ca=str(tls.ca), tls_cert=str(tls.cert), tls_key=str(tls.key))


@pytest.mark.slow
class TestRedisTierOverAUnixSocket(TestRedisTier):
    @pytest.fixture
    def open_tier(self, place_of: PlaceOf, redis_server: RedisServer, tmp_path: Path) -> OpenTier:
        self.place = place_of("redis")
        redis_server.restart("--unixsocket", str(tmp_path / "socket"))
        return self.opening(url=f"unix://{tmp_path / 'socket'}")


@pytest.mark.slow
class TestRedisTierOnASlowWire(TestRedisTier):
    @pytest.fixture
    def open_tier(self, place_of: PlaceOf, slow_wire: FaultProxy) -> OpenTier:
        self.place = place_of("redis")
        return self.opening(url=f"redis://{slow_wire.host}:{slow_wire.port}")


class TestRedisTierOnFakeredis(TestRedisTier):
    pytestmark = [pytest.mark.slow] if shutil.which("redis-server") else []  # where there is none, it stands in

    @pytest.fixture
    def open_tier(self, fake_redis_url: str, tmp_path: Path) -> OpenTier:
        self.place = Place("memory", tmp_path)  # of whose entry nothing is left
        self.place.entry = {"type": "redis", "url": fake_redis_url}
        return self.opening()

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        return False


@pytest.mark.slow
class TestRedisTierOnACluster(TestRedisTier):
    kind = "redis-cluster"

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        return False


@pytest.mark.slow
class TestS3Tier(OfPlace):
    kind = "s3"
    survives_reopen = True
    settings: ClassVar[dict[str, object]] = {"connections": 8}


class TestS3TierWithCompression(TestS3Tier):
    settings: ClassVar[dict[str, object]] = {**ZSTD, "connections": 8}
    compressible = True


class TestGcsTier(OfPlace):
    kind = "gcs"
    survives_reopen = True


@pytest.mark.slow
class TestGcsTierWithCompression(TestGcsTier):
    settings: ClassVar[dict[str, object]] = ZSTD
    compressible = True


@pytest.mark.slow  # it differs from gcs in its requests, which the tests of both in tests/plugins/object try
class TestAzureTier(OfPlace):
    kind = "azure"
    survives_reopen = True


class TestAzureTierOnAzurite(TestAzureTier):
    wait_s = 60.0

    @pytest.fixture
    def open_tier(self, azurite: Azurite, tmp_path: Path) -> OpenTier:
        pytest.importorskip("obstore", reason="obstore is not installed")
        self.place = Place("memory", tmp_path)  # of whose entry nothing is left
        self.place.entry = azurite.entry(request_timeout="60s")
        return self.opening()

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        return False


class TestS3TierOnASlowWire(TestS3Tier):
    wait_s = 60.0

    @pytest.fixture
    def open_tier(self, place_of: PlaceOf, slow_wire: FaultProxy) -> OpenTier:
        self.place = place_of("s3")
        return self.opening(endpoint_url=f"http://{slow_wire.host}:{slow_wire.port}")


class TestS3TierOnOtherServers(TestS3Tier):
    wait_s = 60.0

    @pytest.fixture
    def open_tier(self, installed_server: S3Server, tmp_path: Path) -> OpenTier:
        self.place = Place("s3", tmp_path, lambda name: installed_server)
        return self.opening()


@pytest.mark.slow
def test_sweeps_renewals_and_purges_on_another_server(installed_server: S3Server) -> None:
    from tiered_kv_s3.access import BucketAccess
    from tiered_kv_s3.administration import S3Administration
    from tiered_kv_s3.control import Control
    from tiered_kv_s3.settings import S3Settings

    bucket, keys = installed_server.make_bucket(), make_keys(40)
    blocks = np.zeros((len(keys), 512), np.uint8)
    entry = s3_entry(installed_server, bucket, request_timeout="60s", lookup_timeout="60s", job_timeout="60s")
    capacity = 30 * (HEADER_BYTES + blocks.shape[1])
    limits = {"capacity": capacity, "sweep_interval": "1s"}
    with open_stack(stack_of({**entry, **limits}, blocks=len(keys), block_bytes=512)) as stack:
        assert stack.put(keys, blocks, timeout=60.0) == len(keys)
        assert stack.flush(60.0)
        wait_until(lambda: count_of(stack.counters(), "s3", "tier", "deleted_blocks_total") >= 10, what="a sweep")
        assert count_of(stack.counters(), "s3", "tier", "failed_sweeps_total") == 0
        digest = stack.config.identity.digest.hex()
    settings = S3Settings.model_validate({**entry, "ttl": "6s"})
    with closing(Control(BucketAccess(settings, "s3"), settings, "s3")) as control:
        name = next(each.name for page in control.listed("tiered-kv/") for each in page if "/blocks/" in each.name)
        time.sleep(4.0)
        control.renew(name)  # raises if the object is older than half of `ttl`
    with closing(S3Administration(settings)) as administration:
        deadline = time.monotonic() + 60.0
        (found,) = administration.survey(deadline).namespaces
        assert found.blocks == 30
        purged = administration.purge(digest, deadline)
        assert (purged.blocks, purged.left) == (30, ())
        assert administration.survey(deadline).namespaces == ()


SPEC = TierSpec("compressed", 4096, bytes(range(16)))
KEYS = make_keys(8)
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("redis", "s3")]


@pytest.mark.parametrize("kind", ["memory", "fs", *SLOW])
def test_records_are_shorter_than_their_blocks(kind: str, place_of: PlaceOf) -> None:
    place = place_of(kind)
    rig = place.open(SPEC, compressible_content, codec="zstd")
    assert rig.store(KEYS).success
    assert rig.load(KEYS) == set(KEYS)
    door = place.door(rig)
    records = [door.read(key) or b"" for key in KEYS]
    assert [codec_id_of(record) for record in records] == [ZSTD_ID] * 8
    assert max(map(len, records)) < HEADER_BYTES + rig.block_bytes // 2


def test_payloads_in_segments_are_shorter_than_their_blocks(place_of: PlaceOf) -> None:
    place = place_of("nvme")
    rig = place.open(SPEC, compressible_content, codec="zstd")
    assert rig.store(KEYS).success
    rig.tier.shutdown()  # which writes what is missing
    maps = [SegmentMap(path.read_bytes()) for path in place.path.glob("segment-*.kv")]
    stored = {key: size for each in maps for batch in each.batches for key, _, size in batch.entries}
    assert stored.keys() == set(KEYS)
    assert max(stored.values()) < rig.block_bytes * 3 // 4


DENSE_BYTES = 340
"""More than redis's commands, names and the record's header take."""


@pytest.mark.slow
@pytest.mark.trust("wire-faults")
class PatientlyTested(TierUnderWireFaults):
    """A busy machine holds threads up for a second and more.

    A tier that goes by its own timeout and not by its jobs' deadlines takes twice as long as they may.
    """

    grace_s = 10.0
    recovery_s = 45.0
    shutdown_limit_s = 10.0


class TestRedisTierUnderWireFaults(PatientlyTested):
    @pytest.fixture(autouse=True)
    def _dense(self, profile: Profile) -> None:
        self.step = profile.pick(9, 1)

    def offsets(self, fault: ByteFault, exchange_bytes: int) -> set[int]:
        """Flip a bit of every byte before the payload too, or of a sample of them."""
        head = range(0, min(DENSE_BYTES, exchange_bytes) if fault is ByteFault.FLIP else 0, self.step)
        return super().offsets(fault, exchange_bytes) | set(head)

    @pytest.fixture
    def server_address(self, redis_server: RedisServer) -> tuple[str, int]:
        return "127.0.0.1", redis_server.port

    @pytest.fixture
    def open_tier(self, proxy: FaultProxy) -> OpenTier:
        pytest.importorskip("redis", reason="redis-py is not installed")
        timeouts = {"timeout": "20s", "connect_timeout": "300ms", "lookup_timeout": "300ms"}
        entry = {"type": "redis", "url": f"redis://{proxy.host}:{proxy.port}", **timeouts}
        return lambda spec, view: SecondaryTierFactory.create(spec, view, entry)


class TestGcsTierUnderWireFaults(PatientlyTested):
    server_class: ClassVar[type[FakeS3]] = FakeGCS

    @pytest.fixture
    def server(self) -> Iterator[FakeS3]:
        pytest.importorskip("obstore", reason="obstore is not installed")
        with self.server_class() as server:
            server.has_mark = False
            yield server

    @pytest.fixture
    def server_address(self, server: FakeS3) -> tuple[str, int]:
        return "127.0.0.1", server.port

    @pytest.fixture
    def open_tier(self, proxy: FaultProxy, server: FakeS3) -> OpenTier:
        few = {"attempts": 2, "lookup_timeout": "300ms", "request_timeout": "20s", "presence_ttl": 0}
        entry = {**server.entry, "endpoint": f"http://{proxy.host}:{proxy.port}", **few}
        return lambda spec, view: SecondaryTierFactory.create(spec, view, entry)


class TestAzureTierUnderWireFaults(TestGcsTierUnderWireFaults):
    server_class = FakeAzure


class TestS3TierUnderWireFaults(PatientlyTested):
    @pytest.fixture
    def server_address(self, moto_server: S3Server) -> tuple[str, int]:
        return moto_server.address

    @pytest.fixture
    def open_tier(self, proxy: FaultProxy, moto_server: S3Server, moto_bucket: str) -> OpenTier:
        pytest.importorskip("boto3", reason="boto3 is not installed")
        few = {"connections": 4, "attempts": 2, "lookup_timeout": "300ms", "request_timeout": "20s", "presence_ttl": 0}
        url = f"http://{proxy.host}:{proxy.port}"
        entry = {"type": "s3", **s3_entry(moto_server, moto_bucket, endpoint_url=url, **few)}
        return lambda spec, view: SecondaryTierFactory.create(spec, view, entry)
