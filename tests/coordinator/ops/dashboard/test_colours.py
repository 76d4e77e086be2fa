"""Words on coloured ground can be read: WCAG 2.2, level AA, 4.5 to 1 for small text."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

_CSS = (files("coordinator.ops.dashboard") / "static" / "dashboard.css").read_text()
_BLOCKS = re.findall(r":root \{(.*?)\}", _CSS, re.DOTALL)
_THEMES = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in _BLOCKS]
_KINDS = ("good", "wait", "bad", "accent")


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", _THEMES, ids=["light", "dark"])
def test_badges_and_quiet_words_have_enough_contrast(theme: dict[str, str]) -> None:
    pairs = [(theme[kind], theme[f"{kind}-soft"]) for kind in _KINDS]
    pairs += [(theme["quiet"], theme[ground]) for ground in ("bg", "card", "raised")]
    pairs += [(theme[kind], theme["card"]) for kind in _KINDS]
    assert [pair for pair in pairs if contrast(*pair) < 4.5] == []
