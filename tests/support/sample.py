"""Which tests and cases of a long run are its sample: conftest.py asks, for `--one-in` and `--one-test-in`.

The same seed chooses the same. Every test, and every case of it, is in the sample of some seed. A seed chooses by the
name of a test, so that it chooses the same in a run of this test alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32


def sample(
    tests: Sequence[tuple[str, int]], one_case_in: int, one_test_in: int, seed: str
) -> Iterator[tuple[str, int]]:
    """Yield each chosen case, as the test's name and the case's number, of tests with their numbers of cases.

    Without a seed it is the first of the tests and of the cases, and every N-th after it.
    """
    for number, (name, cases) in enumerate(tests):
        chance = crc32(f"{seed} {name}".encode()) if seed else 0
        first_test, first_case = chance % one_test_in, chance // one_test_in % min(one_case_in, cases)
        if (number if not seed else 0) % one_test_in == first_test:
            yield from ((name, case) for case in range(first_case, cases, one_case_in))
