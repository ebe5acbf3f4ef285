"""`tiered-kv doctor`: its advice for stacks in which each fault was made true, and for one without a fault."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command import Command
from tests.support.faulty import FourMethodTier, Gate, HeldJobsTier
from tests.support.pages import undescribed
from tests.support.stacks import Register, stack_of
from tests.support.status_server import StatusServer, response
from tiered_kv import open_stack
from tiered_kv.cli.doctor import RULES
from tiered_kv.cli.main import main
from tiered_kv.stack.open import Stack
from tiered_kv.testing.faults import FailingTier
from tiered_kv.testing.rig import make_keys

BLOCK_BYTES = 4096
WAIT_S = 30.0
Advised = dict[str, dict[str, Any]]  # Any: JSON


@contextmanager
def served(*tiers: dict[str, object], **settings: Any) -> Iterator[tuple[Stack, str]]:  # Any: of `stack_of`
    """Open a stack with metrics; yield it with its address."""
    with open_stack(stack_of(*tiers, metrics={"listen": "127.0.0.1:0"}, **settings)) as stack:
        assert stack.server is not None
        yield stack, f"127.0.0.1:{stack.server.port}"


def prompts_of(names: Iterable[object], blocks: int = 8) -> list[list[bytes]]:
    return [[bytes(key) for key in make_keys(blocks, f"prompt {name}")] for name in names]


def serve(stack: Stack, prompts: Sequence[Sequence[bytes]], *, wait_s: float = WAIT_S) -> None:
    """Load the prefix of each prompt, and store the rest, as an engine does."""
    for keys in prompts:
        out = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
        found = stack.get(keys, out, timeout=WAIT_S)
        stack.put(keys[found:], out[found:], timeout=wait_s)
        stack.flush(wait_s)
    stack.explain(prompts[0])  # once the history has taken all that was asked for


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "doctor")


def limits(doctor: Command, *arguments: str, status: int = 1) -> Advised:
    """Return the advice by name, and check that the text has the same."""
    result = doctor.json(*arguments, status=status)
    text = doctor.out(*arguments, status=status)
    for each in result["limits"]:
        assert each["sentence"] in text
        assert each["setting"] in text
    return {each["name"]: each for each in result["limits"]}


def test_a_stack_without_a_fault_gets_no_advice_and_its_gain_is_told(doctor: Command) -> None:
    with served({"type": "memory", "capacity": "64MiB"}, blocks=64, block={"tokens": 16}) as (stack, address):
        serve(stack, prompts_of([*range(4)] * 6))
        assert limits(doctor, address, status=0) == {}
        text = doctor.out(f"http://{address}/metrics")
    assert "did not have to compute 2,560 tokens" in text
    assert "160 of 192 blocks that requests asked for were hits (83%): cpu 160, memory 0." in text
    assert "Nothing limits it" in text


def test_a_memory_that_is_too_small_is_told_with_what_twice_of_it_would_hit(doctor: Command) -> None:
    with served(blocks=16) as (stack, address):
        serve(stack, prompts_of([*range(3)] * 6))
        found = limits(doctor, address)["too_small"]
    assert found["tier"] == "cpu"
    assert "twice its 64KiB would have hit 120 more of" in found["sentence"]
    assert "`primary.capacity`" in found["setting"]


def test_a_disk_that_is_too_small_is_told_too(doctor: Command) -> None:
    ram = {"type": "memory", "name": "disk", "capacity": 32 * BLOCK_BYTES}
    with served(ram, blocks=8) as (stack, address):
        serve(stack, prompts_of([*range(6)] * 6))
        found = doctor.json(address, status=1)["limits"]
    assert "`capacity` of disk" in next(each["setting"] for each in found if each["tier"] == "disk")


def test_prompts_without_common_prefixes_are_told(doctor: Command) -> None:
    with served(blocks=400) as (stack, address):
        serve(stack, prompts_of(range(20)))
        found = limits(doctor, address)
    assert found.keys() == {"no_common_prefixes"}
    assert "160 of 160 blocks" in found["no_common_prefixes"]["sentence"]
    assert "at their beginning" in found["no_common_prefixes"]["setting"]


def test_a_budget_that_skips_stores_is_told(doctor: Command, register: Register) -> None:
    gate = Gate()
    gate.close()

    class Held(HeldJobsTier):
        def __init__(self, spec: object, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type), gate)

    register("held", Held)
    with served({"type": "held", "store_budget": 8 * BLOCK_BYTES}, blocks=400) as (stack, address):
        serve(stack, prompts_of(range(20)), wait_s=0.0)
        found = limits(doctor, address)["budget"]
        gate.open()
    assert "held did not get 152 of" in found["sentence"]
    assert "its store budget of 32KiB was used up" in found["sentence"]
    assert "`store_budget` of held" in found["setting"]


def test_a_disk_that_is_slower_than_computing_is_told(doctor: Command, tmp_path: Path) -> None:
    disk: dict[str, object] = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    prompts = prompts_of(range(20))
    with served(disk, blocks=400) as (stack, _):
        serve(stack, prompts)
    with served(disk, blocks=400, prefill={"tokens_per_s": 1 << 40}) as (stack, address):
        serve(stack, prompts)
        found = limits(doctor, address)["too_slow"]
    assert found["tier"] == "nvme"
    assert "A block takes" in found["sentence"]
    assert "`prefill: off`" in found["setting"]


def test_blocks_whose_names_change_with_each_start_are_told(doctor: Command, tmp_path: Path) -> None:
    disk: dict[str, object] = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    for seed in ("first start", "second start"):
        with served(disk, blocks=400) as (stack, address):
            serve(stack, prompts_of([f"{seed} {number}" for number in range(20)]))
            found = limits(doctor, address)
    assert "nvme began with 160 blocks of earlier starts, and none of the 160" in found["other_keys"]["sentence"]
    assert "PYTHONHASHSEED" in found["other_keys"]["setting"]


def test_a_namespace_that_changes_with_each_start_is_told(doctor: Command, tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    disk: dict[str, object] = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    for start in ("monday", "tuesday"):
        namespace = {"model": "m", "extra": {"start": start}}
        with served(disk, blocks=64, namespace=namespace) as (stack, address):
            serve(stack, prompts_of([*range(2)] * 8))
            file.write_text(json.dumps(stack_of(disk, namespace=namespace, metrics={"listen": address})))
            found = limits(doctor, str(file), status=int(start == "tuesday"))
            of_engine = limits(doctor, address, "--stack", str(file), status=int(start == "tuesday"))
    assert "another value of `namespace.extra.start`" in found["namespaces"]["sentence"]
    assert "keep `namespace.extra.start` the same in each start" in found["namespaces"]["setting"]
    assert of_engine == found


def test_a_tier_that_fails_is_told(doctor: Command, register: Register) -> None:
    class Failing(FailingTier):
        def __init__(self, spec: object, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type), failing=True)

    register("failing", Failing)
    with served({"type": "failing", "breaker_failures": 1000}, blocks=400) as (stack, address):
        serve(stack, prompts_of(range(20)))
        found = limits(doctor, address)["failures"]
        assert "failing failed for 160 of 160 blocks (100%), most often by injected" in found["sentence"]
    with served({"type": "failing", "breaker_cooldown": "1h"}, blocks=400) as (stack, address):
        serve(stack, prompts_of(range(20)))
        assert "failing is out of use" in limits(doctor, address)["out_of_use"]["sentence"]


def test_a_stack_without_requests_or_history_says_so(doctor: Command) -> None:
    with served() as (_, address):
        assert limits(doctor, address).keys() == {"no_traffic"}
    with served(history=0, blocks=64) as (stack, address):
        stack.put(prompts_of([1])[0], np.zeros((8, BLOCK_BYTES), np.uint8))
        assert limits(doctor, address).keys() == {"no_history"}


def of_engine(text: str) -> bytes:
    return response("\n".join(line.strip() for line in text.splitlines()).encode())


def test_an_engine_s_own_metrics_are_read_over_all_engines(doctor: Command) -> None:
    text = """
        # HELP vllm:prompt_tokens_total Number of prefill tokens processed.
        vllm:prompt_tokens_total{engine="0",model_name="a\\"b}"} 6000.0
        vllm:prompt_tokens_total{engine="1",model_name="a"} 4000.0
        tiered_kv_restored_tokens_total{engine="0",model_name="a",tier="cpu"} 2000.0
        tiered_kv_restored_tokens_total{engine="1",model_name="a",tier="cpu"} 500.0 1700000000000
        tiered_kv_loaded_blocks_total{engine="0",model_name="a",tier="cpu"} 100.0
        tiered_kv_compute_block_seconds{engine="0",model_name="a",tier="cpu"} 0.5
        tiered_kv_blocks_total{engine="0",result="hit",tier="cpu"} 150.0
        tiered_kv_blocks_total{engine="0",result="miss",tier="cpu"} 50.0
        tiered_kv_misses_total{engine="0",reason="absent",tier="cpu"} NaN
    """
    with StatusServer(lambda: of_engine(text)) as server:
        result = doctor.json(f"http://{server.address}/metrics")
    assert result["limits"] == []
    assert "2,500 tokens, 25% of 10,000 tokens of prompts. That is at least 50s of its work." in result["gains"][0]
    assert "150 of 200 blocks that requests asked for were hits (75%): cpu 150." in result["gains"][1]


def test_with_one_miss_the_share_of_hits_is_not_told_as_all(doctor: Command) -> None:
    text = """
        tiered_kv_blocks_total{result="hit",tier="cpu"} 900.0
        tiered_kv_blocks_total{result="miss",tier="cpu"} 1.0
    """
    with StatusServer(lambda: of_engine(text)) as server:
        said = doctor.json(f"http://{server.address}/metrics")["gains"]
    assert "900 of 901 blocks that requests asked for were hits (99%): cpu 900." in said


@pytest.mark.parametrize(
    ("answered", "problem"),
    [
        (b"", "no answer from http://ADDRESS/metrics: the answer is not HTTP"),
        (
            response(b"no", "HTTP/1.1 404 Not Found"),
            "ADDRESS/metrics: it answers with HTTP status",
        ),
        (response(b"vllm:prompt_tokens_total 5\n"), "ADDRESS/metrics has no counter of Tiered KV"),
        (response(b"\xff\x00 tiered_kv_ {{{ \x1b[2J"), "has no counter of Tiered KV"),
    ],
)
def test_what_is_no_engine_with_a_stack_is_an_error(
    answered: bytes, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with StatusServer(lambda: answered) as server:
        assert main(["doctor", server.address]) == 2
        captured = capsys.readouterr()
        assert problem.replace("ADDRESS", server.address) in captured.err
    assert captured.out == ""


def test_every_field_and_advice_is_described(doctor: Command) -> None:
    with served() as (_, address):
        result = doctor.json(address, status=1)
    names = {*result, *result["limits"][0], *(rule.name for rule in RULES), "no_traffic", "no_history", "namespaces"}
    assert undescribed(names, "reference/command.md", "doctor") == set()


def test_an_engine_that_does_not_run_is_named_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://127.0.0.1:9/metrics"]) == 2
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9/metrics: connection refused; start the engine, or give the address" in error
