"""In real cgroups: no engine dies because of its own limits by using a server's rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cgroups import cgroup, run_in
from tests.support.host_server import server_process
from tiered_kv.system.limits import Limits

pytestmark = pytest.mark.slow

MIB = 1 << 20
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
ENGINE = """
import sys
import tiered_kv
size, count = int(sys.argv[2]), int(sys.argv[3])
with tiered_kv.connect(sys.argv[1]) as cache:
    stored = 0
    for first in range(0, count, 4):
        stored += cache.put([b"%016d" % number for number in range(first, first + 4)], bytes(4 * size))
    print("stored", stored)
"""


def stack_of(capacity: int, **primary: object) -> dict[str, object]:
    return {
        "namespace": {"model": "test"},
        "block": {"bytes": 256 << 10},
        "primary": {"capacity": capacity, **primary},
    }


def put_all(group: Path, folder: Path, count: int) -> str:
    done = run_in(group, ENGINE, f"unix:{folder}/cache.sock", str(256 << 10), str(count))
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout


@contextmanager
def reserved(size_bytes: int) -> Iterator[int]:
    """Reserve huge pages of the default size, also for other servers here, and give them back; yield their size."""
    page_bytes = next(each.page_bytes for each in Limits().huge_page_pools() if each.is_default)
    before = NR_HUGEPAGES.read_text()
    try:
        NR_HUGEPAGES.write_text(str(int(before) + -(-size_bytes // page_bytes)))
        if Limits().huge_pages(size_bytes).free_bytes < size_bytes:
            pytest.skip("the machine has no memory for huge pages")
        yield page_bytes
    except OSError as error:
        pytest.skip(f"no huge page can be reserved: {error}")
    finally:
        NR_HUGEPAGES.write_text(before)


def test_an_engine_fills_rows_that_its_own_limit_could_not_hold(tmp_path: Path) -> None:
    with cgroup("memory", {"max": 192 * MIB}) as group, server_process(tmp_path, stack_of(256 * MIB)):
        assert put_all(group, tmp_path, 2048).startswith("stored")


@pytest.mark.parametrize("prefault", [None, False])
def test_an_engine_without_huge_pages_uses_those_of_its_server(prefault: bool | None, tmp_path: Path) -> None:
    more = {} if prefault is None else {"prefault": prefault}
    with (
        reserved(256 * MIB) as page_bytes,
        cgroup("hugetlb", {f"{page_bytes >> 20}MB.max": 0, f"{page_bytes >> 20}MB.rsvd.max": 0}) as group,
        server_process(tmp_path, stack_of(64 * MIB, reserved_huge_pages=True, **more)),
    ):
        assert put_all(group, tmp_path, 512).startswith("stored")
