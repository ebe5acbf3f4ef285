"""`tiered-kv top`: what it shows of a stack, on a terminal and off, whatever the process answers."""

from __future__ import annotations

import json
import pty
import re
import signal
import sys
import time
import tty
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tests.support.pages import undescribed
from tests.support.stacks import stack_of
from tests.support.status_server import Status, StatusServer, answer, busy, response, status, tier
from tests.support.terminal import CTRL_C, ESCAPES, Terminal
from tiered_kv import open_stack
from tiered_kv.cli.ask import View, view_of
from tiered_kv.cli.main import main
from tiered_kv.cli.top import _is_ended, number, screen

# A shell starts what runs in its background with Ctrl-C ignored, and nohup with the end of the terminal: the tests may
# run there.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "from tiered_kv.cli.main import main; raise SystemExit(main())"
)
COMMAND = [sys.executable, "-c", PROGRAM, "top"]
HOSTILE = "\x1b]0;evil\x07\x1b[2J\r\n[red]\u202e" + "x" * 1000
MAIN_SCREEN, SHOW_CURSOR = "\x1b[?1049l", "\x1b[?25h"


def growing(**fields: object) -> Callable[[], bytes]:
    """Return a server's answers, each a second later than the one before."""
    count = 0

    def next_answer() -> bytes:
        nonlocal count
        count += 1
        return response(busy(float(count), count, **fields))

    return next_answer


def hostile() -> Status:
    """Return a status whose names, reasons and notices are meant for the terminal."""
    counters = {"misses_total": {HOSTILE: 10}, "failed_blocks_total": {HOSTILE: {HOSTILE: 1}}}
    notices = [{"time": 1.0, "tier": HOSTILE, "what": HOSTILE}] * 64
    tiers = [tier("cpu"), *(tier(HOSTILE, counters, type=HOSTILE) for _ in range(60))]
    return status(*tiers, version=HOSTILE, notices=notices)


