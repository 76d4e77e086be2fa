"""The run that a command names: commands share it, so its errors name no command."""

from __future__ import annotations

import pytest

from node.cli import known_runs
from protocol.errors import ErrorCode, HetnodeError


def test_the_remedy_for_a_missing_destination_fits_join_and_relay() -> None:
    with pytest.raises(HetnodeError) as caught:
        known_runs.destination(None, None)
    assert caught.value.code is ErrorCode.BAD_OPTION
    assert "--invite-file" in str(caught.value)
    assert "hetnode join" not in str(caught.value)
