"""The contract of a tier's administration, as a pytest class that a tier's author subclasses with two fixtures.

pytest's thread calls the tier, and plays the scheduler. A check fails only for a broken promise.

class TestMyAdministration(TierAdministrationConformance):
    @pytest.fixture
    def open_tier(self, tmp_path: Path) -> OpenTier:
        return lambda spec, view: MyTier(spec, view, "mine", MySettings(path=tmp_path))

    @pytest.fixture
    def administration(self, tmp_path: Path) -> TierAdministration:
        return MyAdministration(MySettings(path=tmp_path))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.namespace import Namespace
from tiered_kv.errors import TierError
from tiered_kv.reasons import RecordStatus
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager, TierSpec
from tiered_kv.toolkit.administration import StoredBlock, StoredNamespace, TierAdministration, Verification
from tiered_kv.toolkit.record import HEADER_BYTES, RecordHeader, check_record, read_header, record_bytes_max

BLOCKS = 12


class TierAdministrationConformance:
    """Subclass it as `Test...`, and define the fixtures `open_tier` and `administration`, over the same storage.

    Attributes:
        is_shared: Whether several namespaces use the storage at once, while it is administered.
        block_bytes: Size of the blocks.
        wait_s: Seconds that a call may take.
    """

    is_shared: ClassVar[bool] = True
    block_bytes: ClassVar[int] = 4096
    wait_s: ClassVar[float] = 60.0

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        """Damage every block that the open `tier` has stored, as for `TierConformance`, and return True. Optional."""
        return False

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        """Return a callable that opens the tier; every call within one test opens it on the same storage."""
        raise NotImplementedError("a subclass of TierAdministrationConformance defines the fixture 'open_tier'")

    @pytest.fixture
    def administration(self) -> TierAdministration:
        """Return the administration of the storage."""
        raise NotImplementedError("a subclass of TierAdministrationConformance defines the fixture 'administration'")

    @pytest.fixture
    def tenant(self, open_tier: OpenTier) -> Iterator[Callable[[str], TierRig]]:
        """Return the tier on a rig, opened for a tenant."""
        rigs: list[TierRig] = []

        def open_for(name: str) -> TierRig:
            identity = Namespace(model="test", tenant=name).identify(block_bytes=self.block_bytes, block_tokens=16)
            spec = TierSpec("test", self.block_bytes, identity.digest, identity.described)
            rigs.append(TierRig(open_tier, num_blocks=64, block_bytes=self.block_bytes, wait_s=self.wait_s, spec=spec))
            return rigs[-1]

        yield open_for
        for rig in rigs:
            rig.close()

    @pytest.fixture
    def alice(self, tenant: Callable[[str], TierRig]) -> TierRig:
        """Return a tenant with stored blocks. Its tier is shut down unless the storage is shared."""
        alice = tenant("alice")
        assert alice.store(make_keys(BLOCKS)).success
        if not self.is_shared:
            alice.tier.shutdown()
        return alice

    def namespaces(self, administration: TierAdministration) -> dict[str | None, StoredNamespace]:
        """Return the surveyed namespaces by tenant."""
        return {each.tenant: each for each in administration.survey(time.monotonic() + self.wait_s).namespaces}

    def verified(self, administration: TierAdministration, rig: TierRig, *, repairs: bool = False) -> Verification:
        found = Verification(self.block_bytes, repairs)
        administration.verify(digest_of(rig), found, time.monotonic() + self.wait_s)
        return found

    def test_an_empty_storage_has_no_namespace_and_nothing_to_purge(self, administration: TierAdministration) -> None:
        assert administration.survey(time.monotonic() + self.wait_s).namespaces == ()
        purged = administration.purge("ab" * 16, time.monotonic() + self.wait_s)
        assert (purged.blocks or 0, purged.size_bytes, purged.left) == (0, 0, ())

    def test_a_survey_counts_blocks_and_a_check_finds_them_sound(
        self, alice: TierRig, administration: TierAdministration
    ) -> None:
        (found,) = self.namespaces(administration).values()
        assert (found.digest, found.tenant, found.blocks) == (digest_of(alice), "alice", BLOCKS)
        (listed,) = administration.namespaces(time.monotonic() + self.wait_s)
        assert (listed.digest, listed.described) == (found.digest, found.described)
        assert found.size_bytes is None or found.size_bytes >= BLOCKS * self.block_bytes
        for ages in (found.written, found.used):
            assert ages is None or -5 < ages.newest_s <= ages.oldest_s < 3600
        for repairs in (False, True):
            checked = self.verified(administration, alice, repairs=repairs)
            assert (checked.blocks, checked.ok, checked.unreadable) == (BLOCKS, True, {})
            assert checked.size_bytes >= BLOCKS * self.block_bytes
        assert self.blocks_of(alice) == BLOCKS

    def test_a_purge_deletes_one_namespace_for_good_and_it_can_be_used_again(
        self, alice: TierRig, administration: TierAdministration, tenant: Callable[[str], TierRig]
    ) -> None:
        bob = tenant("bob") if self.is_shared else None
        assert bob is None or bob.store(make_keys(BLOCKS)).success
        purged = administration.purge(digest_of(alice), time.monotonic() + self.wait_s)
        assert purged.left == ()
        assert purged.blocks in (None, BLOCKS)
        assert purged.size_bytes is None or purged.size_bytes >= BLOCKS * self.block_bytes
        assert list(self.namespaces(administration)) == (["bob"] if self.is_shared else [])
        assert self.verified(administration, alice).blocks == 0
        assert bob is None or self.blocks_of(bob) == BLOCKS
        alice.reopen()
        assert alice.load(make_keys(BLOCKS)) == set()
        assert alice.store(make_keys(BLOCKS)).success
        assert alice.load(make_keys(BLOCKS)) == set(make_keys(BLOCKS))

    def test_one_namespace_alone_can_be_surveyed(
        self, alice: TierRig, administration: TierAdministration, tenant: Callable[[str], TierRig]
    ) -> None:
        if self.is_shared:
            tenant("bob").store(make_keys(1))
        for digest, digests in ((digest_of(alice), [digest_of(alice)]), ("ab" * 16, [])):
            survey = administration.survey(time.monotonic() + self.wait_s, digest)
            assert [each.digest for each in survey.namespaces] == digests

    def test_damaged_blocks_are_found_and_only_deleted_on_request(
        self, alice: TierRig, administration: TierAdministration
    ) -> None:
        if not self.corrupt(alice.tier):
            pytest.skip("`corrupt` is not defined")
        for repairs in (False, True):
            found = self.verified(administration, alice, repairs=repairs)
            assert (found.damaged.total(), found.repaired, found.ok) == (BLOCKS, BLOCKS * repairs, repairs)
            assert {each.key for each in found.named} <= {"", *(key.hex() for key in make_keys(BLOCKS))}
        assert self.verified(administration, alice).blocks == 0
        assert self.blocks_of(alice) == 0

    def test_blocks_from_before_a_reset_are_purged(self, alice: TierRig, administration: TierAdministration) -> None:
        if not self.is_shared:
            alice.reopen()
        alice.tier.reset_cache()
        alice.store(make_keys(1, "after"))
        if not self.is_shared:
            alice.tier.shutdown()
        purged = administration.purge(digest_of(alice), time.monotonic() + self.wait_s)
        assert (purged.blocks in (None, BLOCKS + 1), purged.left) == (True, ())
        assert self.namespaces(administration) == {}

    def test_blocks_are_listed_and_read_as_records_for_a_copy(
        self, alice: TierRig, administration: TierAdministration
    ) -> None:
        listed = self.listed(administration, alice, make_keys(BLOCKS))
        assert sorted(each.key for each in listed) == sorted(make_keys(BLOCKS))
        assert all(each.used_s is None or abs(time.time() - each.used_s) < 3600 for each in listed)
        statuses, rows = self.read(administration, alice, listed)
        assert statuses == [RecordStatus.OK] * BLOCKS
        digest = alice.spec.namespace_digest
        for block, row in zip(listed, rows, strict=True):
            header = read_header(row)
            assert isinstance(header, RecordHeader)
            record_bytes = HEADER_BYTES + header.payload_bytes
            assert check_record(row, record_bytes, block.key, digest) is RecordStatus.OK
        chosen = [*make_keys(3), *make_keys(2, "never stored")]
        few = [each for batch in administration.blocks(digest.hex(), chosen, self.end_s) for each in batch]
        statuses, _ = self.read(administration, alice, few)
        read = [each.key for each, status in zip(few, statuses, strict=True) if status is RecordStatus.OK]
        assert sorted(read) == sorted(make_keys(3))

    def test_blocks_from_before_a_reset_are_not_copied(
        self, alice: TierRig, administration: TierAdministration
    ) -> None:
        before = self.listed(administration, alice, make_keys(BLOCKS))
        if not self.is_shared:
            alice.reopen()
        if not alice.tier.reset_cache():
            pytest.skip("the tier cannot reset")
        after = make_keys(1, "after")
        assert alice.store(after).success
        if not self.is_shared:
            alice.tier.shutdown()
        assert RecordStatus.OK not in self.read(administration, alice, before)[0]
        listed = self.listed(administration, alice, [*make_keys(BLOCKS), *after])
        statuses, _ = self.read(administration, alice, listed)
        assert [each.key for each, status in zip(listed, statuses, strict=True) if status is RecordStatus.OK] == after

    def test_damaged_blocks_are_not_copied(self, alice: TierRig, administration: TierAdministration) -> None:
        if not self.corrupt(alice.tier):
            pytest.skip("`corrupt` is not defined")
        listed = self.listed(administration, alice, make_keys(BLOCKS))
        assert RecordStatus.OK not in self.read(administration, alice, listed)[0]

    def test_a_tier_stores_records_as_they_are(
        self, alice: TierRig, administration: TierAdministration, open_tier: OpenTier
    ) -> None:
        if not alice.tier.takes_records:
            pytest.skip("the tier's class does not set `takes_records`")
        keys = make_keys(BLOCKS)
        _, rows = self.read(administration, alice, listed := self.listed(administration, alice, keys))
        assert administration.purge(digest_of(alice), self.end_s).left == ()
        alice.tier.shutdown()
        memory, row_bytes = memoryview(bytearray().join(rows)), record_bytes_max(self.block_bytes)
        sizes = memoryview(bytearray(self.block_bytes)).cast("B", (1, self.block_bytes))
        tier = open_tier(replace(alice.spec, memory=memory, holds_records=True), sizes)
        offsets = np.arange(BLOCKS, dtype=np.int64) * row_bytes
        tier.submit_store(JobMetadata(1, [each.key for each in listed], offsets, False, ReqContext("copy"), self.end_s))
        results: list[JobResult] = []
        while not results:
            assert time.monotonic() < self.end_s, "the store was not reported"
            tier.on_schedule_end()
            results += tier.get_finished()
            time.sleep(0.001)
        assert results[0].success, results[0].reason
        tier.shutdown()
        alice.reopen()
        assert alice.load(keys) == set(keys)

    def test_calls_end_at_their_deadline(self, alice: TierRig, administration: TierAdministration) -> None:
        calls: list[Callable[[], object]] = [
            lambda: administration.survey(time.monotonic() - 1),
            lambda: administration.verify(digest_of(alice), Verification(self.block_bytes), time.monotonic() - 1),
        ]
        for call in calls:
            with pytest.raises(TierError):
                call()

    @property
    def end_s(self) -> float:
        """A deadline of a call that begins now."""
        return time.monotonic() + self.wait_s

    def listed(self, administration: TierAdministration, rig: TierRig, keys: Sequence[OffloadKey]) -> list[StoredBlock]:
        """Return a tenant's blocks, for a copy; of `keys` if the storage keeps no keys."""
        wanted = keys if administration.needs_keys else None
        try:
            return [each for batch in administration.blocks(digest_of(rig), wanted, self.end_s) for each in batch]
        except NotImplementedError:
            pytest.skip("the administration does not define `blocks`")

    def read(
        self, administration: TierAdministration, rig: TierRig, blocks: Sequence[StoredBlock]
    ) -> tuple[list[RecordStatus | str], list[memoryview]]:
        """Read the records of blocks; return their statuses, and the rows."""
        rows = [memoryview(bytearray(record_bytes_max(self.block_bytes))) for _ in blocks]
        return list(administration.read_records(digest_of(rig), blocks, rows, self.end_s)), rows

    def blocks_of(self, rig: TierRig) -> int:
        """Return how many of a tenant's blocks can be loaded."""
        if not self.is_shared:
            rig.reopen()
        loaded = len(rig.load(make_keys(BLOCKS)))
        if not self.is_shared:
            rig.tier.shutdown()
        return loaded


def digest_of(rig: TierRig) -> str:
    return rig.spec.namespace_digest.hex()
