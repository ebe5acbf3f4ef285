"""What a terminal shows: tables that fit, colours, errors with the nearest word, and an end without a traceback."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.stacks import stack_file
from tests.support.terminal import ESCAPES, Terminal
from tiered_kv.cli.main import main
from tiered_kv.cli.output import print_table

PROGRAM = [sys.executable, "-m", "tiered_kv"]
RED, GREEN = "\x1b[1;31m", "\x1b[32m"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def shown_on(directory: Path, width: int, *arguments: str, **environ: str) -> tuple[int, str]:
    with Terminal([*PROGRAM, *arguments], directory, environ, size=(width, 24)) as terminal:
        return terminal.end()


def lines_of(shown: str) -> list[str]:
    """Return the lines without escapes, and without those that show progress."""
    return [line for line in ESCAPES.sub("", shown).replace("\r", "\n").splitlines() if "━" not in line]


def stack_of(directory: Path, *more: str) -> str:
    nvme = f"type: nvme, name: a-tier-with-a-long-name, path: {directory / 'cache'}, capacity: 64MiB"
    return stack_file(directory, nvme, "type: memory, capacity: 64MiB", *more)


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "arguments",
    [
        ["plugins"],
        ["plugins", "s3"],
        ["check", "STACK"],
        ["inspect", "STACK"],
        ["simulate", "STACK", "--requests", "20", "--policy", "lru"],
        ["simulate", "STACK", "--requests", "20", "--capacity", "50,100"],
        ["simulate", "--requests", "20", "--policy", "lru,arc"],
        ["replay", "STACK", "--requests", "20"],
    ],
    ids=lambda arguments: "-".join(arguments[:2] + arguments[4:5]).lower(),
)
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int, arguments: list[str]) -> None:
    stack = stack_of(tmp_path)
    status, shown = shown_on(tmp_path, width, *(stack if each == "STACK" else each for each in arguments))
    assert status == 0, shown
    lines = lines_of(shown)
    assert max(map(len, lines)) <= width, "\n".join(lines)
    words = {word for line in lines for word in line.split()}
    if "s3" in arguments:
        assert {"server_encryption", "breaker_cooldown", "zstd+aes-256-gcm", "required"} <= words, "no word is broken"
    if arguments[-1] == "lru":
        named = [line for line in lines if line.strip().startswith("a-tier-with-a-long-name ")]
        assert len(named) >= (2 if width == 80 else 1), "the table is continued, with its first column again"


@pytest.mark.parametrize("size", ["0B", "169MiB", "12.6MiB"])
def test_a_table_that_hardly_fits_loses_no_word(
    size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ["tier", "namespace", "checked", "read", "by", "repaired", "damaged", "unreadable here"]
    row = ["nvme", f"{'0123456789abcdef' * 2} *", "2701", size, "checksum, tag if encrypted", "0", "0", "0"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width in range(60, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(heads, [row], numbers=False)
        lines = ESCAPES.sub("", capsys.readouterr().out).splitlines()
        words = " ".join(lines).split()
        assert not set(" ".join([*heads, *row]).split()) - set(words), width
        assert max(map(len, lines)) <= width


@pytest.mark.slow
def test_ok_and_failed_are_in_colour_on_a_terminal_and_nowhere_else(tmp_path: Path, command: Command) -> None:
    stack = stack_of(tmp_path)
    assert f"{GREEN}ok" in shown_on(tmp_path, 80, "check", stack)[1]
    assert GREEN not in ESCAPES.sub("", shown_on(tmp_path, 80, "check", stack, NO_COLOR="1")[1])
    assert "\x1b[3" not in shown_on(tmp_path, 80, "plugins", NO_COLOR="1")[1]
    (tmp_path / "file").write_text("no directory")
    broken = stack_file(tmp_path, f"type: nvme, path: {tmp_path / 'file'}, capacity: 64MiB")
    status, shown = shown_on(tmp_path, 80, "check", broken)
    assert (status, f"{RED}FAILED" in shown) == (1, True)
    assert f"{RED}error:" in shown_on(tmp_path, 80, "check", "/nonesuch")[1]
    assert "\x1b" not in command.out("check", broken, status=1)


@pytest.mark.slow
def test_a_long_error_is_broken_between_words(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("namespace: {model: m}\nblok: {bytes: 1}\n")
    status, shown = shown_on(tmp_path, 60, "check", "stack.yaml")
    lines = lines_of(shown)
    assert status == 2
    assert max(map(len, lines)) <= 60
    assert "did you mean 'block'?" in " ".join(line.strip() for line in lines)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["check", "/nonesuch.yaml"], "/nonesuch.yaml: the stack's file cannot be read: No such file or directory"),
        (["simulate", "--policy", "ark"], "there is no policy 'ark' (did you mean 'arc'?)"),
        (["top", "127.0.0.1:1", "--once"], "http://127.0.0.1:1: connection refused"),
        (["why", "127.0.0.1:1", "--last"], "no process answers at http://127.0.0.1:1: connection refused"),
    ],
)
def test_an_error_is_an_object_too_with_json(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main([*arguments, "--json"]) == 2
    captured = capsys.readouterr()
    assert problem in json.loads(captured.out)["error"]
    assert problem in captured.err
    assert main(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["chek", "stack.yaml"], "there is no verb 'chek' (did you mean 'check'?); verbs: check, "),
        (["check"], "the following arguments are required: STACK"),
        (["check", "x", "--jsn"], "unknown arguments: --jsn (did you mean '--json'?)"),
        (["replay", "x", "--turns", "many"], "argument --turns: invalid int value: 'many'"),
    ],
)
def test_wrong_usage_names_the_nearest_word_and_is_an_object_too_with_json(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    for json_option in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *json_option])
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert problem in " ".join(captured.err.split())
        assert [problem in captured.out] == [bool(json_option)]
        if json_option:
            assert problem in json.loads(captured.out)["error"]


def test_the_package_is_a_program() -> None:
    done = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0
    assert re.fullmatch(r"tiered-kv \S+\n", done.stdout)


# The program, once Python has started: a shell starts what runs in its background with Ctrl-C ignored. Until `main`
# sets its own hook, a signal meets these lines and not the program, so that hook prints nothing.
STARTED = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "import tiered_kv.__main__ as program; sys.excepthook = lambda *error: None;"
    "print('started', flush=True); sys.exit(program.main())"
)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["check", "replay", "bench", "inspect", "simulate"])
def test_ctrl_c_at_any_moment_is_no_traceback(tmp_path: Path, verb: str) -> None:
    stack = stack_of(tmp_path)
    command = [sys.executable, "-c", STARTED, verb, stack]
    statuses = set()
    for step in range(16):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            time.sleep(step * 0.04)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        assert "Traceback" not in errors, (step, errors)
        assert "KeyboardInterrupt" not in errors, (step, errors)
        statuses.add(process.returncode)
    assert statuses <= {0, 130, -signal.SIGINT}
    assert statuses & {130, -signal.SIGINT}
