"""`tiered-kv simulate`: its options, what it prints, and what it says of mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.pages import shown, undescribed
from tests.support.stacks import stack_file
from tiered_kv.cli.main import main
from tiered_kv.errors import ConfigError
from tiered_kv.workload.simulation import load_prices

ROOT = Path(__file__).parents[2]
CHATS = ["--chats", "20", "--turns", "4", "--active-chats", "10", "--turn-blocks", "3"]
EXAMPLE = str(ROOT / "examples/all_tiers.yaml")
TRACE = [
    {"timestamp": at * 1000, "input_length": 1024, "output_length": 1, "hash_ids": ids}
    for at, ids in enumerate([[1, 2], [1, 3], [1, 2], [4, 5], [1, 3]])
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, TRACE)))
    return str(file)


@pytest.fixture
def stack(tmp_path: Path) -> str:
    nvme = f"type: nvme, path: {tmp_path / 'kv'}, capacity: 64MiB"
    return stack_file(tmp_path, nvme, "type: redis, url: 'redis://nowhere.invalid'", capacity="256KiB")


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "simulate")


def test_policies_and_sizes_of_a_trace(simulate: Command, trace: str) -> None:
    result = simulate.json("--trace", trace, "--capacity", "1,3,100", "--policy", "lru,arc")
    assert (result["requests"], result["blocks"], result["distinct_blocks"]) == (5, 10, 5)
    rates = {(each["policy"], each["capacity_blocks"]): each["hit_rate"] for each in result["results"]}
    assert [rates["lru", size] for size in (1, 3, 100)] == [0.0, 0.4, 0.5]
    assert rates["arc", 100] == 0.5
    assert result["lru_curve"][0] == [2, 0.2]
    assert result["lru_curve"][-1] == [5, 0.5]
    assert simulate.json("--trace", trace, "--requests", "3")["blocks"] == 6


def test_hints_come_from_the_trace_or_from_its_sessions(simulate: Command, tmp_path: Path) -> None:
    file = tmp_path / "hinted.jsonl"
    file.write_text("\n".join(json.dumps({**line, "hints": {"skip": "store"}}) for line in TRACE))
    rates = {
        hints: simulate.json("--trace", str(file), "--capacity", "100", "--hints", hints)["results"][0]["hit_rate"]
        for hints in ("from-trace", "from-sessions", "none")
    }
    assert rates == {"from-trace": 0.0, "from-sessions": 0.5, "none": 0.5}
    file.write_text(json.dumps({**TRACE[0], "hints": {"skip": "all"}}))
    assert "hints: skip: expected 'store'" in simulate.err("--trace", str(file))


def test_policies_of_the_built_in_chats(simulate: Command) -> None:
    words = simulate.out(*CHATS, "--policy", "lru,arc", "--capacity", "50,100").split()
    assert {"blocks", "lru", "arc", "50", "100"} <= set(words)
    result = simulate.json(*CHATS)
    distinct = result["distinct_blocks"]
    assert [each["capacity_blocks"] for each in result["results"]][-2:] == [distinct >> 1, distinct]


def test_a_stack_is_simulated_and_not_opened(simulate: Command, stack: str, tmp_path: Path) -> None:
    (outcome,) = simulate.json(stack, *CHATS, "--policy", "lru")["results"]
    assert list(outcome["tiers"]) == ["cpu", "nvme", "redis"]
    assert outcome["tiers"]["nvme"]["hits"] > 0
    assert outcome["tiers"]["redis"]["capacity_bytes"] is None
    assert not (tmp_path / "kv").exists()
    assert {"cpu", "nvme", "redis", "misses"} <= set(simulate.out(stack, *CHATS, "--policy", "lru").split())


def test_a_stack_with_other_sizes_policies_and_limits(simulate: Command, stack: str) -> None:
    sizes = ["--capacity", "64,1MiB", "--policy", "lru,arc", "--limit", "redis=1MiB", "--concurrency", "2"]
    results = simulate.json(stack, *CHATS, *sizes)["results"]
    named = [(each["policy"], each["capacity_blocks"]) for each in results]
    assert named == [("lru", 64), ("lru", 256), ("arc", 64), ("arc", 256)]
    assert {each["tiers"]["redis"]["capacity_bytes"] for each in results} == {1 << 20}
    output = simulate.out(stack, *CHATS, "--capacity", "100000,100001")
    assert {"100,000 blocks", "100,001 blocks"} <= set(re.findall(r"[0-9,]+ blocks", output))
    assert all(name in output for name in ("hits", "cpu", "nvme", "redis")), "one table compares them"


def test_a_stack_is_compared_with_other_sizes_and_policies_and_the_cheapest_good_one_is_named(
    simulate: Command, priced: list[str]
) -> None:
    result = simulate.json(*priced)
    sizes, policies = {32, 64, 128}, {"lru", "arc", "density"}
    rates = {(each["policy"], each["capacity_blocks"]): each["hit_rate"] for each in result["results"]}
    assert {policy for policy, _ in rates} == policies
    assert {size for _, size in rates} == sizes
    bills = {
        (each["policy"], each["capacity_blocks"]): sum(cost["total"] for cost in each["costs"].values())
        for each in result["results"]
    }
    chosen = result["cheapest"]["policy"], result["cheapest"]["capacity_blocks"]
    good = [each for each, rate in rates.items() if rate >= 0.99 * max(rates.values())]
    assert bills[chosen] == min(bills[each] for each in good)
    lines = simulate.out(*priced).splitlines()
    told = f"The cheapest within 1 % of the best: {chosen[0]} with {chosen[1]:,} blocks"
    assert lines[0].startswith(told)
    assert "EUR a month" in lines[0]
    assert len([line for line in lines if " blocks (" in line]) >= 9


def test_without_prices_the_cheapest_has_the_least_memory(simulate: Command, stack: str) -> None:
    sizes = ["--capacity", "64MiB,32MiB", "--policy", "lru"]  # both hold all
    assert simulate.json(stack, *CHATS, *sizes)["cheapest"] == {"policy": "lru", "capacity_blocks": 8192}


def test_servers_behind_a_router(simulate: Command, stack: str) -> None:
    result = simulate.json(stack, *CHATS, "--servers", "3", "--router", "sticky", "--policy", "lru")
    assert (result["servers"], result["router"]) == (3, "sticky")
    (outcome,) = result["results"]
    assert [tier["storages"] for tier in outcome["tiers"].values()] == [3, 3, 1]
    assert outcome["busiest_share"] < 1
    assert "of blocks on the busiest" in simulate.out(stack, *CHATS, "--servers", "3", "--router", "prefix")


def test_the_engines_of_a_host_with_one_cache(simulate: Command, trace: str) -> None:
    options = ["--shared-host", "--engines", "2", "--trace", trace, "--capacity", "2,4", "--policy", "arc"]
    result = simulate.json(*options)
    assert result["engines"] == 2
    assert [(each["policy"], each["capacity_blocks"]) for each in result["results"]] == [("arc", 2), ("arc", 4)]
    assert all(0 <= each["private"] <= each["shared"] <= 1 for each in result["results"])
    assert "2 private caches" in simulate.out(*options)


@pytest.fixture
def priced(stack: str, tmp_path: Path) -> list[str]:
    """Options for a stack with prices."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\ntiers: {cpu: {gib_month: 3}, redis: {gib_read: 0.01, thousand_writes: 0.005}}")
    return [stack, *CHATS, "--prices", str(prices)]


