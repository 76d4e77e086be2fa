"""A broken replica goes on in its round: who waits, who takes a seat, and what stays as it was."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from coordinator.placement.phases import expected_seconds
from coordinator.placement.repair import seconds_to_repair
from coordinator.run.state.commands import (
    Attest,
    Await,
    Drain,
    Heartbeat,
    Offer,
    Report,
    ReportLink,
    Retreat,
    Start,
    Tick,
)
from coordinator.run.state.events import LinkFailed, PayloadWithheld, PeerRetreated, PlanAdopted
from protocol.math.sampling import sample_range
from protocol.status import Wait
from protocol.types import Lifecycle, Plan, Role
from tests.builders import Keyed, anchor_of, keyed
from tests.support.coordinator_run import Run, attest, leave, play_round, started_and_attested

A, B, P, Q, S, T = (keyed(i) for i in range(6))
"""Two full replicas, the two members of a pipeline, and a spare for each of its stages."""
STEPS = 6


def broken(**settings: Any) -> Run:
    """Round 3, in which P has done four of six steps, and Q is gone."""
    run = ready(**settings)
    leave(run, Q)
    return run


def ready(**settings: Any) -> Run:
    run = started_and_attested(2, 1, inner__steps=STEPS, grouping__spares=2, **settings)
    for spare in (S, T):
        run.accept(spare.join(run.spec, Role.STAGE))
        attest(run, spare, 0)
    for _ in range(2):
        run.now += 600.0  # a phase of ten minutes
        play_round(run, followers=(S, T))
    assert run.state.current_round == 3
    for peer in (A, B, P, Q, S, T):
        beat(run, peer, 0)
    return run


def beat(run: Run, peer: Keyed, step: int, *waits: Wait) -> None:
    run.accept(Heartbeat(peer.peer, run.state.current_round, step, waits=waits))


def half_a_phase_later(run: Run, *peers: Keyed) -> Run:
    """All may offer what they have by now; `peers` are heard of, after four steps."""
    run.now += 300.0
    for peer in (A, B, *peers):
        beat(run, peer, 4)
    return run


def retreat(run: Run, peer: Keyed, steps: int | None, number: int = 3) -> float:
    """What the coordinator answers: for how many seconds the peer waits."""
    former, epoch = run.state.breaks.get(peer.peer), run.state.epoch
    run.accept(Retreat(peer.peer, epoch, "neighbour-lost", number, steps))
    return seconds_to_repair(run.state, peer.peer, former, epoch, run.now)


def repaired(run: Run) -> Plan:
    plan = run.state.plans[-1]
    assert plan.repairs, plan.reason
    return plan


def with_more(count: int) -> tuple[Run, list[Keyed]]:
    """As ready(), with `count` spares of each stage."""
    run = started_and_attested(2, 1, inner__steps=STEPS, grouping__spares=2 * count)
    spares = [keyed(i) for i in range(4, 4 + 2 * count)]
    for spare in spares:
        run.accept(spare.join(run.spec, Role.STAGE))
        attest(run, spare, 0)
    for _ in range(2):
        run.now += 600.0
        play_round(run, followers=spares)
    for peer in (A, B, P, Q, *spares):
        beat(run, peer, 0)
    return run, spares


def of_stage_1(run: Run, spares: list[Keyed]) -> list[Keyed]:
    """Those of `spares` that could take the seat of Q, in the order in which they are asked."""
    able = [each for each in spares if 1 in run.state.reservations[each.peer].stages]
    return sorted(able, key=lambda each: each.peer)


def deliver(run: Run, spares: list[Keyed], number: int) -> None:
    """A and B offer both stages of a round, and P offers stage 0."""
    hosts = {0: (A, B, P), 1: (A, B)}
    live = [each for each in spares if run.state.peers[each.peer].is_live]
    for stage in (0, 1):
        payloads = tuple(each.payload(run.spec, stage, number) for each in hosts[stage])
        for host, payload in zip(hosts[stage], payloads, strict=True):
            run.accept(Offer(host.peer, payload))
        for host in hosts[stage]:
            run.accept(Report(host.peer, stage, number, payloads))
        following = [each for each in live if stage in run.state.reservations[each.peer].stages]
        for host in (*hosts[stage], *following):
            run.accept(Attest(host.peer, stage, number, "stage", anchor_of(stage, number)))
    for peer in (A, B, P, *live):
        beat(run, peer, 0)


def repaired_in_a_row(count: int) -> tuple[Run, list[Keyed]]:
    """After rounds of ten minutes, in each of which the second member of the pipeline was replaced."""
    run, spares = with_more(4)
    dead = Q
    for number in range(3, 3 + count):
        leave(run, dead)
        run.now = run.state.began_at + 300.0
        for peer in (A, B, P, *spares):
            if run.state.peers[peer.peer].is_live:
                beat(run, peer, 4 if peer in (A, B, P) else 0)
        retreat(run, P, 4, number=number)
        plan = repaired(run)
        (dead,) = (each for each in spares if each.peer in members(plan))
        run.now = run.state.began_at + 600.0
        run.accept(Await(dead.peer, 1, number, plan.epoch))  # its payload comes with the next round
        deliver(run, spares, number)
    return run, spares


def members(plan: Plan) -> list[str]:
    return [member.peer for member in plan.replicas[2].members]


class TestSeats:
    def test_a_spare_takes_the_seat_and_the_other_keeps_its_steps(self) -> None:
        run = broken()
        former = run.state.plans[-1]
        assert retreat(run, P, 4) == 10 * run.spec.timing.heartbeat
        plan = repaired(run)
        spare = next(each for each in (S, T) if each.peer in members(plan))
        assert members(plan) == [P.peer, spare.peer]
        assert (plan.epoch, plan.from_round, plan.repairs) == (former.epoch + 1, 3, former.epoch)
        assert plan.replicas[2].resumes_at == 4
        assert plan.replicas[:2] == former.replicas[:2]
        for index in range(3):
            assert sample_range(plan, run.spec, 3, index) == sample_range(former, run.spec, 3, index)
        assert (
            run.state.peers[P.peer].lifecycle is run.state.peers[spare.peer].lifecycle is Lifecycle.TRAINING
        )
        assert "from step 5 on" in plan.reason

    def test_the_next_round_begins_at_its_first_step_without_another_plan(self) -> None:
        run = broken()
        retreat(run, P, 4)
        epoch = run.state.epoch
        run.now += 600.0
        play_round(run)
        assert run.state.epoch == epoch
        assert len(run.state.decisions[0, 3].entries) == len(run.state.decisions[1, 3].entries) == 3

    def test_offers_and_words_of_the_others_under_the_former_plan_stand(self) -> None:
        run = broken()
        run.now += 600.0
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 3)))
        former = run.state.epoch
        for peer, step in ((P, 4), (S, 0), (T, 0)):
            beat(run, peer, step)
        retreat(run, P, 4)
        assert run.state.epoch > former
        assert A.peer in run.state.round_of(0, 3).offers
        events = run.accept(Await(B.peer, 0, 3, former))
        assert any(isinstance(event, PayloadWithheld) for event in events)
        events = run.accept(Retreat(B.peer, former, "a test", 3, None))
        assert [event.epoch for event in events if isinstance(event, PeerRetreated)] == [former + 1]

    def test_a_replica_that_stays_broken_is_broken_under_the_new_plan(self) -> None:
        run = started_and_attested(2, 2, inner__steps=STEPS, grouping__spares=1)
        chains = [[m.peer for m in each.members] for each in run.state.plans[-1].replicas[2:]]
        by_peer = {keyed(i).peer: keyed(i) for i in range(8)}
        (one, lost), (other, _) = ([by_peer[peer] for peer in chain] for chain in chains)
        spare = keyed(6)
        run.accept(spare.join(run.spec, Role.STAGE))
        run.now += 600.0
        attest(run, spare, 0)
        for number in (1, 2):
            play_round(run, followers=(spare,))
            run.now += 600.0
            assert run.state.current_round == number + 1
        stage = run.state.reservations[spare.peer].stages.first
        for peer in by_peer.values():
            if peer.peer in run.state.peers:
                beat(run, peer, 0)
        # Of the other chain a member that the spare cannot replace is gone.
        gone = [m for m in run.state.plans[-1].replicas[3].members if stage not in m.stages]
        leave(run, by_peer[gone[0].peer])
        stays = next(peer for peer in chains[1] if peer != gone[0].peer)
        retreat(run, by_peer[stays], 3)
        assert not run.state.plans[-1].repairs
        dead, survivor = (one, lost) if stage == 0 else (lost, one)
        leave(run, dead)
        retreat(run, survivor, 4)
        repaired(run)
        broken_under = run.state.absent[run.state.epoch]
        assert broken_under == {gone[0].peer, stays}
        assert {each.index for each in run.state.complete_replicas(3)} == {0, 1, 2}
        assert run.state.peers[stays].lifecycle is Lifecycle.SYNCING
        assert other.peer in chains[1]

    def test_two_that_lost_their_line_alone_go_on_with_each_other(self) -> None:
        run = ready()
        retreat(run, P, 4)
        assert not run.state.plans[-1].repairs, "the other may still be there, and will tell"
        retreat(run, Q, 3)
        plan = repaired(run)
        assert members(plan) == [P.peer, Q.peer]
        assert plan.replicas[2].resumes_at == 4

    def test_a_member_that_cannot_go_on_gives_its_seat(self) -> None:
        run = ready()
        assert retreat(run, Q, None) == 0
        retreat(run, P, 4)
        assert Q.peer not in members(repaired(run))

    def test_a_silent_member_is_gone_before_it_counts_as_lost(self) -> None:
        run = ready()
        before = run.state.rebalanced_at
        retreat(run, P, 4)
        for seconds in (2.0, 2.0, 1.5):
            assert not run.state.plans[-1].repairs
            run.now += seconds
            for peer in (A, B, S, T):
                beat(run, peer, 0)
            beat(run, P, 4)
            run.accept(Tick())
        assert Q.peer not in members(repaired(run))
        assert run.state.peers[Q.peer].is_live
        assert run.state.rebalanced_at == before, "it is no exchange that makes the run faster"

    def test_a_failed_link_unseats_nobody_who_can_go_on(self) -> None:
        """Else a member that says that it cannot read its neighbour's frames would take its place."""
        run = ready()
        for liar, other in ((P, Q), (Q, P)):
            run.accept(ReportLink(liar.peer, run.state.epoch, other.peer, "", "frame-corrupt"))
        retreat(run, P, 4)
        retreat(run, Q, 4)
        assert not run.state.plans[-1].repairs
        assert all(run.state.may_offer(peer.peer, 3) for peer in (P, Q))

    def test_a_survivor_keeps_its_seat_where_a_spare_cannot_reach_it(self) -> None:
        run = ready()
        leave(run, Q)
        retreat(run, P, 4)
        first = repaired(run)
        spare = next(each for each in (S, T) if each.peer in members(first))
        run.accept(ReportLink(spare.peer, first.epoch, P.peer, "", "nobody answers"))
        retreat(run, P, 4)
        retreat(run, spare, 0)
        assert run.state.plans[-1] == first, "no other spare has the stage"
        assert run.state.may_offer(P.peer, 3)

    def test_a_spare_takes_the_seat_when_it_has_caught_up(self) -> None:
        run = started_and_attested(2, 1, inner__steps=STEPS, grouping__spares=2)
        for spare in (S, T):
            run.accept(spare.join(run.spec, Role.STAGE))
            attest(run, spare, 0)
        for followers in ((S, T), ()):
            run.now += 600.0
            play_round(run, followers=followers)
        for peer in (A, B, P, Q, S, T):
            beat(run, peer, 0)
        leave(run, Q)
        assert retreat(run, P, 4)
        assert not run.state.plans[-1].repairs
        for spare in (S, T):
            for stage in run.state.reservations[spare.peer].stages:
                run.accept(Attest(spare.peer, stage, 2, "stage", anchor_of(stage, 2)))
        assert P.peer in members(repaired(run))

    def test_a_silent_spare_takes_no_seat_while_another_is_heard_of(self) -> None:
        run, spares = with_more(2)
        silent, other = of_stage_1(run, spares)
        run.now += 6.0
        for peer in (A, B, P, Q, *spares):
            if peer is not silent:
                beat(run, peer, 4 if peer in (A, B, P, Q) else 0)
        leave(run, Q)
        retreat(run, P, 4)
        assert run.state.peers[silent.peer].is_live, "it does not count as lost yet"
        assert members(repaired(run)) == [P.peer, other.peer]

    def test_a_dead_member_whose_seat_was_taken_gets_none_again(self) -> None:
        run, spares = with_more(1)
        (spare,) = of_stage_1(run, spares)
        retreat(run, P, 4)
        run.now += 6.0
        for peer in (A, B, P, *spares):
            beat(run, peer, 4 if peer in (A, B, P) else 0)
        run.accept(Tick())
        assert members(repaired(run)) == [P.peer, spare.peer]
        leave(run, spare)
        run.now += 1.0
        beat(run, P, 4, Wait.LINKS)
        retreat(run, P, 4)
        assert run.state.peers[Q.peer].is_live
        assert Q.peer not in members(run.state.plans[-1])

    @pytest.mark.parametrize("has_told", [False, True])
    def test_another_spare_takes_the_seat_where_the_first_cannot_reach_the_survivor(
        self, has_told: bool
    ) -> None:
        run, spares = with_more(2)
        first, second = of_stage_1(run, spares)
        leave(run, Q)
        retreat(run, P, 4)
        plan = repaired(run)
        assert members(plan) == [P.peer, first.peer]
        run.now += 2.0
        for peer in (P, *spares):
            beat(run, peer, 4 if peer is P else 0, Wait.LINKS)
        run.accept(ReportLink(first.peer, plan.epoch, P.peer, "h:1", "nobody answers"))
        if has_told:
            retreat(run, P, 4)
            retreat(run, first, 0)
        assert members(repaired(run)) == [P.peer, second.peer]

    def test_repairs_in_three_rounds_do_not_part_a_chain_that_delivers(self) -> None:
        run, spares = repaired_in_a_row(3)
        following = [each for each in spares if run.state.peers[each.peer].is_live]
        play_round(run, followers=[each for each in following if not run.state.takes_part(each.peer, 6)])
        assert not [each for each in run.events if isinstance(each, LinkFailed)], run.state.plans[-1].reason

    def test_a_spare_that_withholds_says_nothing_about_the_speed_of_its_chain(self) -> None:
        run, _ = repaired_in_a_row(2)
        assert expected_seconds(run.state, run.state.plans[-1].replicas[2]) == pytest.approx(600.0)


