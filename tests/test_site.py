"""The documentation's site in a real browser: every page fits a narrow screen, and the first one shows its parts."""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)"),
]
REPOSITORY = "https://example.org/tiered/kv"
VERSION = "0.1"
WIDTHS = (400, 1280)
"""Of frames: Chromium has no window narrower than 500 pixels."""
LETTERS_MIN_PX = 11
"""Of the picture's smallest text, after the page has scaled it."""

# Opens each page in a frame of each width, one after another, and writes what it found into the body.
MEASURE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
const shown = each => each !== null && each.getClientRects().length > 0;
function look(page, width, frame) {
  const inner = frame.contentDocument, root = inner.documentElement, picture = inner.querySelector("article img");
  const search = [...inner.querySelectorAll("label[for=__search], input.md-search__input")];
  const palette = [...inner.querySelectorAll("label[for^=__palette]")].filter(shown);
  found.push({page, width,
    scroll: root.scrollWidth,
    title: inner.querySelector("h1").textContent,
    picture: shown(picture) && picture.naturalWidth ? picture.clientWidth / picture.naturalWidth : 0,
    background: frame.contentWindow.getComputedStyle(inner.body).backgroundColor,
    version: inner.querySelector(".md-version__current")?.textContent.trim() ?? "",
    search: search.some(shown), palette: palette.length,
    edit: inner.querySelector("a.md-content__button")?.href ?? "",
    doors: [...inner.querySelectorAll(".grid.cards > ul > li")].map(each => each.getBoundingClientRect().top)});
}
async function main() {
  for (const page of pages) for (const width of widths) {
    const frame = document.createElement("iframe");
    frame.style = `width: ${width}px; height: 1000px; border: 0`;
    const loaded = new Promise(done => frame.onload = done);
    frame.src = page;
    document.body.append(frame);
    await loaded;
    await new Promise(done => setTimeout(done, 300));
    look(page, width, frame);
    frame.remove();
  }
  document.body.textContent = JSON.stringify(found);
}
main();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a version of the site, built and placed as the workflow does it, with the repository's address."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    (folder / "versions.json").write_text(json.dumps([{"version": VERSION, "title": VERSION, "aliases": ["latest"]}]))
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", str(folder / VERSION)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=900,
        env={**os.environ, "REPO_URL": REPOSITORY, "EDIT_URI": "edit/main/docs/", "NO_MKDOCS_2_WARNING": "1"},
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{VERSION}/"
        server.shutdown()
        thread.join()
    shutil.rmtree(folder)


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and the page that measures it."""

    measuring = ""

    def do_GET(self) -> None:
        if not self.path.endswith("/measure.html"):
            super().do_GET()
            return
        text = Files.measuring.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None:
        pass


def browse(address: str, folder: Path, *options: str, dark: bool = False) -> str:
    """Return what Chromium prints. It reaches this machine only."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={folder}"]
    variables = {**os.environ, "TMPDIR": str(folder), "HOME": str(folder)}
    command += ["--virtual-time-budget=600000", *options, address]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env=variables)
    return done.stdout


def measured(site: str, pages: list[str], folder: Path, *, dark: bool = False) -> list[dict[str, Any]]:
    """Return what `MEASURE` tells of each page at each width."""
    Files.measuring = MEASURE.replace("PAGES", json.dumps(pages), 1).replace("WIDTHS", json.dumps(WIDTHS), 1)
    found = re.search("<body>(.*)</body>", browse(f"{site}measure.html", folder, "--dump-dom", dark=dark), re.DOTALL)
    assert found is not None
    told: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    assert len(told) == len(pages) * len(WIDTHS)
    return told


def is_dark(color: str) -> bool:
    return sum(int(each) for each in re.findall(r"\d+", color)[:3]) < 3 * 128


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_first_page_has_one_picture_three_doors_search_and_the_way_to_edit_it(
    site: str, dark: bool, tmp_path: Path
) -> None:
    for page in measured(site, ["index.html"], tmp_path, dark=dark):
        assert page["scroll"] <= page["width"], "nothing sticks out"
        assert is_dark(page["background"]) == dark
        assert page["picture"] * 16 >= LETTERS_MIN_PX, "its letters can be read"
        assert len(page["doors"]) == 3
        assert len(set(page["doors"])) == (3 if page["width"] == 400 else 1), "below each other, or side by side"
        assert page["search"]
        assert page["version"] == VERSION, "the selector names it"
        assert page["palette"] == 1
        assert page["edit"] == f"{REPOSITORY}/edit/main/docs/index.md"
        browse(f"{site}index.html", tmp_path, f"--screenshot={tmp_path}/{page['width']}.png", dark=dark)
        assert (tmp_path / f"{page['width']}.png").stat().st_size > 10_000


def test_every_page_fits_a_narrow_screen(site: str, tmp_path: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    told = measured(site, sorted(pages), tmp_path)
    assert [(page["page"], page["width"]) for page in told if page["scroll"] > page["width"]] == []
    assert all(page["title"] for page in told)
