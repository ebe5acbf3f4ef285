"""The position of the next page of a listing, also if the server does not report it.

`Control` calls it, on the thread that lists. Each page begins after the end of the page before.
If the position cannot be known, there is no next page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final


def _after_objects(page: Mapping[str, Any]) -> Mapping[str, str]:
    if token := page.get("NextContinuationToken"):
        return {"ContinuationToken": token}
    return {"StartAfter": page["Contents"][-1]["Key"]} if page.get("Contents") else {}


def _after_objects_1(page: Mapping[str, Any]) -> Mapping[str, str]:
    marker = page.get("NextMarker") or next((each["Key"] for each in reversed(page.get("Contents", ()))), "")
    return {"Marker": marker} if marker else {}


def _after_versions(page: Mapping[str, Any]) -> Mapping[str, str]:
    last = max((each["Key"] for each in (*page.get("Versions", ()), *page.get("DeleteMarkers", ()))), default="")
    found = {"KeyMarker": page.get("NextKeyMarker") or last, "VersionIdMarker": page.get("NextVersionIdMarker")}
    return {name: value for name, value in found.items() if value}


POSITIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, str]]]] = {
    "list_objects_v2": _after_objects,
    "list_objects": _after_objects_1,
    "list_object_versions": _after_versions,
}
"""By operation, a function from a page to the parameters of the next page; none if they cannot be known."""
