"""Lets a real node cheat. Python imports this at its start where PYTHONPATH names this folder."""

import os

import pytest

from tests.support.cheats import KIND_VARIABLE, cheat

cheat(pytest.MonkeyPatch(), {"node": os.environ[KIND_VARIABLE]}, lambda: "node")
