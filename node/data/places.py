"""The places of sources in the JSON of a specification, for copies of it that others read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_places(data: dict[str, Any], told: Callable[[str, str], str]) -> dict[str, Any]:
    """`data`, the JSON of a data section, with `told(source, name)` in place of each source."""

    def of(given: Any, name: str = "") -> Any:
        if isinstance(given, str):
            return told(given, name)
        return [each | {"source": told(each["source"], each["name"])} for each in given]

    changed = data | {"source": of(data["source"])}
    if "validation" in data:
        changed["validation"] = of(data["validation"], "validation")
    if "past" in data:
        changed["past"] = [each | {"source": of(each["source"])} for each in data["past"]]
    return changed
