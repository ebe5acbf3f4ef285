"""A tier that gets names instead of keys behaves in the same way for its callers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from tests.support.stacks import stack_of
from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, make_offload_key
from tiered_kv.errors import ConfigError
from tiered_kv.stack import open_stack
from tiered_kv.stack_config import load_config
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.testing.rig import OpenTier, make_keys
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.keyed_names import NAMES_MAX, KeyedNames, NameMap
from tiered_kv.tiering.wrapper import WrapperTier

BLOCK_BYTES = 512
NAME_KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
SPEC = TierSpec("kept", BLOCK_BYTES, bytes(range(16)))
FOUR = "tiered_kv.testing.four_methods:FourMethodTier"


def new_view() -> memoryview:
    return memoryview(bytearray(16 * BLOCK_BYTES)).cast("B", (16, BLOCK_BYTES))


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "name.key"
    file.touch(mode=0o600)
    file.write_text(NAME_KEY.hex())
    return str(file)


class TestKeyedNvmeTier(TierConformance):
    survives_reopen: ClassVar[bool] = True

    @pytest.fixture
    def open_tier(self, tmp_path: Path, key_file: str) -> OpenTier:
        path = str(tmp_path / "kv")
        entry = {"type": "nvme", "path": path, "capacity": "64MiB", "segment": "1MiB", "name_key_file": key_file}
        return lambda spec, view: SecondaryTierFactory.create(spec, view, entry)


# Names.


def test_a_name_is_the_same_in_every_process_and_release() -> None:
    """Blocks that are stored must be found after an upgrade."""
    key = make_offload_key(b"a block's hash", 3)
    (name,) = NameMap(NAME_KEY, bytes(range(16))).of([key])
    assert name.hex() == "cf4cc994fc53a186afb6adb4ec1263b474030b21fbdebd84973d47f31cf8f28600000003"


@hypothesis.given(strategies.lists(strategies.binary(min_size=4, max_size=80).map(OffloadKey), max_size=20))
def test_names_have_one_length_keep_the_group_and_differ_where_keys_do(keys: list[OffloadKey]) -> None:
    names = NameMap(NAME_KEY, bytes(16)).of(keys)
    assert len(set(names)) == len(set(keys))
    for key, name in zip(keys, names, strict=True):
        assert len(name) == 36
        assert name[-4:] == key[-4:]
    assert [NameMap(NAME_KEY, bytes(16))[key] for key in keys] == names


def test_names_depend_on_the_name_key_the_namespace_and_where_one_ends_and_the_other_begins() -> None:
    key = make_offload_key(b"hash", 0)
    names = [
        NameMap(NAME_KEY, bytes(16))[key],
        NameMap(OTHER_KEY, bytes(16))[key],
        NameMap(NAME_KEY, bytes(15) + b"\1")[key],
        NameMap(NAME_KEY, bytes(15))[OffloadKey(b"\0" + key)],
        NameMap(NAME_KEY, bytes(17))[key],
    ]
    assert len(set(names)) == len(names)


def test_the_cache_is_bounded_and_not_printed() -> None:
    names, keys = NameMap(NAME_KEY, bytes(16)), make_keys(NAMES_MAX + 2)
    expected = NameMap(NAME_KEY, bytes(16)).of(keys)
    assert [names[key] for key in keys] == expected
    assert len(names) == 2
    assert repr(names) == str(names) == "<2 names>"
    assert names.of(keys) == expected
    assert len(names) <= NAMES_MAX


# The wrapper.


class Recorder(FourMethodTier):
    """Keeps the jobs and touches that it gets, and reports the results and events of a test."""

    is_nonblocking = True

    def __init__(self) -> None:
        super().__init__(SPEC, new_view(), "recorder")
        self.jobs: list[JobMetadata] = []
        self.touched: list[OffloadKey] = []
        self.results: list[JobResult] = []
        self.events: list[OffloadingEvent] = []
        self.refuses = False

    def submit_store(self, job_metadata: JobMetadata) -> None:
        if self.refuses:
            raise OSError("no")
        self.jobs.append(job_metadata)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.touched += keys

    def get_finished(self) -> Iterable[JobResult]:
        results, self.results = self.results, []
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self.events = self.events, []
        return events

    def stats(self) -> Mapping[str, int]:
        return {"blocks": 7}

    def describe(self) -> Mapping[str, object]:
        return {"medium": "paper"}

    @property
    def lookup_failures(self) -> int:
        return 11


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def keyed(recorder: Recorder) -> KeyedNames:
    return KeyedNames(recorder, NAME_KEY)


def job_of(job_id: int, keys: list[OffloadKey]) -> JobMetadata:
    return JobMetadata(job_id, keys, np.arange(len(keys), dtype=np.int64), False, ReqContext("r"), deadline=1.5)


def test_every_call_passes_the_same_name_for_a_key(recorder: Recorder, keyed: KeyedNames) -> None:
    keys = make_keys(3)
    job = job_of(5, keys)
    keyed.submit_store(job)
    keyed.touch(keys, ReqContext("r"))
    names = NameMap(NAME_KEY, SPEC.namespace_digest).of(keys)
    assert recorder.touched == names
    (passed,) = recorder.jobs
    assert vars(passed) == {**vars(job), "keys": names}
    assert job.keys == keys, "the caller's job is not changed"
    recorder.blocks[names[1]] = b""
    assert [keyed.lookup(key, ReqContext("r")) for key in keys] == [False, True, False]
    assert keyed.lookup_many(keys, ReqContext("r")) == [False, True, False]


def test_results_name_keys_and_nothing_is_kept_of_jobs_that_ended(recorder: Recorder, keyed: KeyedNames) -> None:
    keys = make_keys(4)
    for number in range(3):
        keyed.submit_store(job_of(number, keys))
    names = list(recorder.jobs[0].keys)
    strange = OffloadKey(b"nobody asked")
    recorder.results = [
        JobResult(0, True),
        JobResult(1, False, [names[2], strange, names[0]], "checksum"),
        JobResult(2, False, reason="io_error"),
        JobResult(99, False, [strange]),
    ]
    first, second, third, unknown = keyed.get_finished()
    assert first == JobResult(0, True)
    assert second == JobResult(1, False, [keys[2], keys[0]], "checksum")
    assert third == JobResult(2, False, reason="io_error")
    assert unknown.job_id == 99
    recorder.results = [JobResult(1, False, [names[2]])]
    assert next(iter(keyed.get_finished())).successful_keys == [names[2]], "the job is not known any more"


def test_invalid_results_do_not_hide_valid_ones(recorder: Recorder, keyed: KeyedNames) -> None:
    keys = make_keys(2)
    for number in (1, 2):
        keyed.submit_store(job_of(number, keys))
    nonsense: list[Any] = [None, JobResult([7], True), JobResult(1, False, 5)]  # type: ignore[arg-type]  # a tier's fault
    recorder.results = [*nonsense, JobResult(2, True)]
    assert list(keyed.get_finished()) == [*nonsense, JobResult(2, True)]


def test_a_refused_job_is_not_kept(recorder: Recorder, keyed: KeyedNames) -> None:
    recorder.refuses = True
    keys = make_keys(2)
    with pytest.raises(OSError, match="no"):
        keyed.submit_store(job_of(1, keys))
    names = NameMap(NAME_KEY, SPEC.namespace_digest).of(keys)
    recorder.results = [JobResult(1, False, names)]
    assert next(iter(keyed.get_finished())).successful_keys == names


def test_events_that_name_blocks_by_names_are_dropped(recorder: Recorder, keyed: KeyedNames) -> None:
    recorder.events = [OffloadingEvent([OffloadKey(b"a name")], BLOCK_BYTES, "here", removed=True)]
    assert list(keyed.take_events()) == []
    assert not recorder.events, "they pile up"


def test_methods_without_keys_are_passed_on(recorder: Recorder, keyed: KeyedNames) -> None:
    assert keyed.is_nonblocking
    assert not KeyedNames(FourMethodTier(SPEC, new_view(), "four"), NAME_KEY).is_nonblocking
    assert keyed.tier_type == "recorder"
    assert keyed.lookup_failures == 11
    assert keyed.describe() == {"medium": "paper", "names": "keyed"}
    assert keyed.reset_cache() is False


def test_every_method_of_the_interface_is_passed_on() -> None:
    """A method that is added to the interface must not be answered by its default."""
    public = {name for name in vars(SecondaryTierManager) if not name.startswith("_")}
    assert public <= {"is_nonblocking", "takes_offsets", *vars(WrapperTier)}


# Settings.


def test_any_tier_of_a_stack_is_keyed_by_a_variable_or_a_file(key_file: str) -> None:
    keys = make_keys(3)
    for given in ({"name_key": "${NAME_KEY}"}, {"name_key_file": key_file}):
        entry = {"type": FOUR, **given}
        config = load_config(stack_of(entry, block_bytes=BLOCK_BYTES), environ={"NAME_KEY": NAME_KEY.hex()})
        with open_stack(config) as stack:
            assert stack.put(keys, np.zeros((3, BLOCK_BYTES), np.uint8)) == 3
            assert stack.flush()
            (tier,) = stack.secondary_tiers
            assert isinstance(tier, KeyedNames)
            assert isinstance(tier.inner, FourMethodTier)
            assert set(tier.inner.blocks) == set(NameMap(NAME_KEY, config.identity.digest).of(keys))
            assert tier.describe()["names"] == "keyed"


def test_a_bad_key_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    entry = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with pytest.raises(ConfigError, match=r"secondary\.0\.name_key: expected a key: 32 bytes .*, found \*\*\*"):
        load_config(stack_of({**entry, "name_key": "too short"}))
    with pytest.raises(ConfigError, match="'name_key' and 'name_key_file' both give the key"):
        load_config(stack_of({**entry, "name_key": NAME_KEY.hex(), "name_key_file": "x"}))
    missing = {**entry, "name_key_file": str(tmp_path / "missing")}
    with pytest.raises(ConfigError, match=r"secondary\.0\.name_key_file: the key file cannot be opened"):
        open_stack(stack_of(missing))
    assert list(tmp_path.iterdir()) == []
