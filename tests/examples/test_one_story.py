"""Redis is killed in the middle of a replay: Prometheus, status, `top`, explanations and report say the same."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support.prometheus import Labels, Prometheus, missing_prometheus, panels, wait_for
from tests.support.redis_servers import RedisServer, redis_server
from tiered_kv._cli.output import Status
from tiered_kv._cli.report.page import Run
from tiered_kv._cli.report.plots import Sampler
from tiered_kv._cli.report.replay_page import replay_page
from tiered_kv.cli import main
from tiered_kv.metrics.instruments import count_of
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.servers import free_port
from tiered_kv.workload.replay import ReplaySettings, replay
from tiered_kv.workload.request import ChatWorkload
from tiered_kv.workload.tally import ReplayReport

__all__ = ["redis_server"]

BLOCK_BYTES = 8 << 10
REQUESTS = 2000
BEFORE_S = 4.0
AFTER_S = 5.0
STEP_S = 0.004
LATE_S = 3.0
"""What one second between two scrapes, and a busy machine, may put between two clocks."""

NONE: list[str] = []
Counters = Mapping[str, Mapping[str, Any]]  # Any: as `Stack.counters`


@dataclass
class Story:
    """The run, after it: nothing counts any more."""

    stack: Stack
    prometheus: Prometheus
    sampler: Sampler
    began: float  # seconds since 1970
    killed: float
    report: ReplayReport | None = None

    def ask(self, path: str) -> Any:  # Any: JSON
        """Return what the stack's own server says."""
        assert self.stack.server is not None
        with urlopen(f"http://{self.stack.server.host}:{self.stack.server.port}{path}", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def played_story(folder: Path, redis: RedisServer) -> Iterator[Story]:
    """Replay chats over memory, nvme and redis, and kill redis after `BEFORE_S`."""
    port = free_port()
    config = {
        "namespace": {"model": "example/story"},
        "block": {"bytes": BLOCK_BYTES, "tokens": 512},
        "primary": {"capacity": "1MiB"},
        "secondary": [
            {"type": "memory", "capacity": "2MiB"},
            {"type": "nvme", "path": str(folder / "nvme"), "capacity": "4MiB"},
            {"type": "redis", "url": redis.url, "ttl": "1h", "timeout": "500ms", "connect_timeout": "500ms"},
        ],
        "metrics": {"listen": f"127.0.0.1:{port}"},
    }
    with open_stack(config) as stack, Prometheus(folder, port) as prometheus:
        story = Story(stack, prometheus, Sampler(stack.counters), time.time(), 0.0)

        def should_stop() -> bool:
            time.sleep(STEP_S)
            if not story.killed and time.time() > story.began + BEFORE_S:
                redis.kill()
                story.killed = time.time()
            return bool(story.killed) and time.time() > story.killed + AFTER_S

        chats = ChatWorkload(chats=REQUESTS, turns=6, active_chats=48, turn_blocks=4)
        story.sampler.start()
        settings = ReplaySettings(concurrency=4, request_timeout_s=2.0)
        story.report = replay(
            stack.manager,
            stack.kv_view,
            chats.requests(),
            settings,
            should_stop=should_stop,
            on_progress=story.sampler.note,
        )
        stack.manager.drain_jobs(5.0)
        story.sampler.finish()
        yield story


@pytest.mark.slow
@pytest.mark.usefixtures("drawing_library")
@pytest.mark.skipif(bool(missing_prometheus()), reason=missing_prometheus() or "it is")
def test_everybody_tells_the_same_story(
    tmp_path: Path, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with played_story(tmp_path, redis_server) as story:
        wait_for(lambda: differences(story, story.stack.counters()), NONE)
        counters = story.stack.counters()
        check_status(story, counters)
        check_top(story, counters, capsys)
        check_replay(story, counters)
        check_report(story, counters)
        check_explanations(story, counters, capsys)
        check_panels(story)
        assert "TieredKVBreakerOpen" in story.prometheus.firing()


def differences(story: Story, counters: Counters) -> list[str]:
    """Return which numbers of Prometheus are not those of the counters."""
    wrong = []
    for name in ("stored_bytes_total", "loaded_bytes_total", "breaker_state", "breaker_opened_total"):
        expected = {tier: counted[name] for tier, counted in counters.items() if name in counted}
        seen = {dict(labels)["tier"]: value for labels, value in story.prometheus.query(f"tiered_kv_{name}").items()}
        wrong += [] if seen == expected else [f"{name}: {seen} and not {expected}"]
    for name, label in (("blocks_total", "result"), ("misses_total", "reason"), ("skipped_blocks_total", "reason")):
        numbers = {(t, what): n for t, counted in counters.items() for what, n in counted.get(name, {}).items()}
        found = {
            (dict(labels)["tier"], dict(labels)[label]): value
            for labels, value in story.prometheus.query(f"tiered_kv_{name}").items()
        }
        wrong += [] if found == numbers else [f"{name}: {found} and not {numbers}"]
    return wrong


def check_status(story: Story, counters: Counters) -> None:
    """The status has the same counters, and says when the breaker opened: after the kill, as Prometheus saw."""
    status = story.ask("/status")
    for tier in status["tiers"]:
        for name in ("stored_bytes_total", "misses_total", "skipped_blocks_total"):
            assert tier["counters"].get(name) == counters[tier["name"]].get(name)
    (notice, *_) = [each for each in status["notices"] if each["tier"] == "redis" and "breaker" in each["what"]]
    assert story.killed - LATE_S < notice["time"]
    opened = first_problem(story.prometheus.history("tiered_kv_breaker_state", story.began, time.time()))
    assert opened.keys() == {"redis"}
    assert 0 < opened["redis"] - story.killed < LATE_S


def check_top(story: Story, counters: Counters, capsys: pytest.CaptureFixture[str]) -> None:
    """`top` has the same reasons, and the same tier out of use."""
    assert story.stack.server is not None
    capsys.readouterr()
    status = main(["top", f"http://127.0.0.1:{story.stack.server.port}", "--once", "--json", "--interval", "100ms"])
    view = json.loads(capsys.readouterr().out)
    assert status == Status.FOUND
    assert [tier["name"] for tier in view["tiers"] if tier["breaker"] not in ("", "closed")] == ["redis"]
    shown = {(each["tier"], each["what"], each["reason"]): each["blocks_total"] for each in view["reasons"]}
    for what, name in (("miss", "misses_total"), ("skip", "skipped_blocks_total")):
        numbers = {(t, what, why): n for t, counted in counters.items() for why, n in counted.get(name, {}).items()}
        assert {key: total for key, total in shown.items() if key[1] == what} == numbers


def first_problem(series: Mapping[Labels, list[tuple[float, float]]]) -> dict[str, float]:
    """Return when the breaker of each tier was first seen not to be closed, where it was."""
    times = {dict(labels)["tier"]: [at for at, value in values if value] for labels, values in series.items()}
    return {tier: at[0] for tier, at in times.items() if at}


def check_replay(story: Story, counters: Counters) -> None:
    """Who served the blocks found them in the tiers that the counters name, and the page has these numbers."""
    assert story.report is not None
    assert counters["cpu"]["unexplained_blocks_total"] == 0
    for tier, traffic in story.report.tiers.items():
        assert counters[tier]["blocks_total"].get("hit", 0) == traffic.hits, tier
    run = Run("story.yaml", (), story.stack.config, datetime.now(UTC))
    page = replay_page(run, story.report, story.sampler, ReplaySettings(), "chats", ())
    for number in (story.report.tiers["redis"].hits, counters["redis"]["misses_total"]["breaker"]):
        assert f"{number:,}" in page


def check_report(story: Story, counters: Counters) -> None:
    """The report's samples end with the same numbers, and its breakers opened at the same time."""
    samples = story.sampler.samples
    for tier in counters:
        for name in ("stored_bytes_total", "loaded_bytes_total", "skipped_blocks_total"):
            assert samples[-1].count(tier, name) == count_of(counters, tier, name)
    opened = next(sample.seconds for sample in samples if sample.count("redis", "breaker_state"))
    assert 0 < story.began + opened - story.killed < LATE_S
    assert not any(sample.count(tier, "breaker_state") for sample in samples for tier in ("memory", "nvme"))


def check_explanations(story: Story, counters: Counters, capsys: pytest.CaptureFixture[str]) -> None:
    """The last requests missed blocks in redis because its breaker was open, and each is among those counted."""
    explained = story.ask("/explain?last=20")["requests"]
    assert explained
    because = [request["misses"].get("redis", {}) for request in explained]
    assert any("breaker" in reasons for reasons in because)
    assert sum(reasons.get("breaker", 0) for reasons in because) <= counters["redis"]["misses_total"]["breaker"]
    assert story.stack.server is not None
    assert main(["why", f"127.0.0.1:{story.stack.server.port}", "--last"]) == Status.OK
    assert f"request {explained[0]['request']}, ended" in capsys.readouterr().out


def check_panels(story: Story) -> None:
    """The panels show it: redis brings nothing any more, its breaker is open, and this is why."""
    shown = {title: [story.prometheus.query(query) for query in queries] for title, queries in panels().items()}

    def of_redis(title: str, reason: str = "") -> float:
        wanted = {("tier", "redis")} | ({("reason", reason)} if reason else set())
        return max((value for each in shown[title] for labels, value in each.items() if wanted <= labels), default=0.0)

    assert of_redis("Breakers") > 0
    assert of_redis("Blocks not stored", "breaker") > 0
    assert of_redis("Why blocks were missed", "breaker") > 0
    assert of_redis("Blocks that failed") > 0
    hits = story.prometheus.history('tiered_kv_blocks_total{tier="redis",result="hit"}', story.began, time.time())
    (values,) = hits.values()
    assert values[-1][1] == next(value for at, value in values if at > story.killed + LATE_S), "no hit after the kill"
