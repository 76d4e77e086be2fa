"""A node's way into a run: from an invite to a certificate, and from one certificate to the next."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from node.net.coordinator_channel import fetch_status
from node.net.coordinator_client import CoordinatorClient
from node.net.enrollment import enroll
from node.net.plan_updates import PlanUpdate
from node.security import credentials as kept
from node.security.credentials import RunCredentials
from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.trust.reachability import Addresses
from protocol.types import Capacity, PeerId, Role
from protocol.wire.operator_calls import BanPeer
from tests.builders import keyed, spec_of
from tests.support import certificates
from tests.support.certificates import authority, credentials
from tests.support.coordinator_process import COORDINATOR, Running, new_key, pem, running

CAPACITY = Capacity("cpu", 2**30, 1)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    """A coordinator that waits for two full replicas of two stages."""
    (tmp_path / "coordinator").mkdir()
    async with running(spec_of(), tmp_path / "coordinator") as coordinator:
        yield coordinator


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return open_identity(tmp_path / "peer.key")


async def enrolled(run: Running, identity: Identity) -> RunCredentials:
    return await enroll(await run.invite(), identity, 10)


async def join(client: CoordinatorClient) -> None:
    admission = await client.join(Role.REPLICA, CAPACITY, Addresses("127.0.0.1:9"), "", 10)
    assert admission.spec == spec_of()


async def last_of(client: CoordinatorClient) -> PlanUpdate:
    """Of the stream of plans."""
    return [news async for news in client.watch()][-1]


async def test_enrolling_gives_credentials_that_can_be_used_repeatedly(
    run: Running, identity: Identity
) -> None:
    credentials = await enrolled(run, identity)
    assert (credentials.run, credentials.api) == (run.run, run.address)
    assert credentials.coordinator == COORDINATOR.peer
    assert kept.load(kept.folder_of(identity.path, run.run)) == credentials
    for _ in range(2):
        client = CoordinatorClient(kept.load(credentials.folder), identity)
        await join(client)
        await client.leave("that was all")
        await client.close()
    status = await fetch_status(credentials.api, credentials.tls)
    assert status.run == run.run


async def test_stored_credentials_are_readable_by_their_owner_only(run: Running, identity: Identity) -> None:
    credentials = await enrolled(run, identity)
    files = [*credentials.folder.iterdir()]
    assert {file.name for file in files} == {"key.pem", "certificate.pem", "authority.pem", "run.json"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(credentials.folder.stat().st_mode) == 0o700
    lines = credentials.tls.key.decode().splitlines()  # the word "key" may stand in any certificate
    assert len(lines) > 2
    assert not [line for line in lines if line in repr(credentials)]


@pytest.mark.parametrize("damage", ["no key", "no certificate", "half a run.json", "garbage"])
async def test_damaged_credentials_ask_for_an_invite(run: Running, identity: Identity, damage: str) -> None:
    folder = (await enrolled(run, identity)).folder
    match damage:
        case "no key":
            (folder / "key.pem").unlink()
        case "no certificate":
            (folder / "certificate.pem").unlink()
        case "half a run.json":
            (folder / "run.json").write_text('{"run": ')
        case _:
            (folder / "certificate.pem").write_bytes(b"\x00garbage")
    with pytest.raises(HetnodeError) as refused:
        kept.load(folder)
    assert refused.value.code is ErrorCode.NO_CREDENTIALS
    assert "invite" in refused.value.remedy


async def test_an_invite_for_one_role_is_remembered(run: Running, identity: Identity) -> None:
    credentials = await enroll(await run.invite(role="replica"), identity, 10)
    assert credentials.role is kept.load(credentials.folder).role is Role.REPLICA


async def test_another_authority_than_that_of_the_invite_receives_nothing(
    run: Running, identity: Identity
) -> None:
    invite = await run.invite()
    with pytest.raises(HetnodeError) as refused:
        await enroll(replace(invite, pin=bytes(32)), identity, 10)
    assert refused.value.code is ErrorCode.WRONG_AUTHORITY
    assert not kept.exist(kept.folder_of(identity.path, run.run))
    await enroll(invite, identity, 10)  # its one use is not spent


@pytest.mark.parametrize("answering", ["silence", "something else"])
async def test_another_server_at_the_address_is_not_taken_for_a_coordinator(
    run: Running, identity: Identity, answering: str
) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"" if answering == "silence" else b"SSH-2.0-OpenSSH_9.6\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        invite = replace(await run.invite(), enrollment=f"127.0.0.1:{port}")
        with pytest.raises(HetnodeError) as refused:
            await enroll(invite, identity, 1.0)
    expected = {
        "silence": ErrorCode.COORDINATOR_UNREACHABLE,
        "something else": ErrorCode.WRONG_AUTHORITY,
    }
    assert refused.value.code is expected[answering]


async def test_a_server_without_a_certificate_of_the_authority_receives_nothing(
    run: Running, identity: Identity
) -> None:
    """The authority's certificate is no secret: any program can put it into its own certificate."""
    key = new_key()
    liar = replace(authority("liar"), certificate=run.authority.certificate)  # signs with a key of its own

    class Liar(pb_grpc.EnrollmentServicer):
        asked = False

        async def Enroll(self, request: pb.EnrollRequest, context: object) -> pb.EnrollReply:
            self.asked = True
            return pb.EnrollReply()

    server, service = grpc.aio.server(), Liar()
    pb_grpc.add_EnrollmentServicer_to_server(service, server)
    shown = (pem(key), liar.for_coordinator(key.public_key()))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([shown]))
    await server.start()
    invite = replace(await run.invite(), enrollment=f"127.0.0.1:{port}")
    with pytest.raises(HetnodeError) as refused:
        await enroll(invite, identity, 10)
    await server.stop(None)
    assert refused.value.code is ErrorCode.WRONG_AUTHORITY
    assert not service.asked


