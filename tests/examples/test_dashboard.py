"""The dashboard, beside Grafana's own model of dashboards (`grafana-foundation-sdk`); no Grafana runs here."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus, statetimeline, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from tests.support.prometheus import MONITORING

TEXT = (MONITORING / "dashboard.json").read_text()
BOARD = json.loads(TEXT)
OPTIONS = {"timeseries": timeseries.Options, "state-timeline": statetimeline.Options}
COLUMNS = 24


def read(board: Any) -> Dashboard:  # Any: JSON
    register_default_plugins()
    return Dashboard.from_json(board)


def test_grafana_s_model_has_every_field_of_the_dashboard() -> None:
    assert list(lost(BOARD, written(read(BOARD)))) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    board = json.loads(TEXT)
    board["panels"][1]["targets"][0]["expression"] = "up"
    assert list(lost(board, written(read(board)))) == [".panels[1].targets[0].expression"]


def test_every_panel_is_of_a_kind_that_the_model_knows_and_asks_prometheus() -> None:
    shown = [panel for panel in read(BOARD).panels or () if isinstance(panel, Panel)]
    assert len(shown) == sum(panel["type"] != "row" for panel in BOARD["panels"])
    for panel in shown:
        assert isinstance(panel.options, OPTIONS[panel.type_val]), panel.title
        letters = {target.ref_id for target in panel.targets or () if isinstance(target, prometheus.Dataquery)}
        assert len(letters) == len(panel.targets or ()) > 0, panel.title


def test_panels_lie_beside_each_other_and_variables_are_defined() -> None:
    places: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS, panel["title"]
        covered = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not places & covered, panel["title"]
        places |= covered
    defined = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", TEXT)) - {"__all", "__rate_interval"} == defined


def written(board: Dashboard) -> Any:  # Any: JSON
    return json.loads(JSONEncoder().encode(board))


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:  # Any: JSON
    """Yield the paths of what a model that has read `ours` does not write again."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from lost(value, theirs.get(name), f"{path}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(*pair, f"{path}[{index}]")
    elif ours != theirs:
        yield path
