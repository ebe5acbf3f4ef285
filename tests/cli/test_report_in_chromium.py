"""A report's page in a real browser: light, dark, narrow and printed, it can be read, and nothing is fetched."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.stacks import stack_file
from tiered_kv.cli.main import main

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)"),
    pytest.mark.usefixtures("drawing_library"),
]

CHATS = ["--chats", "30", "--turns", "4", "--active-chats", "10", "--turn-blocks", "3"]
OPTIONS = {"replay": CHATS, "simulate": [*CHATS, "--capacity", "50,100,200"]}
PLOTS = {"replay": 2, "simulate": 1}
WIDTHS = (1280, 800, 400)
CONTRAST_MIN = 4.5
"""Of text, as the Web Content Accessibility Guidelines have it (level AA)."""
PAGES_MAX = 6

# Of each frame, its page's width, plots, backgrounds, and each text with its colour and that which it stands on.
MEASURE = """<script>onload = () => {
  const opaque = color => !/rgba\\(.*, 0\\)|transparent/.test(color);
  document.body.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const style = each => frame.contentWindow.getComputedStyle(each);
    const texts = [];
    for (const each of page.querySelectorAll("main *")) {
      if (![...each.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
      let below = each;
      while (below && !opaque(style(below).backgroundColor)) below = below.parentElement;
      const letters = each.namespaceURI.endsWith("svg") ? style(each).fill : style(each).color;
      texts.push([each.textContent.trim(), letters, style(below || root).backgroundColor]);
    }
    const plots = [...page.querySelectorAll("svg")].map(each =>
      [each.clientWidth, each.getBBox().height, each.closest(".card").clientWidth]);
    const backgrounds = [root, page.querySelector(".card")].map(each => style(each).backgroundColor);
    return {width: root.scrollWidth, plots, backgrounds, texts};
  }));
}</script>"""


@pytest.fixture(scope="module", params=PLOTS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that the command wrote; its name is the verb."""
    verb, directory = str(request.param), tmp_path_factory.mktemp("page")
    nvme, file = f"type: nvme, path: {directory / 'cache'}, capacity: 64MiB", directory / f"{verb}.html"
    stack = stack_file(directory, nvme, "type: memory, capacity: 64MiB, admit_after: 2", capacity="400KiB")
    assert main([verb, stack, "--report", str(file), *OPTIONS[verb]]) == 0
    return file


def browse(page: Path, *options: str, dark: bool) -> str:
    """Open a page in Chromium, which may complain of nothing, such as what the page's policy forbids."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", *options, page.as_uri()]
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # the path of its socket has 107 characters at most
        variables = {**os.environ, "TMPDIR": home, "HOME": home}
        command.insert(1, f"--user-data-dir={home}")
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=variables)
    assert "CONSOLE" not in done.stderr
    return done.stdout


def measured(directory: Path, text: str, *, dark: bool) -> list[dict[str, Any]]:
    """Return what `MEASURE` tells of a page in frames of each of `WIDTHS`, in which its policy holds."""
    frames = (f'<iframe style="width: {width}px" srcdoc="{html.escape(text)}"></iframe>' for width in WIDTHS)
    page = directory / "frames.html"
    page.write_text(f"<!doctype html><style>iframe {{border: 0}}</style><body>{''.join(frames)}{MEASURE}")
    found = re.search("<body>(.*)</body>", browse(page, "--dump-dom", dark=dark), re.DOTALL)
    assert found is not None
    told: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return told


def brightness(color: str) -> float:
    """Return the relative luminance of a colour."""
    channels = [int(each) / 255 for each in re.findall(r"\d+", color)[:3]]
    linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((brightness(one), brightness(other)))
    return (light + 0.05) / (dark + 0.05)


def assert_readable(texts: list[tuple[str, str, str]]) -> None:
    """Check that every text of a page differs from what it stands on."""
    assert len(texts) > 50
    assert [text for text in texts if contrast(text[1], text[2]) < CONTRAST_MIN] == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_can_be_read_and_fetches_nothing(file: Path, dark: bool, tmp_path: Path) -> None:
    for width, page in zip(WIDTHS, measured(tmp_path, file.read_text(), dark=dark), strict=True):
        assert page["width"] <= width, "nothing sticks out"
        assert all(shown > 0.85 * card for shown, _, card in page["plots"]), "a plot is as wide as there is room"
        assert min(shown for shown, _, _ in page["plots"]) > 500, "its letters can be read; on a narrow page it scrolls"
        assert sum(height > 20 for _, height, _ in page["plots"]) == PLOTS[file.stem]
        assert (brightness(page["backgrounds"][0]) < 0.1) == dark
        assert_readable(page["texts"])


def test_a_page_prints_light_on_a_few_sheets(file: Path, tmp_path: Path) -> None:
    browse(file, f"--print-to-pdf={tmp_path}/printed.pdf", dark=True)
    printed = (tmp_path / "printed.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= PAGES_MAX
    on_paper = file.read_text().replace("@media screen", "@media speech").replace("@media print", "@media screen")
    for page in measured(tmp_path, on_paper, dark=True):
        assert brightness(page["backgrounds"][1]) == 1
        assert_readable(page["texts"])
