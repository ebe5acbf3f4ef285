"""What plugins of engines share: an environment, what a token costs it, and the user's part of a namespace."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path

import pytest

from tiered_kv.config.reading import fill_variables
from tiered_kv.config.validation import validate
from tiered_kv.engines.facts import computing_packages, counting_variables, files_digest
from tiered_kv.engines.ignored import ignored_settings
from tiered_kv.engines.prefill_meter import PREFILL_SHARE_MIN, STEPS_MAX, PrefillMeter, TokenCost
from tiered_kv.engines.settings import UserModelNamespace
from tiered_kv.errors import ConfigError
from tiered_kv.testing.control import ManualClock

ROOT = Path(__file__).parents[2]
COUNTS = re.compile("^(ENGINE|TRITON)_")
IGNORED = frozenset({"ENGINE_THREADS"})
PLUGINS = re.compile(r"^engine\.")


def counted(**variables: str) -> dict[str, str]:
    return counting_variables(COUNTS, IGNORED, variables)


def test_a_variable_that_nobody_knows_counts_as_it_is_spelled() -> None:
    assert counted(ENGINE_NEW="On", TRITON_NEW="", HOME="/") == {"ENGINE_NEW": "On", "TRITON_NEW": ""}


def test_an_ignored_variable_does_not_count() -> None:
    assert counted(ENGINE_THREADS="1", TRITON_CACHE_DIR="/a", ENGINE_LOG_LEVEL="INFO", ENGINE_API_KEY="secret") == {}


@pytest.mark.parametrize(
    "name",
    [
        *("ENGINE_PORT", "ENGINE_SERVICE_HOST", "ENGINE_SERVICE_PORT", "ENGINE_SERVICE_PORT_HTTP"),
        *("ENGINE_PORT_8000_TCP", "ENGINE_PORT_8000_TCP_PROTO", "ENGINE_PORT_8000_TCP_PORT"),
        *("ENGINE_PORT_8000_TCP_ADDR", "ENGINE_ROUTER_SERVICE_HOST"),
        *("ENGINE_HOST_IP", "ENGINE_HOSTNAME", "ENGINE_POD_IP", "ENGINE_POD_NAME", "ENGINE_POD_UID"),
        *("ENGINE_NODE_NAME", "ENGINE_AUTH_TOKEN", "ENGINE_PASSWORD", "ENGINE_PROFILER_DIR", "ENGINE_LOG_DIR"),
    ],
)
def test_what_differs_between_the_replicas_of_a_deployment_does_not_count(name: str) -> None:
    assert counted(**{name: "10.0.0.7"}) == {}


def test_weights_that_cannot_be_looked_at_are_an_error_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        (tmp_path / name).write_bytes(b"weights")
    stat = os.stat

    def fail(path: str | Path, **more: bool) -> os.stat_result:
        if str(path).endswith("2.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(OSError, match="Input/output error"):
        files_digest(str(tmp_path))


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    first.write_bytes(b"weights")
    second.write_bytes(b"weights")
    other.write_bytes(b"Weights")
    (tmp_path / "directory").mkdir()
    assert counted(ENGINE_FILE=str(first)) != counted(ENGINE_FILE=str(other))
    assert counted(ENGINE_FILE=str(tmp_path / "directory")) == {"ENGINE_FILE": str(tmp_path / "directory")}
    content = counted(ENGINE_FILE=str(first))["ENGINE_FILE"]
    first.write_bytes(b"Weights")
    assert counted(ENGINE_FILE=str(first))["ENGINE_FILE"] != content
    assert counted(ENGINE_FILE="/no\0path") == {"ENGINE_FILE": "/no\0path"}


def test_a_variable_that_is_no_utf8_counts_and_can_be_described() -> None:
    found = counted(**{os.fsdecode(b"ENGINE_\xff"): os.fsdecode(b"/\xfe"), "ENGINE_NAME": "\u00e9"})
    assert found == {r"ENGINE_\xff": r"/\xfe", "ENGINE_NAME": "\u00e9"}


@pytest.mark.parametrize(
    ("described", "setting"),
    [
        ({"is_causal": False}, "is_causal=False"),
        ({"prefix_lm": True}, "prefix_lm=True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention=all"),
        ({"use_bidirectional_attention": "vision", "is_causal": True, "prefix_lm": False}, ""),
        ({"is_causal": None, "use_bidirectional_attention": None, "vision_config": {"is_causal": False}}, ""),
    ],
)
def test_an_engine_whose_tokens_see_later_ones_does_not_start(described: dict[str, object], setting: str) -> None:
    user = UserModelNamespace()
    if not setting:
        user.check_attention("Engine", described, "namespace")
        return
    with pytest.raises(ConfigError, match=f"^namespace: the model's configuration has {setting}: .* later tokens"):
        user.check_attention("Engine", described, "namespace")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, name: str, version: str = "1.0", more: str = "", plugins: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}\nName: a text\n")
    (folder / "entry_points.txt").write_text(plugins)


def test_packages_that_compute_count_with_their_versions(site: Path) -> None:
    assert computing_packages(["listed"], PLUGINS) == "none"
    install(site, "Listed", "2.0")
    install(site, "new-attention")
    install(site, "uses-torch", more="Requires-Dist: numpy\nRequires-Dist: torch>=2; python_version > '3'\n")
    install(site, "models", plugins="[engine.general_plugins]\na = b:c\n")
    install(site, "tracing", plugins="[other.plugins]\na = b:c\n")
    install(site, "may-use-torch", more="Requires-Dist: torch; extra == 'gpu'\nRequires-Dist: torch-other\n")
    install(site, "xgrammar", more="Requires-Dist: torch\n")
    assert computing_packages(["listed"], PLUGINS) == "listed 2.0, models 1.0, new-attention 1.0, uses-torch 1.0"


def test_a_package_that_was_installed_without_a_folder_counts_with_its_version(site: Path) -> None:
    (site / "deep_gemm-2.1-py3.11.egg-info").write_text("Metadata-Version: 2.1\nName: deep-gemm\nVersion: 2.1\n")
    assert computing_packages(["deep-gemm"], PLUGINS) == "deep-gemm 2.1"


def test_both_of_two_installations_count(site: Path) -> None:
    install(site, "deep-gemm", "2.1")
    install(site, "deep_gemm", "2.0")
    assert computing_packages(["deep-gemm"], PLUGINS) == "deep-gemm 2.0 2.1"


def test_damaged_metadata_is_no_error(site: Path) -> None:
    (site / "without-1.0.dist-info").mkdir()
    (site / "damaged-1.0.dist-info").mkdir()
    (site / "damaged-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe")
    install(site, "listed")
    assert computing_packages(["listed", "without", "damaged"], PLUGINS) == "listed 1.0"


def test_a_module_without_a_package_counts(site: Path) -> None:
    (site / "deep_gemm").mkdir()
    assert computing_packages(["deep-gemm"], PLUGINS) == "none"
    (site / "deep_gemm" / "__init__.py").touch()
    assert computing_packages(["deep-gemm"], PLUGINS) == "deep-gemm of no known version"


# What a token of a prompt costs an engine, from its steps.


def step(meter: PrefillMeter, clock: ManualClock, tokens: int, seconds: float, before: int = 0) -> TokenCost | None:
    meter.begin([(tokens, before)])
    clock.advance(seconds)
    return meter.end()


def test_it_follows_steps_with_many_tokens_and_no_others() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    assert meter.end() is None, "a step that began before"
    assert step(meter, clock, 1000, 10.0) == (0.01, 0.0), "the first one, which compiles"
    assert step(meter, clock, int(1000 * PREFILL_SHARE_MIN) - 20, 0.001) is None
    for _ in range(STEPS_MAX):
        clock.advance(60.0)  # nothing to do
        cost = step(meter, clock, 1000, 0.5)
    assert cost == (0.0005, 0.0)


def test_an_engine_may_allow_few_tokens_in_a_step() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    for _ in range(STEPS_MAX):
        assert step(meter, clock, 128, 0.064) == pytest.approx((0.0005, 0.0))
        assert step(meter, clock, 40, 10.0) is None, "the end of a prompt"


def test_a_step_begins_when_the_one_before_it_has_ended() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    for _ in range(5):
        meter.begin([(1000, 0)])
    for _ in range(5):
        clock.advance(0.5)
        assert meter.end() == (0.0005, 0.0)


def test_tokens_that_are_generated_are_none_of_prompts() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    meter.begin([(1, 50)] * 512)
    clock.advance(10.0)
    assert meter.end() is None, "many requests that generate, and no prompt"
    meter.begin([*[(5, 50)] * 500, (1000, 0)])
    clock.advance(10.5)
    assert meter.end() == (0.0005, 0.0), "of the one prompt among them, which took half a second more"


def test_the_few_tokens_of_a_next_turn_do_not_seem_dear() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    for _ in range(STEPS_MAX):
        assert step(meter, clock, 1, 0.012) is None
        assert step(meter, clock, 0, 0.0001) is None, "nothing to do"
        cost = step(meter, clock, 4096, 0.012 + 4096e-6)
        step(meter, clock, 512, 0.012 + 512e-6, before=4096)
    assert cost == pytest.approx((1e-6, 0.0), abs=1e-12)


def test_steps_that_take_little_longer_than_their_launches_do_not_make_tokens_seem_cheap() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    costs = []
    for tokens in (4096, *[512] * STEPS_MAX) * 3:
        assert step(meter, clock, 1, 0.012) is None
        costs.append(step(meter, clock, tokens, max(0.012, 0.003 + tokens * 25e-6)))
    assert [cost.token_s for cost in costs if cost is not None] == pytest.approx([25e-6] * 3, rel=0.1)


def test_an_engine_that_goes_over_to_small_steps_is_followed() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    step(meter, clock, 4096, 60.0)
    costs = [step(meter, clock, 512, 512e-6) for _ in range(90)]
    assert costs[0] is None
    assert costs[-1] == pytest.approx((1e-6, 0.0))


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_a_token_costs_more_with_each_one_before_it(is_in_parts: bool) -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    step(meter, clock, 4096, 60.0)
    for size in (2048, 512, 1024, 4096) * 6:
        for before in range(0, size, 512) if is_in_parts else [0]:
            tokens = 512 if is_in_parts else size
            cost = step(meter, clock, tokens, tokens * (3e-4 + 2e-7 * (before + tokens / 2)), before)
    assert cost == pytest.approx((3e-4, 2e-7))


# The user's part of a namespace.


LOCATION = ("namespace",)


def test_a_value_from_the_environment_is_not_shown() -> None:
    given = fill_variables({"tenant": "${TENANT}", "revision": "main"}, {"TENANT": "a tenant"})
    user = validate(UserModelNamespace, given, LOCATION)
    namespace = user.complete("vLLM", {"model": "m"}, {"weights": "w"}, LOCATION)
    assert namespace.tenant == "a tenant"
    assert namespace.shown() == {
        "model": "m",
        "revision": "main",
        "tenant": "***",
        "extra": {"weights": "w"},
    }
    assert "a tenant" not in repr(namespace)
    assert namespace.secret_texts() == {"a tenant"}


@pytest.mark.parametrize("folder", ["tiered_kv/engines", "plugins/tiered_kv_vllm", "plugins/tiered_kv_sglang"])
def test_no_setting_is_both_ignored_and_named_as_one_that_counts(folder: str) -> None:
    found = ignored_settings(ROOT / folder)
    assert found.variables
    assert found.settings.keys() & found.counting.keys() == set()
    assert found.sections & {*found.settings, *found.counting} == set()


def test_a_setting_counts_unless_the_file_names_it_or_its_section(tmp_path: Path) -> None:
    (tmp_path / "ignored_settings.toml").write_text(
        'sections = ["logs"]\n[settings]\nmodel = ["threads"]\n[counting]\nserving = ["version"]\n'
    )
    found = ignored_settings(tmp_path)
    settings = [("logs", "level"), ("model", "threads"), ("model", "new"), ("serving", "version"), ("serving", "new")]
    assert [name for name in settings if found.counts(*name)] == [("model", "new"), ("serving", "version")]
    assert found.counts("new", "new")
    assert found.packages == frozenset()
