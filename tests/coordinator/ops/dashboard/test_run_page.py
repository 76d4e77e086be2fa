"""What a real coordinator tells everyone of its run, where its operator wants that."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.membership.open_places import CLOSED, OpenTerms
from protocol.trust.invite import open_invite
from protocol.wire.run_page import PATH, open_page
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import running
from tests.support.dashboard import address_of, ask

LOOPBACK, EVERYWHERE = "127.0.0.1:0", "0.0.0.0:0"


@pytest.mark.parametrize("listen", [LOOPBACK, EVERYWHERE])
@pytest.mark.parametrize("terms", [CLOSED, OpenTerms(4, 4)])
async def test_a_run_is_published_with_its_contact_or_when_it_is_open(
    tmp_path: Path, listen: str, terms: OpenTerms
) -> None:
    """Also where readers of the pages need a token."""
    contact = "" if terms.members else "ada@example.org"
    async with running(spec_of(), tmp_path, dashboard=listen, terms=terms, contact=contact) as coordinator:
        await coordinator.enroll(keyed(0), await coordinator.invite())
        await coordinator.join(keyed(0))
        answer = await ask(address_of(tmp_path), PATH)
        assert answer.status == 200
        assert (await ask(address_of(tmp_path), "/api/status")).status == (200 if listen == LOOPBACK else 401)
        page, invite = open_page(answer.body)
        assert (page.run, page.authority) == (coordinator.run, coordinator.authority.pin.hex())
        assert (page.members, page.rounds, page.rounds_decided) == (1, coordinator.spec.rounds, 0)
        assert page.contact == contact
        own = open_invite(coordinator.address, coordinator.enrollment, coordinator.authority.pin)
        assert invite == (own if terms.members else None)


async def test_a_run_that_its_operator_does_not_publish_says_nothing(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=EVERYWHERE) as coordinator:
        answer = await ask(address_of(tmp_path), PATH)
        assert answer.status == 404
        assert coordinator.authority.pin.hex() not in answer.text
