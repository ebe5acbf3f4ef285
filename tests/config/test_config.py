"""Configuration: what is written is what is meant, and every mistake is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SecretStr

from tests.support.faulty import FourMethodTier
from tests.support.stacks import BUILT_IN_TIERS, IN_DIRECTORIES, plugged
from tiered_kv.config.hooks import TierType
from tiered_kv.config.namespace import Namespace
from tiered_kv.config.reading import FILE_BYTES_MAX, parse_stack_text
from tiered_kv.config.settings import StrictModel, TierSettings
from tiered_kv.config.stack_config import StackConfig, load_config, stack_schema
from tiered_kv.config.units import (
    BYTES_MAX,
    Bytes,
    Seconds,
    format_bytes,
    parse_bytes,
    parse_bytes_per_day,
    parse_seconds,
    rounded_bytes,
    rounded_seconds,
)
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, RowTable, make_policy
from tiered_kv.errors import ConfigError

MINIMAL: dict[str, object] = {
    "namespace": {"model": "m"},
    "block": {"bytes": "64KiB"},
    "primary": {"capacity": "1MiB"},
}


class TlsSettings(StrictModel):
    ca_file: str = ""


class VaultSettings(TierSettings):
    """A tier with a setting of every troublesome kind."""

    capacity: Bytes = Field(description="How much the vault holds.")
    ttl: Seconds = 60.0
    url: str = "vault://localhost"
    password: SecretStr = SecretStr("")
    sasl: SecretStr | None = None
    port: int = 1
    tls: TlsSettings | None = None
    hosts: tuple[str, ...] = ()


@pytest.fixture(autouse=True)
def _vault() -> Iterator[None]:
    with plugged(TierType("vault", VaultSettings, lambda: FourMethodTier, "A vault.")):
        yield


def vault(**settings: object) -> dict[str, object]:
    return {**MINIMAL, "secondary": [{"type": "vault", "capacity": "1GiB", **settings}]}


def error_of(source: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, environ={})  # type: ignore[arg-type]  # bad input is the point
    return str(caught.value)


def error_in_file(directory: Path, text: str) -> str:
    file = directory / "stack.yaml"
    file.write_text(text + "\n")
    return error_of(file)


class TestUnits:
    @pytest.mark.parametrize(
        ("parse", "written", "value"),
        [
            (parse_bytes, 0, 0),
            (parse_bytes, "512", 512),
            (parse_bytes, " 64 MiB ", 64 << 20),
            (parse_bytes, "1.5GB", 1_500_000_000),
            (parse_bytes, "0.5KiB", 512),
            (parse_bytes, "2kB", 2000),
            (parse_bytes, "2KB", 2000),
            (parse_bytes, "1PiB", 1 << 50),
            (parse_bytes_per_day, "2TiB/day", 2 << 40),
            (parse_bytes_per_day, "1.5 GB / h", 36_000_000_000),
            (parse_bytes_per_day, "1MiB/s", 86400 << 20),
            (parse_bytes_per_day, 1 << 40, 1 << 40),
            (parse_seconds, 0.25, 0.25),
            (parse_seconds, "250ms", 0.25),
            (parse_seconds, "5m", 300.0),
            (parse_seconds, "1.5", 1.5),
            (parse_seconds, "10us", 1e-5),
        ],
    )
    def test_sizes_rates_and_durations_are_read_with_units(
        self, parse: Callable[[object], float], written: object, value: float
    ) -> None:
        assert parse(written) == value

    @pytest.mark.parametrize(
        ("parse", "refused", "example"),
        [
            (parse_bytes, ("", "MiB", "-1", -1, "1.5B", "1e3", True, None, "9999PiB", "1" * 100, [], 0.5), "64MiB"),
            (
                parse_bytes_per_day,
                ("", "2TiB", "/day", "2TiB/d", "1B/s/s", "-1B/s", -1, True, "9e9/s", "0.5B/day"),
                "2TiB/day",
            ),
            (parse_seconds, ("", "s", "-1s", -0.1, "1 parsec", False, float("nan"), float("inf")), "250ms"),
        ],
    )
    def test_an_invalid_text_is_refused_with_an_example(
        self, parse: Callable[[object], float], refused: Iterable[object], example: str
    ) -> None:
        for written in refused:
            with pytest.raises(ValueError, match=example):
                parse(written)

    def test_an_unknown_unit_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"the units are B, KiB, MiB, .*, MB"):
            parse_bytes("64M")

    @pytest.mark.parametrize(
        ("shown", "value", "text"),
        [
            (rounded_bytes, 1023, "1023B"),
            (rounded_bytes, 98_000_000, "93.5MiB"),
            (rounded_bytes, 640 << 20, "640MiB"),
            (rounded_bytes, 1536 << 20, "1.5GiB"),
            (rounded_bytes, 2 << 40, "2TiB"),
            (rounded_seconds, 25e-5, "250us"),
            (rounded_seconds, 0.0123, "12.3ms"),
            (rounded_seconds, 1.5, "1.5s"),
            (rounded_seconds, 90, "90s"),
            (rounded_seconds, 7200, "2h"),
        ],
    )
    def test_sizes_and_durations_for_people_are_short(self, shown: Callable[[Any], str], value: Any, text: str) -> None:
        assert shown(value) == text

    @given(st.integers(min_value=0, max_value=BYTES_MAX))
    def test_a_printed_size_reads_back_as_itself(self, size_bytes: int) -> None:
        assert parse_bytes(format_bytes(size_bytes)) == size_bytes


class TestFile:
    def test_a_whole_file_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "stack.yaml"
        path.write_text(
            "version: 1\n"
            "namespace: {model: meta-llama/Llama-3.1-8B-Instruct, revision: main, dtype: bfloat16}\n"
            "block: {bytes: 2MiB, tokens: 16}\n"
            "primary: {capacity: 8GiB, policy: lru}\n"
            "secondary:\n"
            "  - {type: vault, capacity: 100GiB, ttl: 1h, job_timeout: 250ms}\n"
        )
        config = load_config(path, environ={})
        assert config.primary_blocks == 4096
        (tier,) = config.secondary
        assert isinstance(tier, VaultSettings)
        assert (tier.name, tier.capacity, tier.ttl, tier.job_timeout) == ("vault", 100 << 30, 3600.0, 0.25)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("version: 1\nblock: {bytes: 1\n", "line 3, column 1: expected"),
            ("version: 1\nversion: 1\n", "line 2, column 1: the key 'version' stands here twice"),
            ("keys: {1: A, 01: B}\n", "line 1, column 14: the key '01' stands here twice"),
            ("keys:\n  1: A\n  0x1: B\n", "line 3, column 3: the key '0x1' stands here twice"),
            ("keys: {yes: A, True: B}\n", "the key 'True' stands here twice"),
            ("keys: {1: A, '1': B}\n", "the key '1' stands here twice"),
            ("block: {bytes: 1, <<: {bytes: 2}}\n", "merges nothing with '<<'"),
            ("a: &x 1\nb: *x\n", "no aliases"),
            (f"a: 1{64 * '1'}\n", "a number has at most 64 characters"),
            (f"a: {400 * '1:'}1.5\n", "a number has at most 64 characters"),  # to the base of 60
            (f"version: 0x{5000 * 'f'}\n", "a number has at most 64 characters"),
            (f"block: {{bytes: !!int 0b{60_000 * '1'}}}\n", "a number has at most 64 characters"),
            ("{a: b}: c\n", "a key must be a text"),
            ("a: !!python/object/apply:os.getcwd []\n", "line 1, column 4: tags are not allowed, found"),
            ("- 1\n", "expected a mapping with namespace, block and primary, found a list"),
            ("", "the file is empty: expected a mapping"),
            ("a: {b: ${X}}\n", r"line 1, column 9: .*put a text with \$\{NAME\} in quotes"),
            ("a: \x00\n", "not YAML"),
            ("[" * 600, "nested too deeply"),
        ],
    )
    def test_what_is_no_stack_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse_stack_text(text)

    @pytest.mark.parametrize("text", ["block: 1\n", "primary: ${NONE}\n", "a: [\n"])
    def test_every_mistake_in_a_file_is_reported_with_its_path(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "stack.yaml"
        path.write_text(text)
        assert error_of(path).startswith(f"{path}:")


class TestTextsWithoutQuotes:
    """YAML reads 1.10 as 1.1, 0123 as 83 and `on` as true. No message suggests such another value."""

    @pytest.mark.parametrize("text", ["1.10", "0123456", "0x10", "1:30", ".inf", "on", "2024-01-01"])
    def test_the_error_says_what_to_do(self, tmp_path: Path, text: str) -> None:
        lines = f"namespace: {{model: {text}, extra: {{{text}: x}}}}\nsecondary: [{{type: vault, {text}: 1}}]"
        problems = error_in_file(tmp_path, lines)
        assert "namespace.model: expected a text; put it in quotes" in problems
        assert problems.count("; put it in quotes") == 3

    def test_a_secret_is_not_repeated(self, tmp_path: Path) -> None:
        problems = error_in_file(tmp_path, "secondary: [{type: vault, password: 00123, sasl: 00456}]")
        assert "secondary.0.password: expected a text; put it in quotes\n" in problems
        assert "secondary.0.sasl: expected a text; put it in quotes" in problems
        assert not any(secret in problems.replace(str(tmp_path), "") for secret in ("123", "83", "456", "302"))

    def test_no_number_of_a_list_is_repeated(self, tmp_path: Path) -> None:
        assert "policy: expected a text, found a list" in error_in_file(tmp_path, "primary: {policy: [1.10, 010]}")


def test_variables_are_replaced_in_texts() -> None:
    config = load_config(
        {**vault(url="${SCHEME}://${HOST:-localhost}/$$x", port="${PORT}"), "namespace": {"model": "${MODEL:-m}"}},
        environ={"SCHEME": "vaults", "PORT": "7"},
    )
    (tier,) = config.secondary
    assert isinstance(tier, VaultSettings)
    assert (tier.url, tier.port, config.namespace.model) == ("vaults://localhost/$x", 7, "m")


class TestMistakes:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"blok": 1}, "blok: unknown key, with the value 1 (did you mean 'block'?)"),
            ({"block": {"byts": 1, "bytes": 1}}, "block.byts: unknown key, with the value 1 (did you mean 'bytes'?)"),
            ({"block": {}}, "block.bytes: this key is required: Bytes of a block."),
            ({"block": {"bytes": 1, "tokens": True}}, "block.tokens: expected a whole number, found true"),
            ({"block": {"bytes": 0}}, "block.bytes: expected a value greater than or equal to 1, found 0"),
            ({"primary": {"capacity": "8 parsecs"}}, "primary.capacity: expected a size such as 64MiB"),
            ({"primary": "8GiB"}, "primary: expected a mapping, found '8GiB'"),
            ({"block": {"bytes": 1, "tokens": "many"}}, "block.tokens: expected a whole number, found 'many'"),
            ({"block": None}, "block: expected a mapping, found nothing"),
            ({"namespace": {"model": 1.0}}, "namespace.model: expected a text; put it in quotes"),
            ({"secondary": [{"type": 5}]}, "secondary.0.type: expected a text; put it in quotes"),
            ({"primary": {"capacity": "1MiB", "huge_pages": "x"}}, "huge_pages: expected 'auto' or 'off', found 'x'"),
            (
                {"primary": {"capacity": "1MiB", "policy": "lruu"}},
                "primary.policy: expected lru, arc, density, or 'module",
            ),
            ({"version": 2}, "version: expected 1, found 2"),
            ({"primary": {"capacity": "100KiB"}}, "primary.capacity: expected room for at least 2 blocks of 64KiB"),
            ({"primary": {"capacity": "1MiB", "promotion_budget": 1}}, "primary.promotion_budget: expected room"),
            ({"primary": {"capacity": "1MiB", "shared": "../x"}}, "primary.shared: "),
            *(({"audit": share}, "audit: ") for share in (-0.1, 1.5, "often", True, float("nan"))),
            ({"audit_tolerance": 2}, "audit_tolerance: "),
            ({"limits": {"a": "101%"}}, "limits.a: expected a size such as 200GiB, or a percentage"),
            ({"limits": {"a": "lots"}}, "limits.a: expected a size such as 200GiB, or a percentage"),
            ({"limits": {"a": -1}}, "limits.a: expected a size such as 200GiB, or a percentage"),
            ({"limits": {"a b": "10%"}}, "limits: expected names of tenants"),
            ({"limits": "10%"}, "limits: expected a mapping"),
            ({"audit_action": "panic"}, "audit_action: expected 'report' or 'stop'"),
            ({"secondary": {}}, "secondary: expected a list of tiers"),
            ({"secondary": ["vault"]}, "secondary.0: expected a mapping with the key 'type'"),
            ({"secondary": [{"type": "valt"}]}, "secondary.0.type: unknown tier type 'valt' (did you mean 'vault'?)"),
            (
                {"secondary": [{"type": "no module:X"}]},
                "secondary.0.type: expected a tier type, or 'module:Class', found",
            ),
            ({"secondary": [{"type": "no.such.module:X"}]}, "secondary.0.type: 'no.such.module:X' cannot be loaded"),
            ({"secondary": [{"type": "vault"}]}, "secondary.0.capacity: this key is required: How much the vault"),
        ],
    )
    def test_a_mistake_is_reported_with_its_key_and_a_remedy(self, change: dict[str, object], message: str) -> None:
        assert message in error_of({**MINIMAL, **change})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"ttll": 1}, "secondary.0.ttll: unknown key, with the value *** (did you mean 'ttl'?)"),
            ({"zzzz": 1}, "secondary.0.zzzz: unknown key, with the value ***; known keys: type"),
            (
                {"tls": {"cafile": "x"}},
                "secondary.0.tls.cafile: unknown key, with the value 'x' (did you mean 'ca_file'?)",
            ),
            ({"store_budget": "1KiB"}, "secondary.0.store_budget: expected room for at least 1 block of 64KiB"),
            ({"name": "cpu"}, "secondary.0.name: the name 'cpu' is taken by the primary tier"),
            ({"name": "../x"}, "secondary.0.name: "),
            ({"password": "${NONE}"}, "secondary.0.password: the environment variable NONE is not set"),
            ({"url": "${not a name}"}, "$$ for a plain $"),
            ({"url": "${ABSENT:-${URL}}"}, "a default without a variable"),
            ({"job_timeout": 0}, "secondary.0.job_timeout: expected a value greater than 0"),
            ({"limits": {"a": 1}}, "the blocks of this tier belong to no tenant: the primary tier has shares"),
        ],
    )
    def test_a_mistake_in_a_tier_is_reported_the_same_way(self, settings: dict[str, object], message: str) -> None:
        assert message in error_of(vault(**settings))

    @pytest.mark.parametrize("tier", sorted(BUILT_IN_TIERS.keys() - {"memory", "nvme"}))
    def test_a_tier_whose_blocks_belong_to_no_tenant_refuses_limits_by_name(self, tier: str) -> None:
        entry = {"type": tier, **BUILT_IN_TIERS[tier], "limits": {"a": "10%"}}
        message = error_of({**MINIMAL, "secondary": [{**entry, "path": "kv"} if tier in IN_DIRECTORIES else entry]})
        assert "secondary.0.limits: " in message
        assert "the blocks of this tier belong to no tenant" in message

    @pytest.mark.parametrize("name", ["name_key", "name_key_file"])
    @pytest.mark.parametrize("tier", [*BUILT_IN_TIERS, "vault"])
    def test_a_key_for_secret_names_is_refused_with_what_to_do_and_not_shown(self, tier: str, name: str) -> None:
        entry = {"type": tier, **BUILT_IN_TIERS.get(tier, {"capacity": "1MiB"}), name: "5a5a5a"}
        message = error_of({**MINIMAL, "secondary": [{**entry, "path": "kv"} if tier in IN_DIRECTORIES else entry]})
        assert f"secondary.0.{name}: unknown key, with the value ***; Tiered KV no longer computes" in message
        assert "remove this key" in message
        assert "examples/keyed_names.py" in message

    def test_all_mistakes_are_reported_at_once(self) -> None:
        message = error_of({**vault(ttl="soon", name="cpu"), "block": {"bytes": "big"}})
        assert message.startswith("2 settings cannot be used:\n")
        assert "\n  secondary.0.ttl: " in message
        assert "\n  block.bytes: " in message

    def test_two_tiers_cannot_share_a_name(self) -> None:
        entry = {"type": "vault", "capacity": 1}
        assert "secondary.1.name: the name 'vault' is taken by another tier" in error_of(
            {**MINIMAL, "secondary": [entry, entry]}
        )
        message = error_of({**MINIMAL, "secondary": [entry, entry, {**entry, "name": "third", "ttl": "soon"}]})
        assert "secondary.1.name: the name 'vault'" in message
        assert "secondary.2.ttl: " in message
        config = load_config({**MINIMAL, "secondary": [entry, {**entry, "name": "vault-2"}]}, environ={})
        assert [tier.name for tier in config.secondary] == ["vault", "vault-2"]


def test_a_program_makes_a_configuration_without_a_file() -> None:
    config = StackConfig.model_validate(
        {"namespace": Namespace(model="m"), "block": {"bytes": 1024}, "primary": {"capacity": 4096}}
    )
    assert config.primary_blocks == 4
    assert load_config(config) is config


@pytest.mark.parametrize("rate", [0, True, 1.5, "fast", None])
def test_the_prefill_rate_is_a_number_or_measured(rate: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^prefill\.tokens_per_s: expected a whole number from 1, 'off', or 'measured' in vLLM"
    ):
        load_config({**MINIMAL, "prefill": {"tokens_per_s": rate}})
    for accepted in (1, "4000", "measured"):
        load_config({**MINIMAL, "prefill": {"tokens_per_s": accepted}})


@pytest.mark.parametrize("text", ["off", "'off'", "{tokens_per_s: off}"])
def test_the_comparison_with_computing_is_turned_off_by_a_word(text: str) -> None:
    config = load_config({**MINIMAL, "prefill": yaml.safe_load(text)})
    assert not config.is_prefill_measured
    assert config.compute_block_s == float("inf")


@pytest.mark.parametrize(
    ("text", "wants"), [("auto", True), ("true", True), ("off", False), ("'off'", False), ("false", False)]
)
def test_huge_pages_are_wanted_unless_a_word_turns_them_off(text: str, wants: bool) -> None:
    assert load_config(MINIMAL).primary.wants_huge_pages
    primary = {**MINIMAL["primary"], "huge_pages": yaml.safe_load(text)}  # type: ignore[dict-item]  # a mapping
    assert load_config({**MINIMAL, "primary": primary}).primary.wants_huge_pages is wants


def test_a_size_is_shown_as_the_file_has_it_and_that_of_a_changed_copy_as_it_is() -> None:
    class Aliased(VaultSettings):
        idle: Seconds = Field(default=60.0, alias="idle-time")

    settings = Aliased.model_validate({"type": "vault", "capacity": "1024MiB", "idle-time": "5min"})
    assert (settings.idle, settings.shown()["capacity"]) == (300, "1024MiB")
    assert settings.model_copy(update={"capacity": 512}).shown()["capacity"] == 512


def test_every_policy_that_a_file_may_name_exists() -> None:
    for policy in BUILT_IN_POLICIES:
        make_policy(policy, RowTable(2))
    with pytest.raises(ConfigError, match=", ".join(BUILT_IN_POLICIES)):
        make_policy("nonesuch", RowTable(2))


def test_the_schema_knows_every_tier_and_its_settings() -> None:
    schema = stack_schema()
    entry = schema["$defs"]["tier-vault"]
    assert entry["properties"]["type"] == {"const": "vault"}
    assert entry["required"] == ["capacity", "type"]
    assert set(entry["properties"]) == set(VaultSettings.model_fields)
    assert {"$ref": "#/$defs/tier-vault-TlsSettings"} in entry["properties"]["tls"]["anyOf"]
    assert {"$ref": "#/$defs/tier-vault"} in schema["properties"]["secondary"]["items"]["oneOf"]


def test_the_schema_accepts_each_form_of_prefill_that_loading_accepts() -> None:
    jsonschema = pytest.importorskip("jsonschema")  # it comes with moto's server
    validator = jsonschema.Draft202012Validator(stack_schema())
    nested = ("4000", 4000, "off", False, "measured", 0, "0", True, 1.5, "fast", None, 1 << 41)
    forms: list[object] = ["off", False, None, True, "measured", 4000, *({"tokens_per_s": rate} for rate in nested)]
    for form in forms:
        stack = {**MINIMAL, "prefill": form}
        try:
            load_config(stack)
        except ConfigError:
            assert not validator.is_valid(stack), form
        else:
            assert validator.is_valid(stack), form


def test_the_configuration_reference_or_the_tier_s_page_mentions_every_setting() -> None:
    docs = Path(__file__).parents[2] / "docs" / "reference"
    missing = []
    for title, definition in {"stack": stack_schema(), **stack_schema()["$defs"]}.items():
        tier = title.removeprefix("tier-")
        pages = [page for page in (docs / "configuration.md", docs / f"{tier}.md") if page.exists()]
        text = "".join(page.read_text() for page in pages)
        missing += [f"{title}.{name}" for name in definition.get("properties", {}) if f"`{name}`" not in text]
    assert [name for name in missing if not name.startswith("tier-vault")] == []


@pytest.mark.slow
@pytest.mark.full
def test_a_stack_file_of_the_greatest_size_is_read_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """A number to the base of 60 took as long as the square of its length: minutes, for a file of the greatest size."""
    path = tmp_path / "stack.yaml"
    for text in (
        "a: " + "1:" * (FILE_BYTES_MAX // 2 - 8) + "1",
        "a: 0x" + "f" * (FILE_BYTES_MAX - 8),
        "[" * FILE_BYTES_MAX,
        "\n".join(f"{number:x}a: 1" for number in range(40_000)),
    ):
        path.write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", _READ_BOUNDED, str(path)], capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr[-2000:]


_READ_BOUNDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from tiered_kv.config.stack_config import load_config
from tiered_kv.errors import ConfigError
try:
    load_config(sys.argv[1], environ={})
except ConfigError:
    print("refused")
"""
