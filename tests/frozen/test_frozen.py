"""Payloads, frames, specifications, logs, anchors and exports are those of the golden file, bit for bit.

``python -m tests.frozen.write`` writes the file anew. Do so only where a value is meant to change; say why.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import pytest

from tests.frozen.trained import trained
from tests.frozen.values import SECTIONS
from tests.frozen.write import GOLDEN


def golden(section: str) -> Any:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))[section]


@pytest.mark.parametrize("section", SECTIONS)
def test_values_are_as_they_were(section: str) -> None:
    """A new name, such as that of another matrix, changes nothing that was there."""
    found, known = json.loads(json.dumps(SECTIONS[section]())), golden(section)
    new = found.keys() - known.keys() if section != "status" else set()
    assert {name: value for name, value in found.items() if name not in new} == known


def test_swarms_train_and_exports_hold_the_same_bits_as_before() -> None:
    """Exports everywhere; swarms with the interpreter and the torch of the golden file.

    Matrix products are torch's, and the order of callbacks in a virtual swarm is the interpreter's.
    """
    found, known = trained(), golden("trained")
    if f"{sys.version_info.major}.{sys.version_info.minor}, {version('torch')}" != golden("of"):
        found, known = found["exported"], known["exported"]
    assert found == known
