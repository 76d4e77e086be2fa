"""What the coordinator decides about invites and bans, without any network."""

from __future__ import annotations

import pytest

from coordinator.membership.invites import open_invites_of
from coordinator.run.state.commands import (
    Ban,
    CreateInvite,
    Enroll,
    Offer,
    Report,
    RevokeInvite,
    Start,
    Unban,
)
from coordinator.run.state.events import (
    InviteRevoked,
    InviteUsed,
    PeerBanned,
    PeerLeft,
    PlanAdopted,
)
from protocol.errors import ErrorCode
from protocol.types import Committed, PeerId, Role
from tests.builders import decisions_in, keyed, spec_of
from tests.support.coordinator_run import Run

A, B, C = (keyed(i) for i in range(3))
SECRET, OTHER = "a" * 64, "b" * 64


def with_invite(uses: int = 1, seconds: float = 60.0, role: Role | None = None) -> Run:
    run = Run(spec_of(stages=1))
    run.accept(Start())
    run.accept(CreateInvite("invite", SECRET, uses, seconds, role))
    return run


def test_an_invite_is_good_until_the_moment_it_expires() -> None:
    run = with_invite(uses=2, seconds=60.0)
    run.now += 59.999
    run.accept(Enroll(A.peer, "invite", SECRET))
    run.now += 0.001
    run.refuse(Enroll(B.peer, "invite", SECRET), ErrorCode.INVITE_EXPIRED)


def test_each_refusal_of_an_invite_has_its_own_code() -> None:
    run = with_invite()
    run.refuse(Enroll(A.peer, "another", SECRET), ErrorCode.INVITE_UNKNOWN)
    run.refuse(Enroll(A.peer, "invite", OTHER), ErrorCode.INVITE_FORGED)
    run.refuse(Enroll(A.peer, "", ""), ErrorCode.UNKNOWN_PEER)
    run.accept(Enroll(A.peer, "invite", SECRET))
    run.refuse(Enroll(B.peer, "invite", SECRET), ErrorCode.INVITE_USED)
    run.accept(RevokeInvite("invite"))
    run.refuse(Enroll(B.peer, "invite", SECRET), ErrorCode.INVITE_REVOKED)
    run.refuse(RevokeInvite("another"), ErrorCode.INVITE_UNKNOWN)


def test_a_repeated_enrollment_takes_no_second_use() -> None:
    run = with_invite(uses=2)
    assert run.accept(Enroll(A.peer, "invite", SECRET)) == (InviteUsed(run.now, "invite", A.peer),)
    assert run.accept(Enroll(A.peer, "invite", SECRET)) == ()
    assert run.accept(Enroll(A.peer, "", "")) == ()
    run.accept(Enroll(B.peer, "invite", SECRET))


def test_a_ban_revokes_the_invites_of_the_peer_that_let_others_in() -> None:
    run = with_invite(uses=2)
    for name, uses, seconds in (
        ("full", 1, 60.0),
        ("short", 2, 1.0),
        ("revoked", 2, 60.0),
        ("second", 9, 60.0),
    ):
        run.accept(CreateInvite(name, SECRET, uses, seconds, None))
        run.accept(Enroll(A.peer, name, SECRET))
    run.accept(CreateInvite("foreign", SECRET, 2, 60.0, None))
    run.accept(Enroll(B.peer, "foreign", SECRET))
    run.accept(Enroll(A.peer, "invite", SECRET))
    run.accept(RevokeInvite("revoked"))
    run.now += 1.0
    assert [each.invite for each in open_invites_of(run.state, A.peer, run.now)] == ["invite", "second"]
    # A plain ban leaves them open.
    assert run.accept(Ban(A.peer, "noise")) == (PeerBanned(run.now, A.peer, "noise"),)
    run.accept(Enroll(C.peer, "second", SECRET))
    # The operator may think of it later.
    expected = InviteRevoked(run.now, "invite"), InviteRevoked(run.now, "second")
    assert run.accept(Ban(A.peer, "noise", revoke_invites=True)) == expected
    run.refuse(Enroll(C.peer, "invite", SECRET), ErrorCode.INVITE_REVOKED)
    run.accept(Enroll(C.peer, "foreign", SECRET))
    assert run.accept(Ban(A.peer, "noise", revoke_invites=True)) == ()


def test_the_last_invite_of_a_peer_sets_its_role() -> None:
    run = with_invite(role=Role.STAGE)
    run.accept(CreateInvite("replica", SECRET, 1, 60.0, Role.REPLICA))
    run.accept(Enroll(A.peer, "invite", SECRET))
    run.refuse(A.join(run.spec), ErrorCode.BAD_REQUEST)
    run.accept(Enroll(A.peer, "replica", SECRET))
    run.accept(A.join(run.spec))


def test_two_invites_have_two_names() -> None:
    run = with_invite()
    run.refuse(CreateInvite("invite", OTHER, 1, 60.0, None), ErrorCode.BAD_REQUEST)


@pytest.mark.parametrize(("uses", "seconds"), [(0, 1.0), (10_001, 1.0), (1, 0.0), (1, -1.0), (1, 1e9)])
def test_an_invite_without_bounds_cannot_be_made(uses: int, seconds: float) -> None:
    run = Run(spec_of())
    run.refuse(CreateInvite("invite", SECRET, uses, seconds, None), ErrorCode.BAD_REQUEST)


def test_the_round_of_the_others_goes_on_without_a_banned_peer() -> None:
    run = Run(spec_of(stages=1, replicas=3, rounds=1))
    run.accept(Start())
    for who in (A, B, C):
        run.accept(who.join(run.spec))
    assert any(isinstance(event, PlanAdopted) for event in run.events)
    payloads = tuple(who.payload(run.spec, 0, 1) for who in (A, B))
    for who, payload in zip((A, B), payloads, strict=True):
        run.accept(Offer(who.peer, payload))
    banned = run.accept(Ban(C.peer, "sends noise"))
    assert [type(event) for event in banned[:2]] == [PeerBanned, PeerLeft]
    for who in (A, B):
        run.accept(Report(who.peer, 0, 1, payloads))
    (commit,) = decisions_in(run.events, Committed)
    assert {entry.descriptor.owner for entry in commit.entries} == {A.peer, B.peer}
    run.refuse(Offer(C.peer, C.payload(run.spec, 0, 1)), ErrorCode.BANNED)


def test_a_ban_comes_before_every_other_reason_and_can_be_lifted() -> None:
    run = with_invite()
    run.accept(Ban(A.peer, ""))
    assert run.accept(Ban(A.peer, "again")) == ()
    run.refuse(Enroll(A.peer, "invite", OTHER), ErrorCode.BANNED)
    assert "no reason was given" in run.refuse(A.join(run.spec), ErrorCode.BANNED).cause
    run.accept(Unban(A.peer))
    assert run.accept(Unban(A.peer)) == ()
    run.accept(A.join(run.spec))
    run.refuse(Ban(PeerId("unknown"), ""), ErrorCode.BAD_REQUEST)
