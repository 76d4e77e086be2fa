"""A clock that is a day off makes certificates look expired or not yet valid: the node says so, and waits."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from coordinator import app
from coordinator.authority import open_authority
from node.net.enrollment import enroll
from node.net.membership import TEMPORARY
from node.security.identity import open_identity
from protocol.errors import HetnodeError
from protocol.trust.invite import Invite
from tests.builders import spec_of
from tests.support.coordinator_process import running


@pytest.mark.parametrize(("days", "what"), [(2, "not yet valid"), (-2, "expired")])
async def test_a_clock_that_is_off_is_named_and_the_node_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, what: str
) -> None:
    clock = lambda: time.time() + days * 86400.0  # noqa: E731
    monkeypatch.setattr(app, "open_authority", partial(open_authority, clock=clock))
    async with running(spec_of(), tmp_path / "run") as run:
        invite = Invite(run.address, run.enrollment, run.authority.pin, "0" * 12, bytes(16))
        with pytest.raises(HetnodeError) as caught:
            await enroll(invite, open_identity(tmp_path / "key"), 5.0)
    assert caught.value.code in TEMPORARY, caught.value
    assert what in caught.value.cause
    assert time.strftime("%Y-%m-%d", time.gmtime()) in caught.value.cause
    assert "clock" in caught.value.remedy
    issued = time.strftime("issued after %Y-%m-%d", time.gmtime(clock() - 3600))
    assert issued in caught.value.cause
