"""The page of `--report`: its numbers, its escapes, and no secret."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty import FourMethodTier
from tests.support.secret_hunt import Sheet, new_marker
from tests.support.stacks import Register, ReplaceModule, stack_file, stack_of
from tiered_kv.cli import output
from tiered_kv.cli.main import main
from tiered_kv.cli.replay import replay_page
from tiered_kv.cli.report.figures import SAMPLES_MAX, Sampler
from tiered_kv.cli.report.page import Html, Run, element, table
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.stack.open import open_engine_stack
from tiered_kv.testing.control import ManualClock
from tiered_kv.workload.replay import ReplaySettings, replay
from tiered_kv.workload.request import ChatWorkload
from tiered_kv.workload.tally import Tally

pytestmark = pytest.mark.usefixtures("drawing_library")

CHATS = ["--chats", "12", "--turns", "3", "--active-chats", "6", "--turn-blocks", "3"]
HOSTILE = "<script>alert('x')</script><img src=http://evil.example/x>\"&"
PLOTS = ["Hits by tier", "Throughput"]


class HostileTier(FourMethodTier):
    """Has markup in all texts of a tier."""

    def stats(self) -> Mapping[str, Any]:  # Any: as the interface
        return {"used_bytes": HOSTILE, "capacity_bytes": float("nan"), HOSTILE: 1}

    def submit_store(self, job_metadata: Any) -> None:  # Any: as the interface
        raise ValueError(HOSTILE)


class Parsed(HTMLParser):
    """The elements of a page, their attributes and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            self.texts[tag][-1] += data

    def values(self, *names: str) -> list[str]:
        """Return the values of all attributes with one of these names."""
        return [value or "" for name, value in self.attributes if name in names]

    @property
    def main(self) -> str:
        """The text of the whole page, without line breaks."""
        return " ".join(self.texts["main"][0].split())


@pytest.fixture
def hostile(register: Register) -> None:
    register("hostile", HostileTier)


def parsed(page: Path) -> Parsed:
    """Return a page, which must fetch nothing and be valid."""
    text = page.read_text("utf-8")
    assert "://" not in text, "nothing is fetched, and nothing is named that could be"
    found = Parsed(text)
    assert not {"script", "iframe", "object", "embed", "img", "base", "form"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.values("src", "action", "srcset") == []
    assert found.values("href") == ["data:,"], "an icon that is none"
    identities = found.values("id")
    assert len(identities) == len(set(identities)), "no two figures share a mark"
    used = {value.lstrip("#") for value in found.values("xlink:href")}
    assert used | set(re.findall(r"url\(#(\w+)\)", text)) <= set(identities)
    assert "#f1e2" not in text, "every colour is the page's"
    assert text.count("default-src 'none'") == 1
    return found


@pytest.mark.slow
def test_a_simulation_of_policies_writes_a_page_with_their_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["simulate", "--policy", "lru,arc", "--capacity", "20,30,40,50,60", "--report", str(page), *CHATS]) == 0
    capsys.readouterr()
    found = parsed(page)
    assert found.tags.count("svg") == 1
    for said in ("Hit rate by size", "36 requests asked for", "lru", "arc", "tiered-kv simulate"):
        assert said in found.main
    assert "Configuration" not in found.main


def test_a_simulation_of_stacks_writes_a_page_with_their_tiers_and_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, stack = tmp_path / "page.html", stack_file(tmp_path, "type: memory, capacity: 1MiB", capacity="256KiB")
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\ntiers: {memory: {gib_month: 1}}")
    priced = ["simulate", stack, "--capacity", "32,64", "--servers", "2", "--prices", str(prices)]
    assert main([*priced, "--report", str(page), *CHATS]) == 0
    capsys.readouterr()
    found = parsed(page)
    assert found.tags.count("svg") == 1
    assert found.texts["h1"][0].startswith("The cheapest within 1 % of the best: lru with")
    for said in ("Hit rate by size", "EUR a month", "2 servers", "capacity: 256KiB"):
        assert said in found.main


def test_a_replay_writes_a_page_that_says_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, stack = (
        tmp_path / "page.html",
        stack_file(tmp_path, "type: memory, capacity: 1MiB, admit_after: 2", capacity="256KiB"),
    )
    assert main(["replay", stack, "--json", "--report", str(page), *CHATS]) == 0
    result = json.loads(capsys.readouterr().out)
    found = parsed(page)
    rows = found.texts["tr"]
    assert found.tags.count("svg") == len(PLOTS)
    assert [title for title in found.texts["h3"] if title in PLOTS] == PLOTS
    assert found.texts["h1"] == ["12 built-in chats of 3 turns, seed 0 through stack.yaml"]
    assert f"of {result['blocks']:,} blocks of 4KiB were hits, in 36 requests" in found.main
    assert f"{result['verified_blocks']:,} loaded blocks compared byte by byte: all are right" in found.main
    for name, hits in {**result["hits"], "misses": result["misses"]}.items():
        row = f"{name}{hits:,}{hits / result['blocks']:.1%}"
        assert [each for each in rows if each.replace("\n", "").startswith(row)], row
    for said in ("Python", "kernel", "cores", "tiered-kv replay", "capacity: 256KiB", "admit_after: 2", "admission"):
        assert said in found.main
    assert re.search(r"[\d.]+(us|ms) +99th percentile of a step", found.main), "a time is in the unit that fits it"
    assert re.search(r"stored by requests; limit: (the storage|the manager|the replay's own work)", found.main)
    assert "requests answered" in found.texts["svg"][0]
    assert re.search("[GM]B/s", found.texts["svg"][1])


