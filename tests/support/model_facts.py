"""Twenty public models: what `tiered-kv size` needs of their configurations, and the table that it makes of them.

`tests/engines/models.json` has the numbers that each model's publisher wrote into its `config.json`, and no others.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from tiered_kv.cli.main import main
from tiered_kv.config.units import rounded_bytes

FACTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "engines/models.json").read_text())
CONTEXT = "32k"
PAGE = Path(__file__).parents[2] / "docs/how-to/size-a-cache.md"
MARK = "<!-- by tiered-kv size: python -m tests.support.model_facts -->\n"


def write_model(directory: Path, config: object) -> Path:
    """Write a model's `config.json` into a new folder."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def sized(folder: Path) -> dict[str, Any]:
    """Return what the command says of a model, and of one user with a prompt of `CONTEXT`."""
    load = ["--users", "1", "--context", CONTEXT, "--turn-gap", "5m"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["size", str(folder), *load, "--json"]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def table() -> str:
    lines = ["| model | layers | a token | a block | a prompt of 32,768 tokens |", "| --- | --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as directory:
        for name, config in FACTS.items():
            found = sized(write_model(Path(directory) / name.replace(" ", "-"), config))
            longer = "" if found["block_tokens"] == 16 else f" ({found['block_tokens']} tokens)"
            block = rounded_bytes(found["block_bytes"]) + longer
            token = rounded_bytes(found["token_bytes"]) if found["token_bytes"] else "none"
            prompt = rounded_bytes(found["prompt_bytes"])
            layers = "; ".join(map(_described, found["layers"]))
            lines.append(f"| {name} | {layers} | {token} | {block} | {prompt} |")
    return "\n".join(lines) + "\n"


def _described(layers: dict[str, Any]) -> str:
    """Return how a table names layers that are alike: "12 full, 8 x 64" has 8 KV heads of 64 elements."""
    short = {"full attention": "full", "latent attention (MLA)": "latent", "sliding window": "window"}
    name = short.get(layers["kind"], layers["name"] or "chunks")
    span = f" {layers['span']:,}" if layers["span"] else ""
    if layers["name"]:
        return f"{layers['number']} {name}"
    size = f"{layers['elements']}" if name == "latent" else f"{layers['heads']} x {layers['elements'] // 2}"
    return f"{layers['number']} {name}{span}, {size}"


def with_table(text: str) -> str:
    """Return the page with the table that the command makes now."""
    before, mark, after = text.partition(MARK)
    assert mark
    rest = after.lstrip("\n").split("\n\n", 1)[1]
    return f"{before}{mark}\n{table()}\n{rest}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