def drawn(view: View | None, width: int, error: str = "") -> list[str]:
    """Return the lines of a screen."""
    console = Console(file=StringIO(), width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(screen(view, error, "http://127.0.0.1:9464", console))
    return captured.get().splitlines()


def test_what_was_not_counted_is_shown() -> None:
    view = view_of(None, answer(status(tier("cpu", {"unexplained_blocks_total": 7}))))
    text = "\n".join(drawn(view, 80))
    assert all(word in text for word in ("not counted", "too fast"))


def test_eighty_columns_show_every_column() -> None:
    lines = drawn(view_of(answer(busy(10.0, 100)), answer(busy(12.0, 104))), 80)
    text = "\n".join(lines)
    heads = lines[3].split() + lines[4].split()
    assert {"tier", "hits", "hit", "load", "store", "p99", "used", "budget", "breaker"} <= set(heads)
    disk = next(line for line in lines if line.startswith("disk"))
    assert disk.split()[1:3] == ["60", "75"]
    assert "closed" in disk
    assert "evicted" in text


@pytest.mark.parametrize("width", [72, 80, 100])
def test_no_number_of_a_tier_is_cut_off(width: int) -> None:
    counters = {
        "loaded_bytes_total": 9e9,
        "stored_bytes_total": 9e9,
        "blocks_total": {"hit": 9.2e8},
        "job_seconds": {"load": {"buckets": {"0.025": 50}}},
    }
    fields = {"used_bytes": 98 * 10**9, "capacity_bytes": None, "is_disabled": True}
    lines = drawn(view_of(None, answer(status(tier("a" * 30, counters, **fields)))), width)
    row = next(line for line in lines if line.startswith("aaa"))
    assert row.count("…") == 1, "in the name"
    assert row.rstrip().endswith("DISABLED 91.3GiB")


def test_a_process_without_an_answer_is_shown_as_such() -> None:
    view = view_of(None, answer(busy(10.0, 1)))
    text = "\n".join(drawn(view, 80, "NO ANSWER: connection refused"))
    assert "NO ANSWER: connection refused" in text
    assert "disk" in text
    assert "NO ANSWER" in "\n".join(drawn(None, 80, "NO ANSWER"))


def test_events_that_repeat_are_one_line() -> None:
    notices = [
        {"time": 1.0, "tier": "disk", "what": "first exception", "count": 1},
        {"time": 2.0, "tier": "disk", "what": "breaker open", "count": 20},
    ]
    text = "\n".join(drawn(view_of(None, answer(busy(100.0, 1, notices=notices))), 80))
    shown = text.partition("last events")[2].splitlines()[1:]
    assert [" ".join(line.split()[3:]) for line in shown] == ["breaker open (20 times)", "first exception"]


@settings(max_examples=settings().max_examples // 3)
@given(
    st.builds(
        lambda fields, counters: status(tier("cpu"), {**tier("disk"), "counters": counters, **fields}),
        st.fixed_dictionaries({}, optional={"name": st.text(), "used_bytes": st.integers(0, 10**24)}),
        st.fixed_dictionaries({}, optional={"misses_total": st.dictionaries(st.text(), st.integers(0, 10**20))}),
    )
    | st.sampled_from([busy(10.0, 1000), hostile()]),
    st.integers(20, 200),
)
def test_a_screen_fits_whatever_the_process_answers(shown: Status, width: int) -> None:
    lines = drawn(view_of(None, answer(shown)), width)
    assert all(cell_len(line) <= width and line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0"), (0.01, "<0.1"), (3.14, "3.1"), (12, "12"), (999.4, "999"), (1000, "1.0k"),
     (12345, "12.3k"), (1e7, "10.0M"), (1e30, ">999P")],
)  # fmt: skip
def test_a_count_is_short(count: float, expected: str) -> None:
    assert number(count) == expected


def test_once_prints_a_table_of_one_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusServer(growing()) as server:
        assert main(["top", server.address, "--once", "--interval", "100ms"]) == 0
    text = capsys.readouterr().out
    assert len(server.requests) == 2
    assert "over 1s" in text
    assert re.search(r"missed +cpu +evicted +40 +80", text)


def test_once_fits_the_terminal(tmp_path: Path) -> None:
    with (
        StatusServer(growing(version="1" * 90)) as server,
        Terminal([*COMMAND, server.address, "--once", "--interval", "100ms"], tmp_path, size=(72, 24)) as terminal,
    ):
        status, shown = terminal.end()
    lines = [line for line in ESCAPES.sub("", shown).replace("\r", "\n").splitlines() if "━" not in line]
    assert (status, max(map(cell_len, lines))) == (0, 72)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 0), ({"breaker": "half_open"}, 1), ({"breaker": "open"}, 1), ({"is_disabled": True}, 1)],
)
def test_the_status_of_once_is_1_if_a_tier_is_out_of_use(fields: Status, expected: int) -> None:
    with StatusServer(lambda: response(status(tier("cpu"), tier("disk", **fields)))) as server:
        assert main(["top", server.address, "--once", "--interval", "100ms"]) == expected