@pytest.mark.slow
def test_a_replay_says_which_blocks_were_computed_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = f"type: nvme, path: {tmp_path / 'kv'}, capacity: 16MiB, store_budget: 8MiB"
    stack, page = Path(stack_file(tmp_path, tier, capacity="256KiB")), tmp_path / "page.html"
    stack.write_text(f"{stack.read_text()}prefill: {{tokens_per_s: {1 << 40}}}\n")
    chats = ["--concurrency", "1", "--requests", "15", *CHATS]
    assert main(["replay", str(stack), *chats]) == 0
    assert main(["replay", str(stack), "--report", str(page), *chats]) == 0, "nvme has all blocks"
    assert re.search("not loaded +.* the load would have ended after", capsys.readouterr().out)
    assert "the load would have ended after the engine had computed the block" in parsed(page).main


def test_a_page_shows_hostile_names_as_text(
    tmp_path: Path, hostile: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LINE_EVERY_S", math.inf)  # lines of progress, on a busy machine
    directory = tmp_path / HOSTILE.replace("/", "")
    directory.mkdir()
    stack = stack_file(directory, "type: hostile", capacity="256KiB")
    page = directory / "page.html"
    assert main(["replay", stack, "--report", str(page), *CHATS]) == 0
    text = page.read_text("utf-8").replace("://", "")
    assert "&lt;script&gt;" in text
    found = Parsed(text)
    assert not {"script", "img"} & set(found.tags)
    assert capsys.readouterr().err == ""


def test_elements_escape_all_that_is_no_html() -> None:
    assert element("a", HOSTILE, title=HOSTILE).count("<") == 2
    assert str(table([HOSTILE], [[HOSTILE]])).count("script") == 4
    assert "<script" not in table([HOSTILE], [[HOSTILE]])
    assert element("b", Html("<i>x</i>"), "<") == "<b><i>x</i>&lt;</b>"


def replayed(run: Run, config: StackConfig | dict[str, object], *, is_ended: bool) -> str:
    """Replay a few chats, or nothing if it is ended at once, and return the page."""
    with open_engine_stack(config) as stack:
        sampler = Sampler(stack.manager.counters)
        sampler.start()
        requests = ChatWorkload(chats=2, turns=2, active_chats=1).requests()
        report = replay(stack.manager, stack.kv_view, requests, should_stop=lambda: is_ended, on_progress=sampler.note)
        sampler.finish()
    return replay_page(run, report, sampler, ReplaySettings(), "chats")


def test_a_page_has_no_secret_of_the_stack_or_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    markers = {name: new_marker() for name in ("password", "variable", "key", "url", "command")}
    sheet = Sheet(markers)
    monkeypatch.setenv("PLANTED", markers["variable"])
    config = load_config(
        stack_of(
            {"type": "redis", "url": f"redis://user:{markers['url']}@h:1"},
            {"type": "redis", "name": "second", "url": "redis://h:1", "password": markers["password"]},
            {
                "type": "memory",
                "capacity": "1MiB",
                "codec": "aes-256-gcm",
                "encryption": {"keys": {1: markers["key"]}},
            },
            namespace={"model": "m", "tenant": "${PLANTED}"},
        )
    )
    arguments = ["replay", "stack.yaml", f"--trace=http://u:{markers['command']}@h/x?sig={markers['command']}"]
    run = Run("stack.yaml", arguments, config, datetime.now(UTC))
    page = replayed(run, stack_of(blocks=64), is_ended=False)
    sheet.note("the page", page)
    assert sheet.findings() == []
    assert "1MiB" in page
    assert "***" in page


@pytest.mark.slow
def test_a_replay_that_was_ended_at_once_has_a_page(tmp_path: Path) -> None:
    config = load_config(stack_file(tmp_path, "type: memory, capacity: 1MiB", capacity="256KiB"))
    run = Run("stack.yaml", ["replay", "stack.yaml"], config, datetime.now(UTC))
    page = tmp_path / "page.html"
    page.write_text(replayed(run, config, is_ended=True))
    assert parsed(page).tags.count("svg") == len(PLOTS)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing/page.html", "page.html': No such file or directory"),
        (".", "': Is a directory"),
        ("page.html", "pip install 'matplotlib>="),
    ],
)
def test_a_page_that_cannot_be_made_is_known_before_anything_is_measured(
    tmp_path: Path,
    replace_module: ReplaceModule,
    capsys: pytest.CaptureFixture[str],
    target: str,
    message: str,
) -> None:
    stack = stack_file(tmp_path, f"type: nvme, path: {tmp_path / 'cache'}, capacity: 64MiB")
    if target == "page.html":
        replace_module("matplotlib")
    assert main(["replay", stack, "--report", os.path.join(tmp_path, target)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_samples_are_bounded_and_reach_from_the_start_to_the_end() -> None:
    clock, asked = ManualClock(), 0

    def counters() -> dict[str, dict[str, int]]:
        nonlocal asked
        asked += 1
        return {"cpu": {"stored_bytes_total": asked}}

    sampler, tally = Sampler(counters, clock), Tally(hits={"cpu": 0})
    sampler.start()
    for _ in range(100_000):
        clock.advance(0.001)
        tally.requests += 1
        sampler.note(tally)
    clock.advance(5)
    sampler.finish()
    seconds = [sample.seconds for sample in sampler.samples]
    assert SAMPLES_MAX / 2 - 1 <= len(seconds) <= SAMPLES_MAX
    assert seconds[0] == 0
    assert seconds[-1] == pytest.approx(105)
    assert seconds == sorted(seconds)
    assert max(b - a for a, b in pairwise(seconds[:-1])) < 2.6, "evenly"
    assert sampler.samples[-1].requests == 100_000
    assert asked < 2_000, "most steps take no sample"
