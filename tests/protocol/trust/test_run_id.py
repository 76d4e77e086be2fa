"""The id of a run names its specification and its authority."""

from __future__ import annotations

import hashlib

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.run_id import check_run_id, names_authority, run_id_of, spec_name_in
from tests.builders import spec_of

SPEC = spec_of()
ONE, OTHER = (hashlib.sha256(name).digest() for name in (b"one authority", b"another"))


def test_two_runs_of_one_specification_have_different_ids() -> None:
    assert run_id_of(SPEC, ONE) != run_id_of(SPEC, OTHER)
    assert run_id_of(SPEC, ONE) != run_id_of(spec_of(rounds=4), ONE)


def test_an_id_has_128_bits_of_the_authority() -> None:
    run = run_id_of(SPEC, ONE)
    assert run == f"{SPEC.name}-{ONE.hex()[:32]}"
    assert spec_name_in(run) == SPEC.name
    assert names_authority(run, ONE)
    assert not names_authority(run, OTHER)
    assert not names_authority(SPEC.name, ONE)


@pytest.mark.parametrize("told", [run_id_of(SPEC, OTHER), run_id_of(spec_of(rounds=4), ONE), SPEC.name, ""])
def test_the_id_that_a_coordinator_tells_is_compared(told: str) -> None:
    check_run_id(run_id_of(SPEC, ONE), SPEC, ONE)
    with pytest.raises(HetnodeError) as refused:
        check_run_id(told, SPEC, ONE)
    assert refused.value.code is ErrorCode.WRONG_AUTHORITY