class TestWaiting:
    def test_who_repeats_a_call_whose_answer_was_lost_has_time_for_its_links(self) -> None:
        run = broken()
        seconds = retreat(run, P, 4)
        plan, former = repaired(run), run.state.breaks[P.peer]
        run.now += 1.0
        run.accept(Retreat(P.peer, plan.repairs, "neighbour-lost", 3, 4))
        assert seconds_to_repair(run.state, P.peer, former, plan.repairs, run.now) == seconds - 1.0

    def test_an_outage_of_the_coordinator_uses_up_no_wait(self) -> None:
        run = half_a_phase_later(ready(), P, Q, S, T)
        retreat(run, P, 4)
        run.now += 100.0
        run.accept(Start())
        for peer in (A, B, P, S, T):
            beat(run, peer, 4 if peer is P else 0)
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 3)))
        assert run.state.round_of(0, 3).group is None
        run.accept(Offer(P.peer, P.payload(run.spec, 0, 3, weight=4 / STEPS)))
        assert run.state.round_of(0, 3).group is not None

    def test_a_survivor_that_has_not_told_of_a_second_break_keeps_its_training(self) -> None:
        """Q has gone on at the same step, and has not heard of the second break yet."""
        run = ready()
        retreat(run, P, 4)
        retreat(run, Q, 4)
        first = repaired(run)
        run.now += 2.0
        for peer in (A, B, P, Q, S, T):
            beat(run, peer, 4 if peer in (P, Q) else 0)
        retreat(run, P, 4)
        run.now += 1.0
        beat(run, Q, 4)
        run.accept(Tick())
        assert run.state.plans[-1] == first

    def test_a_retreat_that_has_waited_behind_a_slow_disk_is_a_sign_of_life(self) -> None:
        run = ready()
        run.now += 6.0
        retreat(run, P, 4)
        beat(run, Q, 4)
        retreat(run, Q, 4)
        assert members(repaired(run)) == [P.peer, Q.peer]

    def test_the_round_stays_open_while_members_wait_and_no_longer(self) -> None:
        run = ready()
        leave(run, S, T, Q)
        run.now += 300.0
        seconds = retreat(run, P, 4)
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 3)))
        for passed in (0.6 * seconds, 0.8 * seconds, 0.2 * seconds):
            assert run.state.round_of(0, 3).group is None
            run.now += passed
            for peer in (A, B, P):
                beat(run, peer, 4)
            run.accept(Tick())
        assert run.state.round_of(0, 3).group is not None

    @pytest.mark.parametrize("steps", [STEPS, STEPS + 1])
    def test_nothing_is_repaired_when_all_steps_are_done(self, steps: int) -> None:
        run = broken()
        assert retreat(run, P, steps) == 0
        assert P.peer not in run.state.breaks, "it has not retreated yet: it offers first"
        assert not run.state.plans[-1].repairs

    def test_a_short_rest_of_a_phase_is_worth_no_wait(self) -> None:
        run = broken(timing__heartbeat=60.0, timing__lost_after=180.0)
        assert retreat(run, P, 1) == 0
        assert not run.state.plans[-1].repairs

    def test_who_tells_of_another_round_does_not_wait(self) -> None:
        run = broken()
        assert retreat(run, P, 4, number=2) == 0
        assert not run.state.plans[-1].repairs

    def test_steps_of_a_repair_that_failed_count_where_the_member_was_heard_of_since(self) -> None:
        run = broken()
        retreat(run, P, 4)
        first = repaired(run)
        spare = next(each for each in (S, T) if each.peer in members(first))
        retreat(run, spare, 0)
        assert run.state.plans[-1] == first, "P may be gone, too"
        run.now += 2.0
        for peer in (A, B, S, T):
            beat(run, peer, 0)
        beat(run, P, 4, Wait.LINKS)
        run.accept(Tick())
        second = repaired(run)
        assert (second.epoch, second.repairs) == (first.epoch + 1, first.repairs)
        assert members(second) == members(first)

    def test_who_breaks_its_chain_again_and_again_holds_nobody_up_for_long(self) -> None:
        run = ready()
        leave(run, S, T)
        run.now += 300.0
        for _ in range(40):
            for peer in (P, Q):
                beat(run, peer, 4)
                retreat(run, peer, 4)
        made = [event.plan for event in run.events if isinstance(event, PlanAdopted) and event.plan.repairs]
        assert len(made) == 3
        for peer in (P, Q):
            assert retreat(run, peer, 4) == retreat(run, peer, 0) == 0, "it offers, and then it retreats"
        assert run.state.plans[-1] == made[-1]
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 3)))
        assert run.state.round_of(0, 3).group is not None

    def test_members_that_tell_what_no_chain_can_have_done_are_not_repaired(self) -> None:
        run = half_a_phase_later(ready())
        for peer, step in ((P, 1), (Q, STEPS - 1)):
            beat(run, peer, step)
        retreat(run, P, 1)
        retreat(run, Q, STEPS - 1)
        assert not run.state.plans[-1].repairs, "one of them lies, and the other loses nothing by it"
        for peer, steps in ((P, 1), (Q, STEPS - 1)):
            stage = 0 if peer is P else 1
            run.accept(Offer(peer.peer, peer.payload(run.spec, stage, 3, weight=steps / STEPS)))

    @pytest.mark.parametrize("seed", range(3))
    def test_those_that_leave_and_join_again_make_no_plans_without_end(self, seed: int) -> None:
        run, random = half_a_phase_later(ready()), Random(seed)
        for _ in range(200):
            peer = random.choice((P, Q, S, T))
            if random.random() < 0.5:
                retreat(run, peer, random.choice((0, 2, 2, 2)))
            else:
                leave(run, peer)
                run.accept(peer.join(run.spec, Role.STAGE))
                attest(run, peer, 2)
                beat(run, peer, 0)
        made = [event.plan for event in run.events if isinstance(event, PlanAdopted) and event.plan.repairs]
        assert 1 <= len(made) <= 3
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 3)))
        run.now += 31.0
        for peer in (A, B, P, Q, S, T):
            beat(run, peer, 2)
        run.accept(Tick())
        assert run.state.round_of(0, 3).group is not None

    def test_who_waits_and_leaves_holds_nobody(self) -> None:
        run = half_a_phase_later(ready(), P, Q, S, T)
        leave(run, S, T, Q)
        assert retreat(run, P, 4)
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 3)))
        assert run.state.round_of(0, 3).group is None
        leave(run, P)
        run.accept(Tick())
        assert run.state.round_of(0, 3).group is not None

    def test_the_round_waits_for_links_that_replace_broken_ones_and_no_longer(self) -> None:
        """The spare is lost before its link is open: the survivor offers what it has."""
        run = half_a_phase_later(ready(), P)
        for spare in (S, T):
            beat(run, spare, 0)
        leave(run, Q)
        seconds = retreat(run, P, 4)
        repaired(run)
        leave(run, *(each for each in (S, T) if each.peer in members(run.state.plans[-1])))
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 3)))
        run.now += seconds
        for peer in (A, B, P):
            beat(run, peer, 4)
        run.accept(Tick())
        assert run.state.round_of(0, 3).group is None
        run.accept(Offer(P.peer, P.payload(run.spec, 0, 3, weight=4 / STEPS)))
        assert run.state.round_of(0, 3).group is not None

    def test_nobody_waits_when_half_of_the_replicas_have_answered(self) -> None:
        run = half_a_phase_later(ready(), P, Q)
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 3)))
        assert run.state.round_of(0, 3).group is None
        assert retreat(run, P, 4) == 0
        assert not run.state.plans[-1].repairs

    def test_the_round_waits_for_each_of_the_members_that_wait(self) -> None:
        """Keepalives find a break seconds apart, so one of them offers before the others."""
        run = ready()
        leave(run, S, T)
        run.now += 300.0
        for peer in (A, B, P, Q):
            beat(run, peer, 4)
        assert retreat(run, P, 4)
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 1, 3)))
        # It drains, and so it offers without a retreat. The other still waits.
        run.accept(Drain(Q.peer, "a test"))
        run.accept(Offer(Q.peer, Q.payload(run.spec, 1, 3, weight=0.5)))
        for peer in (A, B):
            run.accept(Offer(peer.peer, peer.payload(run.spec, 0, 3)))
        assert run.state.round_of(0, 3).group is None
        run.accept(Offer(P.peer, P.payload(run.spec, 0, 3, weight=4 / STEPS)))
        run.accept(Tick())
        assert run.state.round_of(0, 3).group is not None

    def test_a_spare_that_joined_in_the_round_keeps_the_seat_that_it_has_taken(self) -> None:
        run = ready()
        leave(run, S, T, Q)
        run.now += 1.0
        for spare in (S, T):
            run.accept(spare.join(run.spec, Role.STAGE))
            attest(run, spare, 2)
            beat(run, spare, 0)
        beat(run, P, 4)
        retreat(run, P, 4)
        first = repaired(run)
        seated = next(each for each in (S, T) if each.peer in members(first))
        run.now += 1.0
        for peer in (P, seated):
            beat(run, peer, 5)
        retreat(run, P, 5)
        assert run.state.plans[-1] == first, "it is still there, and will tell"
        retreat(run, seated, 5)
        assert members(repaired(run)) == members(first)
