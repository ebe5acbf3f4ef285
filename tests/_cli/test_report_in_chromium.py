"""A report's page in a real browser: light, dark, narrow and printed, it can be read, and nothing is fetched."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Chromium, Page, find_chromium
from tests.support.stacks import stack_file
from tiered_kv.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed (Debian's package chromium)"),
    pytest.mark.usefixtures("drawing_library"),
]

CHATS = ["--chats", "30", "--turns", "4", "--active-chats", "10", "--turn-blocks", "3"]
OPTIONS = {"replay": CHATS, "simulate": [*CHATS, "--capacity", "50,100,200"]}
PLOTS = {"replay": 2, "simulate": 1}
CONTRAST_MIN = 4.5
"""Of text, as the Web Content Accessibility Guidelines have it (level AA)."""
PAGES_MAX = 6

# The colours of every text of the page, and of what it stands on.
COLORS = """(() => {
  const opaque = color => !/rgba\\(.*, 0\\)|transparent/.test(color);
  const texts = [];
  for (const each of document.querySelectorAll("main *")) {
    if (![...each.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    let below = each;
    while (below && !opaque(getComputedStyle(below).backgroundColor)) below = below.parentElement;
    const style = getComputedStyle(each);
    const letters = each instanceof SVGElement ? style.fill : style.color;
    texts.push([each.textContent.trim(), letters, getComputedStyle(below || document.documentElement).backgroundColor]);
  }
  return JSON.stringify(texts);
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, Chromium(Path(directory)) as browser:
        yield browser


@pytest.fixture(scope="module", params=PLOTS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that the command wrote; its name is the verb."""
    verb, directory = str(request.param), tmp_path_factory.mktemp("page")
    nvme, file = f"type: nvme, path: {directory / 'cache'}, capacity: 64MiB", directory / f"{verb}.html"
    stack = stack_file(directory, nvme, "type: memory, capacity: 64MiB, admit_after: 2", capacity="400KiB")
    assert main([verb, stack, "--report", str(file), *OPTIONS[verb]]) == 0
    return file


def brightness(color: str) -> float:
    """Return the relative luminance of a colour."""
    channels = [int(each) / 255 for each in re.findall(r"\d+", color)[:3]]
    linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((brightness(one), brightness(other)))
    return (light + 0.05) / (dark + 0.05)


def assert_readable(page: Page) -> None:
    """Check that every text of a page differs from what it stands on."""
    texts = json.loads(page.value(COLORS))
    assert len(texts) > 50
    weak = [text for text in texts if contrast(text[1], text[2]) < CONTRAST_MIN]
    assert weak == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_can_be_read_and_fetches_nothing(browser: Chromium, file: Path, dark: bool) -> None:
    for width in (1280, 800, 400):
        page = browser.open(file, width=width, dark=dark)
        assert page.complaints == []
        assert page.fetched == [file.as_uri()]
        assert page.value("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        narrowest = page.value("Math.min(...[...document.querySelectorAll('svg')].map(each => each.clientWidth))")
        assert narrowest > 0.7 * min(width, 500), "a plot is as wide as there is room"
        drawn = page.value("[...document.querySelectorAll('svg')].filter(each => each.getBBox().height > 20).length")
        assert drawn == PLOTS[file.stem]
        background = page.value("getComputedStyle(document.documentElement).backgroundColor")
        assert (brightness(background) < 0.1) == dark
        assert_readable(page)


def test_a_page_prints_light_on_a_few_sheets(browser: Chromium, file: Path) -> None:
    page = browser.open(file, dark=True)
    printed = page.pdf()
    assert printed.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= PAGES_MAX
    page.emulate(media="print", dark=True)
    background = page.value("getComputedStyle(document.querySelector('.card')).backgroundColor")
    assert brightness(background) == 1
    assert_readable(page)
    assert page.complaints == []
