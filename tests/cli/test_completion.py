"""Completion of the command's words, by the shells themselves, and the help of every verb."""

from __future__ import annotations

import pwd
import re
import shutil
import sys
from pathlib import Path

import pytest
from argcomplete.shell_integration import shellcode

from tests.support.terminal import TAB, Terminal
from tiered_kv.cli import main as cli
from tiered_kv.cli.main import main

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
BEFORE = {"bash": "", "zsh": "autoload -U compinit; compinit -u -D; ", "fish": ""}
installed = pytest.mark.parametrize(
    "shell",
    [
        pytest.param(shell, marks=pytest.mark.skipif(not shutil.which(shell), reason="not installed"))
        for shell in SHELLS
    ],
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A stack's file, and the command as pip would write it, so that a shell finds it."""
    command = tmp_path / "bin" / "tiered-kv"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom tiered_kv.cli.main import main\nraise SystemExit(main())\n")
    command.chmod(0o755)
    (tmp_path / "stack.yaml").touch()
    return tmp_path


@pytest.mark.slow
@installed
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tiered-kv ben", "bench"),
        ("tiered-kv bench st", "stack.yaml"),
        ("tiered-kv bench stack.yaml --ti", "--tier"),
    ],
)
def test_the_tab_key_completes(directory: Path, shell: str, line: str, expected: str) -> None:
    """With the code that `register-python-argcomplete tiered-kv` prints."""
    (directory / "completion").write_text(shellcode(["tiered-kv"], shell=shell))
    path = f"{directory / 'bin'}:/usr/bin:/bin"
    private = dict.fromkeys(["HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"], str(directory))
    with Terminal(SHELLS[shell], directory, {"PATH": path, "PS1": "> ", **private}, size=(200, 40)) as terminal:
        terminal.type(f"{BEFORE[shell]}source ./completion; echo rea''dy\n")
        terminal.wait_for("ready")
        terminal.type(line + TAB)
        terminal.wait_for(f"{line[: line.rindex(' ')]} {expected}")


def test_without_the_extra_a_shell_gets_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: completion needs a library that is not installed (the extra 'completion'): pip install"
    )


@pytest.mark.parametrize("verb", cli._VERBS)
def test_the_help_of_every_verb_has_examples_that_parse(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pwd.getpwuid(0)
    monkeypatch.setattr(pwd, "getpwnam", lambda name: root)  # the examples' users need not be here
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    lines = re.findall(rf"^\s+tiered-kv {verb}\b[^>\n]*", capsys.readouterr().out, re.MULTILINE)
    assert lines
    for line in lines:
        words = line.split()[1:]
        args = cli._parser(words).parse_args(words)
        assert args.run.__module__ == f"tiered_kv.cli.{cli._MODULES.get(verb, verb)}"


def test_the_help_names_every_verb_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {verb} " in text for verb in cli._VERBS)
    assert all(f"\n  {status} " in text for status in (0, 1, 2, 130))
