"""No secret is shown by a configuration, nor by any error about one: a marker is planted in each setting of each tier
type, in each way in which a secret gets there, and looked for in all that is said."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from tests.support.paced_loads import PacedTier
from tests.support.secret_hunt import (
    BY_CLASS,
    MISTAKES,
    QUICK,
    STACK,
    WAYS,
    Sheet,
    entry_of,
    hunt_in_configuration,
    new_marker,
    settings_of,
    show_config,
    with_value,
)
from tiered_kv.cli.main import main
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.config.reading import parse_stack_text
from tiered_kv.config.secrets import foreign_text
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.errors import ConfigError, TierError
from tiered_kv.stack.open import open_stack
from tiered_kv.tiering.base import JobMetadata

TYPES = [*tier_plugins().tier_types(), BY_CLASS]


@pytest.mark.parametrize("type_name", TYPES)
def test_no_configuration_or_error_shows_what_a_tier_s_secret_setting_holds(type_name: str) -> None:
    sheet = hunt_in_configuration(type_name, QUICK, secret_only=True)
    assert sheet.findings() == []


@pytest.mark.slow
@pytest.mark.parametrize("type_name", TYPES)
def test_no_configuration_or_error_shows_what_any_setting_of_a_tier_got_as_a_secret(
    type_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sheet = hunt_in_configuration(type_name)
    sheet.note("the log", caplog.text)
    assert sheet.findings() == []
    assert len(sheet) > 20, "there was something to look at"


@pytest.mark.slow
@pytest.mark.parametrize("section", ["namespace", "block", "primary", "version"])
def test_no_configuration_or_error_shows_what_a_stack_s_setting_holds(section: str) -> None:
    planted = new_marker()
    sheet = Sheet({"the secret": planted})
    for setting in settings_of(StackConfig):
        if setting.path[0] != section:
            continue
        for way, form in WAYS.items():
            for further in MISTAKES.values():
                if way != "as it is":
                    source = {**with_value(STACK, setting.path, form.format(planted)), **further}
                    show_config(sheet, f"{setting.path} {way}", source, planted)
    assert sheet.findings() == []


@pytest.mark.parametrize("name", ["pasword", "pw", "pass", "secret", "acess_key", "sentinel_pasword", "x", "dsn"])
@pytest.mark.parametrize("type_name", ["redis", "s3"])
def test_a_misspelled_secret_is_not_repeated(type_name: str, name: str) -> None:
    planted = new_marker()
    sheet = Sheet({"the secret": planted})
    for value in (planted, [planted], {"a": planted}):
        entry = {**entry_of(type_name), name: value}
        show_config(sheet, name, {**STACK, "secondary": [entry]}, planted)
        show_config(sheet, name, {**STACK, "secondary": [{**entry, "type": "nonesuch"}]}, planted)
        show_config(sheet, name, {**STACK, "secondry": [entry]}, planted)
    assert sheet.findings() == []


@pytest.mark.parametrize("type_name", ["fs", "nvme"])
def test_a_path_from_a_variable_is_hidden_in_the_configuration_and_named_by_the_tier(
    type_name: str, tmp_path: Path
) -> None:
    """As docs/reference/configuration.md and docs/explanation/security.md say it."""
    file = tmp_path / "file"
    file.touch()
    source = {**STACK, "secondary": [{"type": type_name, "path": "${WHERE}", "capacity": "64MiB"}]}
    with pytest.raises(ConfigError) as caught:
        load_config({**source, "secondary": [{"type": type_name, "path": "${WHERE}"}]}, environ={"WHERE": str(file)})
    assert str(file) not in str(caught.value)
    config = load_config(source, environ={"WHERE": str(tmp_path / "blocks")})
    assert str(tmp_path) not in str(config)
    with open_stack(config) as stack:
        assert stack.secondary_tiers[0].describe()["path"] == str(tmp_path / "blocks")
    with pytest.raises(TierError, match=str(file)):
        open_stack(load_config(source, environ={"WHERE": str(file)}))


BROKEN_YAML = r"""
password: {0}: x¦password: !{0}¦password: !{0} x¦password: !{0}!x y¦password: !<{0}> x¦password: *{0}¦password: @{0}
password: %{0}¦password: "{0}¦password: '{0}¦password: "\\{0}"¦password: |{0}¦password: >{0}¦password: `{0}`
password: [{0}¦x: {{password: a,{0}}}¦x: {{password: {0}¦x: {{password: a{{{0}}}¦password: {0}]: y\n{0}¦{0}¦"{0}"¦- {0}
- - {0}\nx¦{0}\n--- {0}¦password: !!bool {0}¦password: !!int {0}¦password: !!float {0}¦password: !!timestamp {0}
password: !!binary {0}é¦password: !!python/name:{0} x¦password: !!python/object/apply:{0} []¦password: !!omap {0}
password: &{0} x\ny: &{0} z\nq: *{0}x
? [{0}]\n: x¦? {{a: {0}}}\n: x¦<<: {0}¦<<: [{0}]¦%{0}\n--- x¦%YAML {0}\n--- x
%TAG {0} {0}\n--- x¦password: {0}\n  x: y¦password: {0}\n\\tx¦password: {0}\nz¦password: "{0}" y¦\0{0}¦a: {0}\0
password: {0}\nx: 1\nx: 2¦password: ${{{0}¦password: a${{{0}!}}¦password: ${0}¦[[[{0}¦{{{{{0}¦key: - {0}
""".strip()


@pytest.mark.one_quick(4)
@pytest.mark.parametrize("template", [case for line in BROKEN_YAML.splitlines() for case in line.split("¦")])
def test_no_syntax_error_repeats_the_file(template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = new_marker()
    text = template.replace(r"\n", "\n").replace(r"\0", "\0").format(planted)
    sheet = Sheet({"the secret": planted})
    try:
        parse_stack_text(text)
    except ConfigError as error:
        sheet.note_error("parse", error)
    file = tmp_path / "stack.yaml"
    file.write_text(text)
    main(["check", str(file), "--debug"])
    captured = capsys.readouterr()
    sheet.note("check", captured.out, captured.err)
    assert sheet.findings() == []


def test_a_secret_from_a_variable_is_hidden_in_what_a_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_USER", "user-of-a-variable")
    monkeypatch.setenv("REDIS_PASSWORD", "password-of-a-variable")
    entry = {"type": "redis", "url": "redis://localhost", "username": "${REDIS_USER}", "password": "${REDIS_PASSWORD}"}
    (settings,) = load_config({**STACK, "secondary": [entry]}).secondary
    said = foreign_text("AUTH user-of-a-variable password-of-a-variable", settings.secret_texts())
    assert said == "AUTH *** ***"


class BrokenTier(PacedTier):
    """Says its settings in what it raises."""

    def __init__(self, spec: object, view: memoryview, tier_type: str, *, address: str) -> None:
        super().__init__(spec, view, tier_type, bytes_per_s=1.0)
        self._address = address

    def submit_store(self, job_metadata: JobMetadata) -> None:
        raise RuntimeError(f"cannot log in at {self._address}")


def test_bench_hides_a_secret_in_what_a_tier_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADDRESS", "kv://user:the-secret@host")
    file = tmp_path / "stack.yaml"
    tier = {"type": f"{__name__}:BrokenTier", "address": "${ADDRESS}"}
    file.write_text(json.dumps({**STACK, "secondary": [tier]}))
    assert main(["bench", str(file), "--blocks", "1", "--debug"]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: cannot log in at ***" in said
    assert "the-secret" not in said


@pytest.mark.parametrize(
    ("given", "variable", "said"),
    [
        ({"type": BY_CLASS, "address": "${SECRET}"}, "kv://user:the-secret@host", "wrong password: the-secret"),
        ({"type": BY_CLASS, "header": "Bearer ${SECRET}"}, "the-secret", "no such token: the-secret"),
        ({"type": BY_CLASS, "headers": {"x": ["Bearer ${SECRET}"]}}, "the-secret", "no such token: the-secret"),
        ({"type": "redis", "host": "h", "service": "of ${SECRET}"}, "the-secret", "no such tenant: the-secret"),
        ({"type": BY_CLASS, "password": "${SECRET}"}, "the-secret\n", "wrong: the-secret"),
        ({"type": "redis", "host": "h", "password": "${SECRET}"}, "a  the-secret", "wrong: a  the-secret"),
    ],
)
def test_a_secret_is_hidden_however_a_server_repeats_it(given: dict[str, object], variable: str, said: str) -> None:
    sentinel = {"mode": "sentinel"} if "service" in given else {}
    source = {**STACK, "secondary": [{**given, **sentinel}]}
    (settings,) = load_config(source, environ={"SECRET": variable}).secondary
    assert "the-secret" not in foreign_text(said, settings.secret_texts())


def test_a_variable_that_is_no_utf_8_is_an_error_of_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environb, b"SECRET", b"the-s\xe9cret")
    entry = {"type": "redis", "url": "redis://127.0.0.1:1", "password": "${SECRET}"}
    with pytest.raises(ConfigError, match=r"^secondary.0.password: ") as caught:
        load_config({**STACK, "secondary": [entry]})
    assert "cret" not in str(caught.value)


def test_a_very_short_secret_is_hidden_in_its_setting_only() -> None:
    entry = {"type": "redis", "url": "redis://127.0.0.1:1", "password": "e"}
    config = load_config({**STACK, "secondary": [entry]})
    assert foreign_text("WRONGPASS the password is wrong", config.secret_texts()) == "WRONGPASS the password is wrong"
    assert "'e'" not in repr(config)
    with pytest.raises(ConfigError, match="unknown key"):
        load_config({**STACK, "secondary": [{**entry, "prot": 1}]})
