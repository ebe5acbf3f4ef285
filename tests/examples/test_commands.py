"""The commands that the pages about inspection, reports and the live view show do what the pages say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.support.pages import commands
from tiered_kv._cli.output import Status
from tiered_kv.cli import main
from tiered_kv.stack import open_stack
from tiered_kv.testing.servers import free_port

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.mark.slow
@pytest.mark.usefixtures("drawing_library")
def test_the_commands_on_the_pages_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "quickstart.yaml").write_text(QUICKSTART.read_text())
    config = {**yaml.safe_load(QUICKSTART.read_text()), "metrics": {"listen": f"127.0.0.1:{free_port()}"}}
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(config))

    def run(command: str) -> str:
        capsys.readouterr()
        assert main(shlex.split(command, comments=True)[1:]) == Status.OK, command
        return capsys.readouterr().out

    replayed, measured = commands("reference/command.md")
    for command in (replayed, measured):
        run(command)
        page = Path(re.findall(r"\S+\.html", command)[0]).read_text()
        assert page.count("<svg") > 1, command
    with open_stack(str(tmp_path / "stack.yaml")) as stack:
        keys = [bytes([number]) for number in range(8)]
        assert stack.put(keys, np.ones((8, 64 << 10), np.uint8)) == 8
        assert stack.flush()
    found, verified, repaired = (run(command) for command in commands("how-to/inspect.md"))
    assert "example/quickstart" in found
    assert "checksum" in verified
    assert "checksum" in repaired
    with open_stack(str(tmp_path / "stack.yaml")):
        once, as_json = [run(each) for each in commands("how-to/monitoring.md") if "--once" in each or "--json" in each]
    assert "nvme" in once
    assert '"tiers"' in as_json
