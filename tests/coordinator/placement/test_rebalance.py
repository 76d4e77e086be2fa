"""Changes that make plans faster at no cost: exchanges of members, k of links, shares of the work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.base.phrases import short
from coordinator.placement import search, tuning
from coordinator.placement.cost_model import Survey
from coordinator.placement.rules import MOST_SHARE
from coordinator.placement.search import ExchangeMoves, exchange_members
from coordinator.placement.tuning import fair_shares, fit_k
from coordinator.run.state.commands import Offer
from protocol.errors import ErrorCode
from protocol.spec.fixed import SETTLE_ROUNDS
from protocol.types import Capacity, Member, Role
from tests.builders import Keyed
from tests.support.coordinator_run import (
    ALL,
    Run,
    assert_samples_tile,
    attest,
    join,
    latest_reason,
    leave,
    measure,
    members_by_replica,
    play_round,
    play_rounds,
    slot_of,
    started_and_attested,
)

A, B, C, D, E, F, G, H = ALL[:8]


class TestSpeed:
    """Pipelines with mixed speeds become faster if peers of equal speed are together."""

    def mixed(self, **more: Any) -> Run:
        run = started_and_attested(0, 2, grouping__balance=True, **more)
        for peer, flops in ((A, 1e9), (B, 1e8), (C, 1e8), (D, 1e9)):
            measure(run, peer, flops)
        play_rounds(run)
        assert len(run.state.plans) == 1, "no round was committed before"
        return run

    def test_members_of_equal_speed_come_together_if_the_step_gets_shorter_by_the_margin(self) -> None:
        run = self.mixed()
        play_rounds(run, 1)
        chains = members_by_replica(run)
        assert sorted(map(sorted, chains.values())) == sorted(
            map(sorted, ([A.peer, D.peer], [C.peer, B.peer]))
        )
        assert (
            "change places between replica-0 and replica-1: their step, at fair shares, falls from"
            in latest_reason(run)
        )
        assert all(run.state.takes_part(peer.peer, 3) for peer in (A, B, C, D))
        assert sum(run.spec.microbatches_of(replica) for replica in run.state.plans[-1].replicas) == 4

    def test_no_member_changes_places_for_less_than_the_margin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "MARGIN", 0.9)
        run = self.mixed()
        play_rounds(run, 3)
        assert members_by_replica(run) == {0: [A.peer, B.peer], 1: [C.peer, D.peer]}

    def test_members_do_not_change_places_again_before_settle_rounds(self) -> None:
        run = self.mixed()
        play_rounds(run)
        assert run.state.rebalanced_at == 3
        flops = {peer: 1e9 if i % 2 else 1e8 for i, peer in enumerate(_chain_order(run))}
        for peer, value in flops.items():
            measure(run, _keyed_of(peer), value)
        play_rounds(run, SETTLE_ROUNDS - 1)
        assert len(run.state.plans) == 2
        play_rounds(run)
        assert len(run.state.plans) == 3

    def test_no_members_change_places_while_replicas_come_or_go(self) -> None:
        run = self.mixed()
        join(run, E)
        run.accept(F.join(run.spec, Role.REPLICA))
        attest(run, F)
        play_rounds(run)
        assert (members_by_replica(run)[0], members_by_replica(run)[1]) == (
            [A.peer, B.peer],
            [C.peer, D.peer],
        )
        play_rounds(run)
        assert members_by_replica(run)[0] != [A.peer, B.peer]

    def test_a_faster_spare_replaces_a_slow_member(self) -> None:
        run = started_and_attested(0, 1, grouping__spares=9)
        for peer, flops in ((A, 1e9), (B, 1e8)):
            measure(run, peer, flops)
        join(run, C, D)
        for peer in (C, D):
            measure(run, peer, 1e9)
        play_rounds(run, 2)
        assert members_by_replica(run)[0] == [A.peer, D.peer]
        assert f"{short(D.peer)} takes the place of {short(B.peer)} in replica-0" in latest_reason(run)
        assert slot_of(run, B) == (1, 1)

    def test_without_measurements_the_plan_stays(self) -> None:
        run = started_and_attested(1, 2)
        play_rounds(run, 4)
        assert len(run.state.plans) == 1


def _chain_order(run: Run) -> list[str]:
    return [member.peer for replica in run.state.plans[-1].replicas for member in replica.members]


def _keyed_of(peer: str) -> Keyed:
    return next(each for each in ALL if each.peer == peer)


class TestK:
    def test_k_falls_on_a_slow_link_one_value_at_a_time_and_the_plan_says_why(self) -> None:
        run = started_and_attested(0, 1, link__k=16, link__least_k=4, link__most_k=16)
        for peer in (A, B):
            measure(run, peer, 1e9, bandwidth=1e4)
        play_rounds(run)
        plan = run.state.plans[-1]
        assert [link.k for link in plan.replicas[0].links] == [8]
        assert plan.reason.startswith(
            f"k of the link {short(A.peer)} -> {short(B.peer)} falls 16 -> 8: 0.1 Mb/s"
        )
        assert "computing takes" in plan.reason
        play_rounds(run, 2)
        assert [link.k for link in run.state.plans[-1].replicas[0].links] == [4]
        assert len(run.state.plans) == 3

    def test_k_rises_on_a_fast_link(self) -> None:
        run = started_and_attested(0, 1, link__k=4, link__least_k=4, link__most_k=8)
        for peer in (A, B):
            measure(run, peer, 1e6, bandwidth=1e9)
        play_rounds(run)
        assert "rises 4 -> 8" in latest_reason(run)
        play_rounds(run, 3)
        assert len(run.state.plans) == 2

    def test_a_link_becomes_uncompressed_and_compressed_again_as_its_line_changes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(search, "MARGIN", 1.0)  # members keep their places
        ladder = {"link__least_k": 8, "link__most_k": 8, "link__k": 8, "link__uncompressed": True}
        run = started_and_attested(1, 2, grouping__balance=False, **ladder)
        members = ALL[1:5]
        for peer in members[:2]:
            measure(run, peer, 1e6, bandwidth=1e9)
        for peer in members[2:]:
            measure(run, peer, 1e9, bandwidth=1e4)
        play_rounds(run)
        assert self.ks(run) == [0, 8]
        assert "rises 8 -> uncompressed: 8000.0 Mb/s carry it in" in latest_reason(run)
        play_rounds(run, 2)
        assert len(run.state.plans) == 2
        for peer in members[:2]:
            measure(run, peer, 1e9, bandwidth=1e4)
        play_rounds(run)
        assert self.ks(run) == [8, 8]
        assert "falls uncompressed -> 8: 0.1 Mb/s carry it in" in latest_reason(run)
        for peer in members[:2]:
            measure(run, peer, 1e6, bandwidth=1e9)
        play_rounds(run)
        assert self.ks(run) == [0, 8]
        assert all(plan.replicas[0].links == () for plan in run.state.plans)

    def test_k_stays_where_the_run_does_not_adapt_it(self) -> None:
        run = started_and_attested(0, 1)
        for peer in (A, B):
            measure(run, peer, 1e9, bandwidth=1e4)
        play_rounds(run, 2)
        assert len(run.state.plans) == 1

    def test_a_chain_beyond_the_budget_keeps_its_k_and_chains_are_adapted_in_turn(self) -> None:
        run = started_and_attested(0, 3, link__k=16, link__least_k=8, link__most_k=16)
        replicas = run.state.plans[-1].replicas
        slow = Capacity("cpu", 2**30, 1, flops=1e9, uplink=1e4, downlink=1e4)
        survey = Survey({peer.peer: slow for peer in ALL[:6]})
        operations_of_one_chain = 2 * 4 * 1 * 2 * run.spec.inner.microbatches

        def narrowed(from_round: int, budget: int) -> list[int]:
            fitted, _ = fit_k(run.spec, survey, replicas, {0, 1, 2}, from_round, budget)
            return [replica.index for replica in fitted if replica.links[0].k == 8]

        assert narrowed(1, operations_of_one_chain - 1) == []
        turns = [narrowed(from_round, operations_of_one_chain) for from_round in (1, 2, 3)]
        assert sorted(turns) == [[0], [1], [2]]
        assert narrowed(1, 3 * operations_of_one_chain) == [0, 1, 2]

    def ks(self, run: Run) -> list[int]:
        return [link.k for replica in run.state.plans[-1].replicas for link in replica.links]


class TestBudget:
    def test_an_exchange_that_is_not_possible_counts_as_an_operation(self) -> None:
        run = started_and_attested(0, 4, stages=2)
        replicas = run.state.plans[-1].replicas
        capacities = {peer.peer: replace(run.state.peers[peer.peer].capacity, flops=1e9) for peer in ALL[:8]}
        tried: list[Member] = []

        def has_no_room(member: Member, members_left: int) -> bool:
            tried.append(member)
            return False

        budget = 4 * 2 * run.spec.inner.microbatches + 5
        moves = ExchangeMoves(
            run.spec, Survey(capacities), replicas, {0, 1, 2, 3}, [], has_no_room, most_operations=budget
        )
        assert exchange_members(run.spec, replicas, moves) == (list(replicas), "")
        assert len(tried) == 5


class TestShares:
    def report_speeds(self, run: Run, *seconds: float) -> None:
        for replica, each in zip(run.state.plans[-1].replicas, seconds, strict=True):
            measure(run, _keyed_of(replica.members[0].peer), microbatch_seconds=each)

    def shares(self, run: Run) -> list[int]:
        return [run.spec.microbatches_of(replica) for replica in run.state.plans[-1].replicas]

    def test_faster_replicas_take_more_and_weigh_more_and_the_total_is_kept(self) -> None:
        run = started_and_attested(2, 1, inner__microbatches=4)
        self.report_speeds(run, 1.0, 2.0, 3.0)
        play_rounds(run)
        assert self.shares(run) == [4, 4, 4], "no replica has delivered anything before"
        play_rounds(run)
        assert self.shares(run) == [6, 4, 2]
        assert [each.weight for each in run.state.plans[-1].replicas] == [6 / 4, 1.0, 2 / 4]
        assert latest_reason(run) == (
            "of the microbatches of a step replica-0 takes 6 instead of 4, replica-2 takes 2 instead of 4: "
            "the slowest step falls from 12 s to 8 s"
        )
        play_rounds(run)
        assert {e.descriptor.weight for e in run.state.decisions[0, 3].entries} == {6 / 4, 1.0, 2 / 4}
        run.refuse(Offer(A.peer, A.payload(run.spec, 0, 4, weight=2.0)), ErrorCode.BAD_REQUEST)

    def test_all_speeds_must_be_known(self) -> None:
        run = started_and_attested(3, inner__microbatches=4)
        measure(run, A, microbatch_seconds=1.0)
        measure(run, B, microbatch_seconds=4.0)
        play_rounds(run, 2)
        assert len(run.state.plans) == 1

    @pytest.mark.parametrize("balance", [False, True])
    def test_shares_stay_equal_without_balancing_or_below_the_margin(
        self, balance: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tuning, "MARGIN", 0.6)
        run = started_and_attested(2, inner__microbatches=4, grouping__balance=balance)
        self.report_speeds(run, 1.0, 2.0)
        play_rounds(run, 2)
        assert len(run.state.plans) == 1

    def test_shares_change_when_a_replica_joins_or_leaves(self) -> None:
        run = started_and_attested(3, inner__microbatches=4)
        self.report_speeds(run, 1.0, 1.0, 2.0)
        play_rounds(run, 2)
        assert self.shares(run) == [5, 5, 2]
        leave(run, C)
        play_rounds(run)
        assert self.shares(run) == [4, 4]
        run.accept(D.join(run.spec))
        attest(run, D)
        play_rounds(run)
        assert self.shares(run) == [4, 4, 4]

    def test_a_replica_that_claims_to_be_fast_gets_at_most_half_and_step_by_step(self) -> None:
        run = started_and_attested(6, inner__microbatches=10)
        self.report_speeds(run, 1e-20, *[1.0] * 5)
        play_rounds(run, 2)
        assert self.shares(run) == [20, *[8] * 5], "a share grows to twice its value"
        play_rounds(run, SETTLE_ROUNDS)
        assert self.shares(run) == [30, *[6] * 5], "a share is at most half of all"
        play_rounds(run, SETTLE_ROUNDS)
        assert self.shares(run) == [30, *[6] * 5]

    @pytest.mark.parametrize("flops", [5e-324, 1e-290, 1e300])
    def test_extreme_claims_of_speed_are_bounded(self, flops: float) -> None:
        run = started_and_attested(0, 3, grouping__spares=9)
        join(run, G, H)
        for peer in (A, B, C, D, E, F, G, H):
            measure(run, peer, 1e9)
        measure(run, A, flops)
        measure(run, F, 5e-324)
        play_rounds(run, 8)
        assert sum(self.shares(run)) == 3 * run.spec.inner.microbatches

    def test_one_of_two_replicas_gets_at_most_three_quarters(self) -> None:
        run = started_and_attested(2, inner__microbatches=8)
        self.report_speeds(run, 1e-20, 1.0)
        play_rounds(run, 3)
        assert self.shares(run) == [12, 4]

    def test_a_replica_gets_no_more_than_it_delivered_until_it_delivers_all(self) -> None:
        run = started_and_attested(4, inner__microbatches=8)
        self.report_speeds(run, 1e-20, 1.0, 1.0, 1.0)
        play_rounds(run, 2)
        assert self.shares(run) == [16, 6, 5, 5]
        settle = SETTLE_ROUNDS
        for _ in range(settle):
            play_round(run, done={0: 0.6})
        assert self.shares(run) == [10, 8, 7, 7]
        for _ in range(settle):
            play_round(run, done={0: 0.9})
        assert self.shares(run) == [9, 8, 8, 7]
        play_rounds(run, settle)
        assert self.shares(run) == [16, 6, 5, 5]

    def test_shares_stay_if_all_replicas_deliver_less(self) -> None:
        run = started_and_attested(2, inner__microbatches=4)
        self.report_speeds(run, 1.0, 2.0)
        play_rounds(run, 2)
        assert self.shares(run) == [5, 3]
        for _ in range(SETTLE_ROUNDS):
            play_round(run, done={0: 0.5, 1: 0.5})
        assert self.shares(run) == [5, 3]

    def test_a_replica_whose_member_comes_back_within_the_round_keeps_its_share(self) -> None:
        run = started_and_attested(0, 2, inner__microbatches=8)
        for peer, flops in ((A, 1e9), (B, 1e9), (C, 3e8), (D, 3e8)):
            measure(run, peer, flops)
        play_rounds(run, 2)
        before = run.state.plans[-1].replicas
        assert self.shares(run) == [12, 4]
        leave(run, B)
        run.accept(B.join(run.spec, Role.STAGE))
        attest(run, B)
        measure(run, B, 1e9)
        play_rounds(run)
        assert latest_reason(run) == "replica-0 returns"
        assert run.state.plans[-1].replicas == before
        assert run.state.rebalanced_at == 3

    def test_shares_of_unknown_speed_are_equal_again(self) -> None:
        run = started_and_attested(2, inner__microbatches=4)
        self.report_speeds(run, 1.0, 3.0)
        play_rounds(run, 2)
        assert self.shares(run) == [6, 2]
        run.accept(D.join(run.spec))
        attest(run, D)
        play_rounds(run)
        assert self.shares(run) == [4, 4, 4]
        assert latest_reason(run) == "replica-2 joins; every replica takes 4 microbatches of a step again"

    def test_sample_ranges_have_no_gap_or_overlap_with_unequal_shares(self) -> None:
        run = started_and_attested(2, 1, inner__microbatches=4)
        self.report_speeds(run, 1.0, 2.0, 4.0)
        play_rounds(run, 2)
        leave(run, B)
        play_rounds(run, 2)
        assert_samples_tile(run, run.state.current_round)
        assert len(run.state.plans) > 2

    @given(
        st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40),
        st.integers(1, 64),
        st.integers(1, MOST_SHARE),
    )
    def test_fair_shares_keep_the_total_and_its_bounds(
        self, seconds: list[float], usual: int, times: int
    ) -> None:
        shares = fair_shares(seconds, usual * len(seconds), [times * usual] * len(seconds))
        assert sum(shares) == usual * len(seconds)
        assert all(1 <= share <= times * usual for share in shares)
        for one, other in zip(range(len(seconds)), reversed(range(len(seconds))), strict=True):
            assert seconds[one] >= seconds[other] or shares[one] >= shares[other]

    @given(
        st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 8)), min_size=2, max_size=4), st.integers(1, 4)
    )
    def test_no_moved_microbatch_makes_the_step_shorter(
        self, cases: list[tuple[float, int]], usual: int
    ) -> None:
        seconds, most = [each for each, _ in cases], [usual + more for _, more in cases]
        shares = fair_shares(seconds, usual * len(seconds), most)
        slowest = max(share * each for share, each in zip(shares, seconds, strict=True))
        for i, share in enumerate(shares):
            for j in range(len(shares)):
                if i != j and share > 1 and shares[j] < most[j]:
                    moved = [n - (k == i) + (k == j) for k, n in enumerate(shares)]
                    assert max(n * each for n, each in zip(moved, seconds, strict=True)) >= slowest * (
                        1 - 1e-9
                    )
