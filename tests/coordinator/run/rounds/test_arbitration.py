"""Contested payloads: the arbiter decides whether they count, and what it proves costs a strike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.arbiter import donors_of
from coordinator.run.rounds import arbitration
from coordinator.run.rounds.arbitration import UNFOUND_ROUNDS
from coordinator.run.state.apply import replay
from coordinator.run.state.commands import (
    AppointArbiter,
    Arbitrate,
    Attest,
    Leave,
    Offer,
    Report,
    Start,
    Tick,
)
from coordinator.run.state.events import PayloadsContested, PeerSeen
from coordinator.run.state.state import State
from coordinator.status.causes import run_cause
from coordinator.store.event_codec import decode, encode
from protocol.status import CauseCode
from protocol.types import Decision, Finding, PayloadDescriptor, PeerId, Rejection, Role, Verdict
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.coordinator_run import Run, beat_for, joined_run

ARBITER = keyed(99)
HELD = Verdict(Finding.HELD)
NOT_FOUND = Verdict(Finding.NOT_FOUND, "no peer sent it")
INVALID = Verdict(Finding.INVALID, "its header is wrong")


def arbitrated_run(replicas: int, rounds: int = 3) -> Run:
    """A run of one stage whose coordinator has an arbiter."""
    run = joined_run(spec_of(1, replicas, rounds=rounds), *[Role.REPLICA] * replicas)
    run.accept(AppointArbiter(ARBITER.peer))
    return run


def offered(run: Run, count: int) -> dict[Keyed, PayloadDescriptor]:
    number = run.state.current_round
    payloads = {peer: peer.payload(run.spec, 0, number) for peer in map(keyed, range(count))}
    for peer, payload in payloads.items():
        run.accept(Offer(peer.peer, payload))
    return payloads


def reported(run: Run, payloads: dict[Keyed, PayloadDescriptor], liars: Sequence[Keyed]) -> None:
    """Honest peers report all payloads, liars only their own."""
    number = run.state.current_round
    for peer, own in payloads.items():
        held = (own,) if peer in liars else tuple(payloads.values())
        run.accept(Report(peer.peer, 0, number, held))


def contested(run: Run) -> tuple[PeerId, ...]:
    contest = run.state.round_of(0, run.state.current_round).contest
    return contest.open_owners if contest else ()


def settled(run: Run, verdict: Verdict = HELD) -> None:
    """The arbiter says the same about all contested payloads."""
    number = run.state.current_round
    for owner in contested(run):
        run.accept(Arbitrate(0, number, owner, verdict))


def committed(decision: Decision) -> list[PeerId]:
    return [entry.descriptor.owner for entry in decision.entries]


@pytest.mark.parametrize(("replicas", "liars"), [(2, 1), (4, 2), (6, 3)])
def test_half_of_the_replicas_cannot_leave_out_the_payloads_of_the_others(replicas: int, liars: int) -> None:
    run = arbitrated_run(replicas)
    lying = [keyed(i) for i in range(liars)]
    for number in (1, 2, 3):
        payloads = offered(run, replicas)
        reported(run, payloads, lying)
        honest = sorted(peer.peer for peer in payloads if peer not in lying)
        assert set(honest) <= set(contested(run))
        assert (0, number) not in run.state.decisions, "the decision waits for the arbiter"
        settled(run)
        decision = run.state.decisions[0, number]
        assert set(honest) <= set(committed(decision))
        for entry in decision.entries:
            assert ARBITER.peer in entry.holders or entry.descriptor.owner not in honest
        for peer in payloads:
            run.accept(Attest(peer.peer, 0, number, "stage", anchor_of(0, number)))
    assert not run.state.strikes, "that a peer lacks a payload is no proof of a lie"


def test_a_round_without_contested_payloads_asks_nothing() -> None:
    run = arbitrated_run(4)
    reported(run, offered(run, 4), [keyed(0)])
    assert len(run.state.decisions[0, 1].entries) == 4
    assert not any(isinstance(event, PayloadsContested) for event in run.events)
    assert not any(ARBITER.peer in entry.holders for entry in run.state.decisions[0, 1].entries)


def test_without_an_arbiter_the_reports_decide_at_once() -> None:
    run = arbitrated_run(2)
    run.accept(AppointArbiter(None))
    reported(run, offered(run, 2), [keyed(0)])
    assert committed(run.state.decisions[0, 1]) == [keyed(0).peer]


def test_a_payload_that_the_arbiter_cannot_fetch_does_not_count_and_is_no_strike() -> None:
    run = arbitrated_run(2)
    reported(run, offered(run, 2), [keyed(0)])
    settled(run, NOT_FOUND)
    assert committed(run.state.decisions[0, 1]) == [keyed(0).peer]
    assert not run.state.strikes


def test_after_an_unfound_payload_its_owner_is_not_trusted_for_some_rounds() -> None:
    run = arbitrated_run(2, rounds=UNFOUND_ROUNDS + 3)
    for number in range(1, UNFOUND_ROUNDS + 3):
        payloads = offered(run, 2)
        reported(run, payloads, [keyed(0)])
        assert bool(contested(run)) == (number in (1, UNFOUND_ROUNDS + 2)), number
        settled(run, NOT_FOUND)
        assert (0, number) in run.state.decisions
        for peer in payloads:
            run.accept(Attest(peer.peer, 0, number, "stage", anchor_of(0, number)))


def test_a_false_claim_and_a_payload_that_cannot_be_decoded_cost_strikes() -> None:
    run = arbitrated_run(4)
    payloads = offered(run, 4)
    owner, accomplice, *honest = payloads
    for peer in honest:
        run.accept(Report(peer.peer, 0, 1, tuple(payloads[each] for each in payloads if each is not owner)))
    for peer in (owner, accomplice):
        run.accept(Report(peer.peer, 0, 1, tuple(payloads.values())))
    assert contested(run) == (owner.peer,)
    settled(run, INVALID)
    assert committed(run.state.decisions[0, 1]) == sorted(each.peer for each in (accomplice, *honest))
    assert run.state.strikes == {owner.peer: (1,), accomplice.peer: (1,)}


def test_a_peer_that_claims_a_payload_and_denies_it_to_the_arbiter_gets_a_strike() -> None:
    run = arbitrated_run(4)
    payloads = offered(run, 4)
    owner, accomplice, honest, bystander = payloads
    for peer in (honest, bystander):
        run.accept(Report(peer.peer, 0, 1, tuple(payloads[each] for each in payloads if each is not owner)))
    run.accept(Report(accomplice.peer, 0, 1, tuple(payloads.values())))
    run.accept(Report(owner.peer, 0, 1, tuple(payloads[each] for each in payloads if each is not owner)))
    assert contested(run) == (owner.peer,)
    # The bystander has claimed nothing, so its answer contradicts nothing.
    settled(run, Verdict(Finding.NOT_FOUND, "no peer sent it", (accomplice.peer, bystander.peer)))
    assert run.state.strikes == {accomplice.peer: (1,)}


def test_of_two_replicas_the_owner_of_an_invalid_payload_gets_a_strike() -> None:
    run = arbitrated_run(2)
    payloads = offered(run, 2)
    good, bad = payloads
    run.accept(Report(good.peer, 0, 1, (payloads[good],), (Rejection(payloads[bad], "not finite"),)))
    run.accept(Report(bad.peer, 0, 1, tuple(payloads.values())))
    settled(run, INVALID)
    assert committed(run.state.decisions[0, 1]) == [good.peer]
    assert run.state.strikes == {bad.peer: (1,)}


def test_half_of_the_replicas_cannot_get_the_others_struck_by_rejections() -> None:
    run = arbitrated_run(4)
    payloads = offered(run, 4)
    liars, victims = list(payloads)[:2], list(payloads)[2:]
    lies = tuple(Rejection(payloads[each], "I do not like it") for each in victims)
    for peer in liars:
        run.accept(Report(peer.peer, 0, 1, tuple(payloads[each] for each in liars), lies))
    for peer in victims:
        run.accept(Report(peer.peer, 0, 1, tuple(payloads.values())))
    assert contested(run) == tuple(sorted(each.peer for each in victims))
    settled(run)
    assert len(run.state.decisions[0, 1].entries) == 4
    assert not run.state.strikes


def test_what_all_others_reject_is_left_out_without_the_arbiter() -> None:
    run = arbitrated_run(4)
    payloads = offered(run, 4)
    bad, *honest = payloads
    for peer in honest:
        held = tuple(payloads[each] for each in honest)
        run.accept(Report(peer.peer, 0, 1, held, (Rejection(payloads[bad], "not finite"),)))
    run.accept(Report(bad.peer, 0, 1, tuple(payloads.values())))
    assert committed(run.state.decisions[0, 1]) == sorted(peer.peer for peer in honest)
    assert run.state.strikes == {bad.peer: (1,)}


def test_reports_after_the_contest_take_nothing_away() -> None:
    """Liars are silent until the deadline, and deny the payloads of the others while the arbiter works."""
    run = arbitrated_run(4)
    payloads = offered(run, 4)
    liars, honest = list(payloads)[:2], list(payloads)[2:]
    peers = tuple(payloads)
    for peer in honest:
        run.accept(Report(peer.peer, 0, 1, tuple(payloads[each] for each in (liars[0], *honest))))
    beat_for(run, run.spec.timing.decide, *peers)
    assert contested(run) == (liars[1].peer,)
    for peer in liars:
        run.accept(Report(peer.peer, 0, 1, (payloads[liars[1]],)))
    settled(run, NOT_FOUND)
    assert set(committed(run.state.decisions[0, 1])) >= {peer.peer for peer in honest}


def test_the_deadline_decides_without_the_arbiter() -> None:
    run = arbitrated_run(2)
    payloads = offered(run, 2)
    reported(run, payloads, [keyed(0)])
    assert run_cause(run.state).code is CauseCode.PAYLOADS_CONTESTED
    beat_for(run, run.spec.timing.fetch - 1, *payloads)
    assert (0, 1) not in run.state.decisions
    beat_for(run, 1, *payloads)
    assert committed(run.state.decisions[0, 1]) == [keyed(0).peer]
    assert run.accept(Arbitrate(0, 1, keyed(1).peer, HELD)) == (), "too late"


def test_a_restarted_coordinator_goes_on_with_the_arbitration() -> None:
    run = arbitrated_run(2)
    reported(run, offered(run, 2), [keyed(0)])
    stored = [encode(event) for event in run.events if not isinstance(event, PeerSeen)]
    assert replay(State(run.spec, run.spec.name), (decode(*each) for each in stored)) == run.state
    run.now += 1000
    run.accept(Start())
    run.accept(Tick())
    assert contested(run) == (keyed(1).peer,), "the arbiter gets the whole time again"
    settled(run)
    assert len(run.state.decisions[0, 1].entries) == 2


def test_a_verdict_that_was_not_asked_for_changes_nothing() -> None:
    run = arbitrated_run(2)
    payloads = offered(run, 2)
    assert run.accept(Arbitrate(0, 1, keyed(0).peer, INVALID)) == ()
    reported(run, payloads, [keyed(0)])
    assert run.accept(Arbitrate(0, 1, keyed(0).peer, INVALID)) == ()
    assert run.accept(Arbitrate(0, 1, ARBITER.peer, INVALID)) == ()


def test_an_owner_that_is_gone_leaves_its_payload_to_the_peers_that_claim_it() -> None:
    run = arbitrated_run(4)
    payloads = offered(run, 4)
    owner, holder, *others = payloads
    for peer in others:
        run.accept(Report(peer.peer, 0, 1, tuple(payloads[each] for each in (holder, *others))))
    run.accept(Leave(owner.peer, "interrupted"))
    run.accept(Report(holder.peer, 0, 1, tuple(payloads.values())))
    round_state = run.state.round_of(0, 1)
    assert contested(run) == (owner.peer,)
    assert donors_of(run.state, round_state, owner.peer) == [holder.peer]


@pytest.mark.parametrize(("name", "most"), [("MOST_PAYLOADS", 2), ("MOST_BYTES", 250)])
def test_the_arbiter_is_asked_for_a_bounded_amount(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(arbitration, name, most)
    run = arbitrated_run(6)
    reported(run, offered(run, 6), [keyed(0), keyed(1), keyed(2)])
    assert len(contested(run)) == 2
    settled(run)
    assert len(run.state.decisions[0, 1].entries) == 5, "those of the liars, which all hold, and two of three"