def test_costs_by_tier(simulate: Command, priced: list[str]) -> None:
    result = simulate.json(*priced, "--policy", "lru")
    assert result["currency"] == "EUR"
    (outcome,) = result["results"]
    assert outcome["costs"]["cpu"]["total"] == pytest.approx(3 * 256 / 2**20)
    assert outcome["costs"]["redis"]["requests"] > 0
    assert "EUR a month" in simulate.out(*priced)


def test_the_examples_of_prices_can_be_used(simulate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("S3_ENDPOINT", "S3_KEY_ID", "S3_SECRET"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    prices = str(ROOT / "examples/prices.yaml")
    (outcome,) = simulate.json(
        EXAMPLE, *CHATS, "--servers", "4", "--router", "prefix", "--prices", prices, "--policy", "lru"
    )["results"]
    assert outcome["costs"].keys() == outcome["tiers"].keys()
    assert all(cost["total"] > 0 for cost in outcome["costs"].values())
    (tmp_path / "prices.yaml").write_text(shown("how-to/simulating.md")["prices.yaml"])
    assert load_prices(tmp_path / "prices.yaml", ["cpu", "nvme", "s3"]).tiers["s3"].thousand_writes == 0.005


def test_every_field_is_described(simulate: Command, priced: list[str], trace: str) -> None:
    of_stack = simulate.json(*priced)
    of_trace = simulate.json("--trace", trace)
    outcome = of_stack["results"][0]
    objects = [of_stack, outcome, outcome["tiers"]["nvme"], outcome["costs"]["cpu"], of_trace, of_trace["results"][0]]
    fields = {field for each in objects for field in each}
    assert undescribed(fields, "reference/command.md", "simulate") == set()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "best"], "there is no policy 'best'"),
        (["--policy", "lru,"], "--policy: expected names of policies"),
        (["--capacity", "0"], "--capacity: expected room for at least 1 blocks, found '0'"),
        (["--capacity", "10,many"], "--capacity: expected a size"),
        (["--capacity", "4GiB"], "--capacity: expected a number of blocks, found '4GiB'"),
        (["--servers", "2"], "--servers needs a STACK"),
        (["--prices", "x"], "--prices needs a STACK"),
        (["--trace", "/nonesuch"], "cannot read the trace /nonesuch"),
        (["STACK", "--capacity", "1"], "--capacity: expected room for at least 2 blocks"),
        (["--concurrency", "2"], "--concurrency needs a STACK or --shared-host"),
        (["--engines", "2"], "--engines needs --shared-host"),
        (["--shared-host", "--capacity", "3"], "--capacity: expected a block for each engine, found 3"),
        (["STACK", "--shared-host"], "--shared-host is not with STACK"),
        (["STACK", "--policy", "best"], "there is no policy 'best'"),
        (["STACK", "--servers", "1001"], "servers: expected at most 1000"),
        (["STACK", "--limit", "tape=1GiB"], "there is no tier 'tape'; there are: cpu, nvme, redis"),
        (["STACK", "--limit", "cpu=0"], "--limit: the primary tier has --capacity"),
        (["STACK", "--limit", "nvme=1KiB"], "secondary.0.capacity: "),
        (["STACK", "--prices", "/nonesuch"], "the file of prices cannot be read"),
        (["/nonesuch.yaml"], "/nonesuch.yaml: the stack's file cannot be read: No such file"),
    ],
)
def test_mistakes_are_reported(simulate: Command, stack: str, arguments: list[str], problem: str) -> None:
    given = [stack if argument == "STACK" else argument for argument in arguments]
    chats = [] if "--trace" in given else CHATS
    output = simulate.err(*given, *chats)
    assert output.startswith("error: ")
    assert problem in output


