"""A policy of another distribution is found by its entry point; a broken one costs nobody who does not name it."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import Command
from tests.support.stacks import stack_of
from tiered_kv.config.stack_config import load_config
from tiered_kv.cpu.policies import RowTable, make_policy
from tiered_kv.cpu.policies.found import POLICIES, Policies, policies
from tiered_kv.cpu.policies.recency import LRUPolicy
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import open_stack

CLASS = '''
from tiered_kv.cpu.policies.recency import LRUPolicy

class Policy(LRUPolicy):
    """Evicts by the phase of the moon.

    More of it.
    """
'''
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution of one module, called like the distribution, that names its class `Policy`."""
    installed: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, policy: str, source: str = CLASS) -> None:
        (tmp_path / f"{distribution}.py").write_text(source)
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{POLICIES}]\n{policy} = {distribution}:Policy\n")
        importlib.invalidate_caches()
        installed.append(distribution)
        policies.cache_clear()

    yield install
    policies.cache_clear()
    for name in installed:
        sys.modules.pop(name, None)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_a_stack_s_file_names_a_policy_of_another_distribution(install: Install) -> None:
    install("astronomy", "moon")
    assert "astronomy" not in sys.modules
    keys, blocks = [bytes([index]) * 8 for index in range(4)], np.ones((4, 4096), np.uint8)
    with open_stack(stack_of(primary={"policy": "moon"})) as stack:
        assert stack.put(keys, blocks, timeout=60) == 4
    assert type(make_policy("moon", RowTable(4))).__module__ == "astronomy"


def test_the_error_for_an_unknown_policy_lists_those_that_were_found(install: Install) -> None:
    install("astronomy", "moon")
    with pytest.raises(ConfigError, match=r"expected lru, arc, density, moon.*did you mean 'moon'"):
        load_config(stack_of(primary={"policy": "mon"}))
    with pytest.raises(ConfigError, match="known are lru, arc, density, moon"):
        make_policy("sun", RowTable(4))


def test_a_broken_policy_is_named_and_costs_no_other(install: Install, command: Command) -> None:
    install("astronomy", "moon")
    install("broken", "sun", "raise RuntimeError('eclipse')")
    assert isinstance(make_policy("moon", RowTable(4)), LRUPolicy)
    with pytest.raises(ConfigError, match="'sun' cannot be made for 4 blocks: RuntimeError: eclipse"):
        make_policy("sun", RowTable(4))
    text = command.out("plugins", status=1)
    assert "Evicts by the phase of the moon." in text
    assert "broken: policy 'sun' of broken 1.0: RuntimeError: eclipse" in text
    found = {each["name"]: each for each in command.json("plugins", status=1)["policies"]}
    assert list(found) == ["lru", "arc", "density", "moon", "sun"]
    assert (found["moon"]["distribution"], found["moon"]["error"]) == ("astronomy 1.0", "")


def test_two_distributions_with_one_name_are_both_named_and_a_built_in_name_stays(install: Install) -> None:
    install("first", "moon")
    install("second", "moon")
    install("copycat", "lru")
    with pytest.raises(ConfigError, match=r"'moon' is registered by first 1\.0 and second 1\.0; uninstall one"):
        make_policy("moon", RowTable(4))
    assert type(make_policy("lru", RowTable(4))) is LRUPolicy
    errors = {each.origin: each.error for each in policies().found() if each.error}
    assert errors["policy 'lru' of copycat 1.0"] == "'lru' is a built-in policy; give yours another name"
    assert len(errors) == 3


def test_an_installation_that_is_found_twice_counts_once(install: Install) -> None:
    install("astronomy", "moon")
    twice = [*importlib.metadata.entry_points(group=POLICIES)] * 2
    assert Policies(twice).names.count("moon") == 1
    assert [each.name for each in Policies(twice).found() if each.error] == []


@pytest.mark.parametrize("source", ["raise SystemExit(0)", "raise BaseException('panic')"])
def test_a_policy_whose_module_ends_the_process_is_an_error(install: Install, command: Command, source: str) -> None:
    install("quitter", "leave", source)
    with pytest.raises(ConfigError, match=r"the policy 'leave' cannot be made for 4 blocks: \w+: (0|panic)"):
        make_policy("leave", RowTable(4))
    (found,) = [each for each in policies().found() if each.error]
    assert found.origin == "policy 'leave' of quitter 1.0"
    assert "'leave' is a policy, which has no settings" in command.err("plugins", "leave")


def test_a_policy_that_is_no_class_is_shown_as_broken(install: Install, command: Command) -> None:
    install("sevens", "seven", "Policy = 7")
    text = command.out("plugins", status=1)
    assert "broken: policy 'seven' of sevens 1.0: it names 7, which is no class of a policy" in " ".join(text.split())
