"""A clock that is a day off makes certificates look expired or not yet valid: the node says so, and waits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from coordinator import app
from coordinator.authority import ServerCertificate, open_authority
from node import hooks
from node.net import coordinator_client, enrollment, joining, own_address
from node.net.coordinator_channel import CoordinatorChannel
from node.net.enrollment import enroll
from node.net.joining import obtain_credentials
from node.net.membership import TEMPORARY
from node.net.waiting import CoordinatorWait
from node.security import channels
from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.clock import bound_by
from protocol.trust.invite import Invite
from protocol.trust.reachability import Addresses
from protocol.types import Capacity
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
    assert "is at least " in caught.value.cause
    assert ("behind" if days > 0 else "ahead of") in caught.value.cause


class Clock:
    """Stands in for the module `time` in modules of this node."""

    def __init__(self) -> None:
        self.off = 0.0
        self.monotonic, self.gmtime, self.strftime = time.monotonic, time.gmtime, time.strftime

    def time(self) -> float:
        return time.time() + self.off


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (joining, enrollment, channels, coordinator_client):
        monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(hooks.Hooks, "time", lambda _: found.time())
    return found


async def test_a_node_whose_own_certificate_has_expired_by_a_wrong_clock_alone_waits_for_it(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(spec_of(), tmp_path / "run") as run:
        identity = open_identity(tmp_path / "key")
        known = await enroll(await run.invite(), identity, 5.0)
        clock.off = 2 * 86400.0
        waiting = asyncio.create_task(obtain_credentials(None, known.run, identity, CoordinatorWait(60.0)))
        async with asyncio.timeout(20):
            while "waiting for the coordinator" not in caplog.text:  # noqa: ASYNC110  a log has no event
                await asyncio.sleep(0.05)
        assert "This node's certificate has expired by the clock of this machine" in caplog.text
        assert "h ahead of the coordinator's" in caplog.text
        assert "Set the clock of this machine: this node waits" in caplog.text
        assert not waiting.done()
        clock.off = 0.0
        assert (await waiting).run == known.run


async def test_a_certificate_that_has_expired_by_a_right_clock_is_refused(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path / "run") as run:
        identity = open_identity(tmp_path / "key")
        known = await enroll(await run.invite(), identity, 5.0)
        old = replace(run.authority, clock=lambda: time.time() - 3 * 86400.0)
        key = load_pem_private_key(known.tls.key, None).public_key()
        known.renewed(old.for_peer(identity.peer, key))
        with pytest.raises(HetnodeError) as caught:
            await obtain_credentials(None, known.run, identity, CoordinatorWait(60.0))
        assert caught.value.code is ErrorCode.CERTIFICATE_REFUSED


@pytest.mark.parametrize("step", [-86400.0, 86400.0, 3 * 86400.0])
async def test_a_clock_that_is_set_in_the_middle_of_a_run_changes_no_interval(
    tmp_path: Path, clock: Clock, step: float
) -> None:
    async with running(spec_of(), tmp_path / "run") as run:
        identity = open_identity(tmp_path / "key")
        known = await enroll(await run.invite(), identity, 5.0)
        client = coordinator_client.CoordinatorClient(known, identity)
        try:
            await client.join(None, Capacity("cpu", 1 << 33, 1), Addresses(), "", 10.0)
            assert abs(client.clock_offset()) < 2
            clock.off = step
            assert abs(client.now() - time.time()) < 2
            assert abs(client.clock_offset() + step) < 2
            assert known.tls.seconds_to_renewal(client.now()) > 40_000
            async with CoordinatorChannel(known.api, known.tls, client.clock_offset) as channel:
                refused = channel.error_of(dated())
            assert (
                f"{abs(step) / 3600:.1f} h {'ahead of' if step > 0 else 'behind'} the coord" in refused.cause
            )
        finally:
            await client.close()


def dated() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: certificate has expired",
    )


def test_a_server_shows_a_certificate_in_date_after_its_clock_was_set_back(tmp_path: Path) -> None:
    now = time.time()
    certificate = ServerCertificate(open_authority(tmp_path, "run-1", clock=lambda: now))
    now += 86400.0
    certificate.pair()
    now -= 86400.0
    shown = load_pem_x509_certificate(certificate.pair()[1])
    assert shown.not_valid_before_utc.timestamp() < now


def test_a_clock_that_is_set_is_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    steady_before = own_address.wall_clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= own_address.wall_clock() - steady_before < 5


@pytest.mark.parametrize(
    ("now", "ahead"), [(0.0, -100.0), (100.0, 0.0), (700.0, 0.0), (701.0, 1.0), (5000.0, 4300.0)]
)
def test_a_certificate_bounds_the_clock_of_who_shows_it(now: float, ahead: float) -> None:
    assert bound_by(100.0, 1100.0, now) == ahead
