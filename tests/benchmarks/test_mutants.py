"""The planted faults are of the code as it is."""

from __future__ import annotations

import pytest

from benchmarks.mutants import MUTANTS
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_one_place_that_has_tests(name: str) -> None:
    mutant = MUTANTS[name]
    assert (ROOT / mutant.file).read_text().count(mutant.sound) == 1
    assert mutant.sound != mutant.faulty
    assert all((ROOT / path).exists() for path in mutant.tests)
