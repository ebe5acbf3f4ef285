"""Samples of a long run: `tests/support/sample.py`."""

from __future__ import annotations

from collections import Counter

from tests.support.sample import sample

TESTS = [(f"test_{n}", n % 7 + 1) for n in range(70)]
ALL = {(name, case) for name, cases in TESTS for case in range(cases)}


def test_all_cases_are_the_sample_of_one_in_one() -> None:
    assert {*sample(TESTS, 1, 1, "a")} == {*sample(TESTS, 1, 1, "")} == ALL


def test_a_seed_chooses_the_same_again_and_another_seed_others() -> None:
    assert [*sample(TESTS, 3, 2, "a")] == [*sample(TESTS, 3, 2, "a")] != [*sample(TESTS, 3, 2, "b")]


def test_each_case_is_in_the_sample_of_some_seed() -> None:
    assert {chosen for seed in range(200) for chosen in sample(TESTS, 3, 4, str(seed))} == ALL


def test_each_chosen_test_has_at_least_one_case() -> None:
    for seed in ("", "a", "b", "c"):
        assert {name for name, _ in sample(TESTS, 100, 1, seed)} == {name for name, _ in TESTS}


def test_the_parts_are_as_large_as_asked_for() -> None:
    tests = [(f"test_{n}", 12) for n in range(1000)]
    counts = Counter(name for name, _ in sample(tests, 4, 2, "seed"))
    assert {*counts.values()} == {3}
    assert 400 < len(counts) < 600


def test_a_test_has_the_same_cases_when_it_is_run_alone() -> None:
    together = [chosen for chosen in sample(TESTS, 3, 2, "a") if chosen[0] == "test_6"]
    assert together in ([], [*sample([TESTS[6]], 3, 2, "a")])