@pytest.mark.parametrize("limit", ["redis", "redis=much", "redis=-1"])
def test_an_invalid_limit_is_wrong_usage(capsys: pytest.CaptureFixture[str], limit: str) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--limit", limit])
    assert "expected a size such as" in capsys.readouterr().err


def test_a_trace_without_a_block_is_an_error(simulate: Command, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text(json.dumps({**TRACE[0], "hash_ids": []}))
    assert str(tmp_path / "empty.jsonl") in simulate.err("--trace", str(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty: expected a mapping with currency and tiers"),
        ("currency: USD", "tiers: this key is required"),
        ("tiers: {cpu: {gib_month: -1}}", "tiers.cpu.gib_month: expected a value greater"),
        ("tiers: {cpu: {gib_month: .inf}}", "tiers.cpu.gib_month: "),
        ("tiers: {cpu: {gib_month: 1.0e+300}}", "tiers.cpu.gib_month: expected a value less than or equal to"),
        ("tiers: {cpu: {gib: 1}}", "tiers.cpu.gib: unknown key"),
    ],
)
def test_prices_that_cannot_be_used_are_reported(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_prices(tmp_path / "prices.yaml", ["cpu", "nvme"])
    assert problem in str(raised.value)


def test_a_price_for_no_tier_is_an_error(simulate: Command, stack: str, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("tiers: {nvm: {gib_month: 1}}")
    output = simulate.err(stack, *CHATS, "--prices", str(tmp_path / "prices.yaml"))
    assert "no tier of this name (did you mean 'nvme'?)" in output


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a policy that fails."""
    (tmp_path / "failing_policy.py").write_text("from tests.workload.test_trace_fields import Failing as Policy\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "failing_policy:Policy"


@pytest.mark.parametrize("options", [[], ["--shared-host", "--engines", "2"], ["STACK"]])
def test_a_failed_policy_is_said_by_the_table_the_message_and_the_status(
    simulate: Command, capsys: pytest.CaptureFixture[str], stack: str, failing: str, options: list[str]
) -> None:
    given = [stack if option == "STACK" else option for option in options]
    assert main(["simulate", *given, *CHATS, "--policy", f"{failing},lru", "--capacity", "64"]) == 1
    said = capsys.readouterr()
    assert "failed" in said.out
    assert f"the policy {failing} failed, so lru took its place: use raised" in said.err
    result = simulate.json(*given, *CHATS, "--policy", f"{failing},lru", "--capacity", "64", status=1)
    assert [bool(each["policy_error"]) for each in result["results"]] == [True, False]
    assert result.get("cheapest", {"policy": "lru"})["policy"] == "lru"
    simulate.json(*given, *CHATS, "--policy", "lru", "--capacity", "64")


def test_a_smaller_memory_is_not_advised_because_a_slower_tier_has_its_blocks(simulate: Command, stack: str) -> None:
    sizes = ["--capacity", "160,8192,16384", "--policy", "lru"]
    result = simulate.json(stack, *CHATS, *sizes)
    rates = [each["hit_rate"] for each in result["results"]]
    assert rates[0] > 0.99 * max(rates), "nvme has what memory has not"
    assert result["cheapest"]["capacity_blocks"] == 8192, "with more, memory serves no more"
    output = simulate.out(stack, *CHATS, *sizes)
    assert re.search(r"The cheapest .* lru with 8,192 blocks .* hits of any tier \([0-9.]+% of cpu\)", output)
    assert "hits of any tier" in output.split("\n", 2)[2], "so says the table"


def test_how_a_trace_was_understood_is_said(
    simulate: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    assert "5 requests in 4 s, blocks of 512 tokens" in simulate.out("--trace", trace)
    assert simulate.json("--trace", trace)["block_tokens"] == 512
    file = tmp_path / "small.yaml"
    settings = "namespace: {model: any}\nprimary: {capacity: 1MiB}\nblock: {bytes: 4KiB, tokens: "
    for tokens, is_noted in ((16, True), (512, False)):
        file.write_text(f"{settings}{tokens}}}\n")
        assert main(["simulate", str(file), "--trace", trace]) == 0
        assert ("blocks have 512 tokens, the stack's 16" in capsys.readouterr().err) is is_noted