def test_what_a_real_stack_did_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    block_bytes = 4096
    ram = {"type": "memory", "name": "ram", "capacity": "1MiB"}
    with open_stack(stack_of(ram, blocks=4, metrics={"listen": "127.0.0.1:0"})) as stack:
        keys = [number.to_bytes(32, "big") for number in range(4)]
        stack.put(keys, np.ones((4, block_bytes), np.uint8))
        assert stack.flush()
        assert stack.server is not None
        url = f"http://127.0.0.1:{stack.server.port}"
        assert main(["top", url, "--json", "--interval", "100ms"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["url"] == url
    assert [(each["name"], each["breaker"]) for each in shown["tiers"]] == [("cpu", ""), ("ram", "closed")]
    assert all(each["used_bytes"] >= 4 * block_bytes for each in shown["tiers"])
    assert shown["tiers"][1]["store_budget_bytes"] > 0


@pytest.mark.parametrize("answer_bytes", [b"", response(b"{}"), response(b"no", "HTTP/1.1 404 Not Found")])
def test_once_without_a_status_is_an_error(capsys: pytest.CaptureFixture[str], answer_bytes: bytes) -> None:
    with StatusServer(lambda: answer_bytes) as server:
        assert main(["top", server.address, "--once", "--interval", "100ms"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: http://{server.address}: ")


def test_a_hostile_answer_is_printed_without_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusServer(lambda: response(hostile())) as server:
        assert main(["top", server.address, "--once", "--interval", "100ms"]) == 0
        assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
        assert main(["top", server.address, "--json", "--interval", "100ms"]) == 0
    assert json.loads(capsys.readouterr().out)["version"].isprintable()


def test_every_field_is_described() -> None:
    view = view_of(None, answer(busy(10.0, 1, notices=[{"time": 1.0, "tier": "disk", "what": "x"}])))
    names = [name for each in (view, view["tiers"][0], view["reasons"][0], view["notices"][0]) for name in each]
    assert undescribed(names, "reference/command.md", "top") == set()


def test_without_a_terminal_it_shows_one_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusServer(growing()) as server:
        assert main(["top", server.address, "--interval", "100ms"]) == 0
    shown = capsys.readouterr().out
    assert sum(line.startswith("tier ") for line in shown.splitlines()) == 1
    assert "\x1b" not in shown


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Terminal, StatusServer]]:
    """`top` on a terminal, with what the parameter sets in its environment, and the process that it asks."""
    environ = getattr(request, "param", {})
    with (
        StatusServer(growing()) as server,
        Terminal([*COMMAND, server.address, "--interval", "100ms"], tmp_path, environ) as terminal,
    ):
        yield terminal, server


Served = tuple[Terminal, StatusServer]


@pytest.mark.slow
def test_on_a_terminal_the_key_q_ends_it_at_once_and_no_other_is_shown(terminal: Served) -> None:
    top, _ = terminal
    top.wait_for("evicted")
    top.type("x!q")
    status_, shown = top.end()
    assert status_ == 0
    assert "x!" not in shown
    assert MAIN_SCREEN in shown
    assert SHOW_CURSOR in shown


def test_the_key_q_is_read_though_the_answer_took_longer_than_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal_ = pty.openpty()
    with open(keyboard, "wb", buffering=0) as keys, open(terminal_) as stdin:
        tty.setcbreak(stdin)
        keys.write(b"xq")
        monkeypatch.setattr(sys, "stdin", stdin)
        assert _is_ended(time.monotonic() - 1.0)
        monkeypatch.setattr(sys, "stdin", None)  # as after `<&-`
        assert not _is_ended(time.monotonic() - 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("number_", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_on_a_terminal_it_draws_until_a_signal_and_puts_the_terminal_back(
    terminal: Served, number_: signal.Signals
) -> None:
    top, _ = terminal
    assert "tier" in top.wait_for("evicted")
    top.type(CTRL_C) if number_ is signal.SIGINT else top.signal(number_)
    status_, shown = top.end()
    assert status_ == 128 + number_
    assert MAIN_SCREEN in shown
    assert SHOW_CURSOR in shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_on_a_terminal_a_process_that_goes_away_is_shown_and_asked_again(terminal: Served) -> None:
    top, server = terminal
    top.wait_for("evicted")
    server.answer = lambda: b""
    assert re.search(r"NO ANSWER since [\d:]{8}: ", top.wait_for("the answer is not"))
    server.answer = growing()
    top.wait_for("hits")
    top.resize((50, 12))
    top.wait_for("tier")


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [{"TERM": "dumb"}], indirect=True)
def test_a_dumb_terminal_gets_a_table(terminal: Served) -> None:
    top, _ = terminal
    top.wait_for("evicted")
    status_, shown = top.end()
    assert status_ == 0
    assert "\x1b" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [{"PYTHONIOENCODING": "ascii"}], indirect=True)
def test_a_terminal_that_knows_ascii_only_gets_ascii(terminal: Served) -> None:
    top, server = terminal
    server.answer = lambda: response(status(tier("cpu"), tier("näme"), uptime_s=5.0))
    shown = top.wait_for("n?me")
    assert shown.isascii()
