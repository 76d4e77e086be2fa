"""The same command again and again: an invite is used once, and afterwards the credentials that it gave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.net import joining
from node.net.coordinator_channel import fetch_status
from node.net.coordinator_client import CoordinatorClient
from node.net.joining import join_run, obtain_credentials
from node.net.waiting import CoordinatorWait
from node.security import credentials as kept
from node.security.credentials import RunCredentials
from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.invite import Invite
from protocol.trust.reachability import Addresses
from protocol.types import Capacity, Role
from protocol.wire.operator_calls import WithdrawInvite
from tests.builders import spec_of
from tests.support.certificates import credentials
from tests.support.coordinator_process import Running, running
from tests.support.ports import free_port


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(spec_of(), tmp_path / "run") as coordinator:
        yield coordinator


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return open_identity(tmp_path / "peer-0.key")


async def obtained(
    invite: Invite, identity: Identity, seconds: float = 20, relays: bool = False
) -> RunCredentials:
    return await obtain_credentials(invite, "", identity, CoordinatorWait(seconds), relays)


@pytest.mark.parametrize("state", ["used", "revoked", "of a coordinator that is away"])
async def test_an_invite_may_be_given_again(run: Running, identity: Identity, state: str) -> None:
    invite = await run.invite()
    first = await obtained(invite, identity)
    if state == "revoked":
        await run.ask(WithdrawInvite(invite.id))
    elif state != "used":
        await run.stop()
    assert await obtained(invite, identity, 0) == first


async def test_the_chosen_role_outlives_the_same_invite(run: Running, identity: Identity) -> None:
    invite = await run.invite()
    (await obtained(invite, identity)).remember(Role.REPLICA)
    assert (await obtained(invite, identity)).role is Role.REPLICA


async def test_damaged_credentials_are_replaced_with_the_invite(run: Running, identity: Identity) -> None:
    invite = await run.invite()
    first = await obtained(invite, identity)
    (first.folder / "run.json").write_text("{")
    assert (await obtained(invite, identity)).tls.certificate != first.tls.certificate


async def test_expired_credentials_are_replaced_with_the_invite(run: Running, identity: Identity) -> None:
    invite = await run.invite()
    first = await obtained(invite, identity)
    replace(first, tls=credentials(identity.peer, run.authority, ended=True), name="Ada").save()
    again = await obtained(invite, identity)
    assert again.name == "Ada"
    assert (await fetch_status(again.api, again.tls)).run == run.run


async def test_a_relay_takes_no_credentials_of_a_node(run: Running, identity: Identity) -> None:
    node = await obtained(await run.invite(), identity)
    invite = await run.invite(role="relay")
    relay = await obtained(invite, identity, relays=True)
    assert relay.tls.certificate != node.tls.certificate
    assert relay.role is Role.RELAY
    assert await obtained(invite, identity, 0, relays=True) == relay


async def test_a_coordinator_that_has_moved_is_found_by_a_newer_invite(
    identity: Identity, tmp_path: Path
) -> None:
    async with running(spec_of(), tmp_path / "run") as before:
        old = await before.invite()
        first = await obtained(old, identity)
    async with running(spec_of(), tmp_path / "run", f"127.0.0.1:{free_port()}") as after:
        moved = await obtained(await after.invite(), identity)
        assert moved == replace(first, api=after.address, others=(first.api,))
        assert kept.load(first.folder) == moved
        assert await obtained(old, identity) == moved  # the older invite does not bring back its address


async def test_an_invite_for_another_run_is_used(run: Running, identity: Identity, tmp_path: Path) -> None:
    one = await obtained(await run.invite(), identity)
    async with running(spec_of(rounds=7), tmp_path / "other") as other:
        two = await obtained(await other.invite(), identity)
    assert one.run != two.run == other.run
    assert kept.load(one.folder) == one


async def test_a_copied_identity_ends_with_what_to_do(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks less often than the coordinator allows, and not without end."""
    identity = open_identity(tmp_path / "peer-0.key")
    coordinator = CoordinatorClient(await obtained(await run.invite(), identity), identity)
    pauses: list[float] = []

    async def no_pause(seconds: float) -> None:
        pauses.append(seconds)

    try:
        await join_run(coordinator, None, Capacity("cpu", 10**9, 2), Addresses(), "", 20.0)
        waiting = SimpleNamespace(sleep=no_pause, CancelledError=asyncio.CancelledError)
        monkeypatch.setattr(joining, "asyncio", waiting)
        with pytest.raises(HetnodeError) as caught:
            await join_run(coordinator, None, Capacity("cpu", 10**9, 3), Addresses(), "", 20.0)
    finally:
        await coordinator.close()
    assert caught.value.code is ErrorCode.ALREADY_ACTIVE
    assert "--identity" in caught.value.remedy
    assert len(pauses) < 15


class _NewerSpec(RunSpec):
    """A specification with a setting that this program does not know."""

    @property
    def tree(self) -> dict[str, Any]:
        return {**super().tree, "dreams": {"per_night": 3}}


async def test_a_run_that_needs_a_newer_program_says_so(identity: Identity, tmp_path: Path) -> None:
    newer = _NewerSpec.model_validate(spec_of().model_dump())
    async with running(newer, tmp_path / "run") as coordinator:
        client = CoordinatorClient(await obtained(await coordinator.invite(), identity), identity)
        with pytest.raises(HetnodeError, match=r"dreams.*Update hetnode on this machine") as caught:
            await join_run(client, None, Capacity("cpu", 10**9, 2), Addresses(), "", 20.0)
        await client.close()
    assert caught.value.code is ErrorCode.BAD_SPEC