@pytest.mark.parametrize(
    "name",
    ["../{}", "a/../../{}", ".{}", "\0{}", "a" * 200 + "-{}", "\u6f22" * 90 + "-{}", "\u202e-{}", "a\n-{}"],
)
async def test_a_run_whose_name_is_no_name_of_a_folder_is_refused(
    name: str, run: Running, identity: Identity, tmp_path: Path
) -> None:
    """An operator chooses the name of its run; the node keeps its credentials in a folder of that name."""

    class Operator(pb_grpc.EnrollmentServicer):
        async def Enroll(self, request: pb.EnrollRequest, context: object) -> pb.EnrollReply:
            told = name.format(run.run.rpartition("-")[2])
            return pb.EnrollReply(run=told, coordinator=COORDINATOR.peer, api_address=run.address)

    key, server = new_key(), grpc.aio.server()
    pb_grpc.add_EnrollmentServicer_to_server(Operator(), server)
    shown = (pem(key), run.authority.for_coordinator(key.public_key()))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([shown]))
    await server.start()
    invite = replace(await run.invite(), enrollment=f"127.0.0.1:{port}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(HetnodeError) as refused:
        await enroll(invite, identity, 10)
    await server.stop(None)
    assert refused.value.code is ErrorCode.BAD_REQUEST
    assert sorted(tmp_path.rglob("*")) == before


async def test_a_spec_or_plan_signed_with_another_key_is_refused(run: Running, identity: Identity) -> None:
    credentials = replace(await enrolled(run, identity), coordinator=keyed(7).peer)
    client = CoordinatorClient(credentials, identity)
    with pytest.raises(HetnodeError) as refused:
        await join(client)
    assert refused.value.code is ErrorCode.WRONG_AUTHORITY
    await run.join(keyed(1))  # our Join has been counted before its answer was refused: the plan is there
    with pytest.raises(HetnodeError) as refused:
        await last_of(client)
    assert refused.value.code is ErrorCode.WRONG_AUTHORITY
    await client.close()


async def test_credentials_do_not_work_with_the_identity_of_another_peer(
    run: Running, identity: Identity, tmp_path: Path
) -> None:
    stolen = await enrolled(run, identity)
    client = CoordinatorClient(stolen, open_identity(tmp_path / "thief.key"))
    with pytest.raises(HetnodeError) as refused:
        await join(client)
    assert refused.value.code is ErrorCode.CERTIFICATE_REFUSED
    await client.close()


async def test_another_coordinator_at_the_same_address_is_noticed_at_once(
    run: Running, identity: Identity
) -> None:
    credentials = await enrolled(run, identity)
    tls = replace(credentials.tls, authority=authority("another").pem)
    client = CoordinatorClient(replace(credentials, tls=tls), identity)
    with pytest.raises(HetnodeError) as refused:
        await client.join(Role.REPLICA, CAPACITY, Addresses("127.0.0.1:9"), "", 3600)
    assert refused.value.code is ErrorCode.WRONG_AUTHORITY
    await client.close()


async def test_renewal_keeps_open_streams_and_new_connections_show_the_new_certificate(
    run: Running, identity: Identity
) -> None:
    client = CoordinatorClient(await enrolled(run, identity), identity)
    await join(client)
    news = client.watch()
    await anext(news)  # it waits for one more
    old = client.credentials.tls
    await client.renew()
    assert client.credentials.tls.certificate != old.certificate
    assert client.credentials.tls.key == old.key
    assert kept.load(client.credentials.folder) == client.credentials
    await run.join(keyed(1))
    update: PlanUpdate = await anext(news)  # on the stream of before
    assert update.plan is not None
    await client.heartbeat(1, 0)
    await news.aclose()
    await client.close()


async def test_a_ban_is_reported_to_the_banned_peer_and_to_all_others(
    run: Running, identity: Identity, tmp_path: Path
) -> None:
    banned = CoordinatorClient(await enrolled(run, identity), identity)
    other_identity = open_identity(tmp_path / "other.key")
    other = CoordinatorClient(await enrolled(run, other_identity), other_identity)
    await join(banned)
    await join(other)
    streams = {client: client.watch() for client in (banned, other)}
    for stream in streams.values():
        while (await anext(stream)).plan is None:
            pass
    await run.ask(BanPeer(identity.peer, "it cheats"))
    while identity.peer not in (await anext(streams[other])).banned:
        pass
    with pytest.raises(HetnodeError) as refused:
        [_ async for _ in streams[banned]]
    assert refused.value.code is ErrorCode.BANNED
    for call in (banned.renew(), banned.heartbeat(1, 0)):
        with pytest.raises(HetnodeError) as refused:
            await call
        assert refused.value.code is ErrorCode.BANNED
    assert set(run.dht.banned) == {PeerId(identity.peer)}
    for client in (banned, other):
        await client.close()


def test_renewal_starts_early_and_attempts_become_more_frequent() -> None:
    shown, now = credentials("peer"), time.time()
    left = shown.expires - now
    assert left / 2 < shown.seconds_to_renewal(now) < left
    nearly = shown.expires - 60
    assert 30 < shown.seconds_to_renewal(nearly) < 60
    assert shown.seconds_to_renewal(shown.expires + 100) > 0


def test_a_certificate_that_expired_while_the_node_was_away_is_reported(tmp_path: Path) -> None:
    ended = credentials("peer", ended=True)
    held = RunCredentials(tmp_path, "run", "h:1", PeerId("c"), None, ended)
    with pytest.raises(HetnodeError) as refused:
        kept.check_in_date(held, time.time())
    assert refused.value.code is ErrorCode.CERTIFICATE_REFUSED
    kept.check_in_date(held, ended.expires - 1)


def test_a_node_remembers_the_role_in_which_it_took_part(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "identity.key")
    former = certificates.enrolled(identity, "nano-1")
    former.remember(Role.REPLICA, "José")
    again = kept.load(former.folder)
    assert (former.role, again.role) == (None, Role.REPLICA)
    assert (former.name, again.name) == ("", "José")
    assert again.tls == former.tls
