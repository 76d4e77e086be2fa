"""The queries of a history: what they say about a run, and how much of it."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.run.state.commands import Await, Report, Tick
from coordinator.run.state.events import PayloadOffered, PayloadRejected, PeerLeft, RoundDecided
from coordinator.store.history import SqliteHistory
from coordinator.store.history_answers import CreditOrder, Page
from coordinator.store.history_tables import AdoptedPlan, Kind, Omission, StageOutcome, Standing
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Measurement, PayloadAgreement
from protocol.types import Aborted, Committed, PeerId, Rejection, Role
from tests.builders import keyed
from tests.support.coordinator_run import (
    Run,
    beat_for,
    join,
    leave,
    measure,
    offer,
    play_rounds,
    started_and_attested,
)
from tests.support.history import stored, write_history

A, B, C = keyed(0), keyed(1), keyed(2)


def history_of(run: Run, folder: Path, *measured: Measurement) -> SqliteHistory:
    lines = [(1000.0 + 10 * each.round_number, each) for each in measured]
    return write_history(folder / "history.sqlite", run.spec, stored(run.events), lines)


def measurement(
    peer: PeerId, round_number: int, replica: int, position: int = 0, loss: float | None = None, sent: int = 0
) -> Measurement:
    """`loss`: of the last member, which measures it."""
    return Measurement(
        peer,
        round_number,
        replica,
        position,
        train_loss=loss or 0.0,
        validation_loss=loss or 0.0,
        tokens=100,
        inner_seconds=3.0,
        outer_seconds=1.0,
        link_bytes_sent=sent,
        link_bytes_dense=8 * sent,
        payload_bytes=10,
        payload_bytes_dense=1000,
        complete=loss is not None,
    )


def test_a_round_tells_who_was_counted_and_why_others_were_not(tmp_path: Path) -> None:
    run = started_and_attested(4, 0, stages=1)
    peers = [keyed(i) for i in range(4)]
    run.now += 5.0
    payloads = [peer.payload(run.spec, 0, 1) for peer in peers[:3]]
    for peer, payload in zip(peers, payloads, strict=False):
        run.now += 1.0
        offer(run, peer, payload)
    leave(run, peers[3])
    run.accept(Tick())
    offered = run.now
    run.now += 2.0
    held, bad = tuple(payloads[:2]), (Rejection(payloads[2], "its values are too large"),)
    for peer in peers[:2]:
        run.accept(Report(peer.peer, 0, 1, held, bad))
    run.accept(Report(peers[2].peer, 0, 1, held))
    assert isinstance(run.state.decisions[0, 1], Committed)
    detail = history_of(run, tmp_path).round(1)
    assert detail is not None
    (stage,) = detail.stages
    assert stage.summary.outcome is StageOutcome.COMMITTED
    assert (stage.summary.offered, stage.summary.counted) == (3, 2)
    by_peer = {each.peer: each for each in stage.contributions}
    assert [by_peer[peer.peer].standing for peer in peers] == [
        Standing.COUNTED,
        Standing.COUNTED,
        Standing.LEFT_OUT,
        Standing.MISSING,
    ]
    left_out, missing = by_peer[peers[2].peer], by_peer[peers[3].peer]
    assert (left_out.cause, left_out.rejections) == (Kind.REJECTED, 2)
    assert left_out.detail == "its values are too large"
    assert (missing.cause, missing.culprit) == (Kind.LEFT, peers[3].peer)
    events = stored(run.events)
    cited = [events[(each.cause_sequence or 0) - 1] for each in (left_out, missing)]
    assert [type(each) for each in cited] == [PayloadRejected, PeerLeft]
    assert isinstance(events[(stage.summary.decided_sequence or 0) - 1], RoundDecided)
    assert isinstance(events[(by_peer[A.peer].offered_sequence or 0) - 1], PayloadOffered)
    phases = stage.phases
    first = by_peer[A.peer].offered_at
    assert first is not None
    assert phases.inner == pytest.approx(first - detail.summary.began_at)
    assert phases.offer == pytest.approx(offered - first)
    assert phases.group == pytest.approx(2.0)
    assert phases.decision == 0.0


def test_a_round_that_is_not_decided_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    run = started_and_attested(2, 1)
    offer(run, A, A.payload(run.spec, 0, 1))
    run.accept(Await(B.peer, 0, 1, 1))
    history = history_of(run, tmp_path)
    detail = history.round(1)
    assert detail is not None
    assert detail.summary.seconds is None
    (stage,) = detail.stages
    assert (stage.summary.outcome, stage.summary.offered, stage.summary.reason) == (
        StageOutcome.OPEN,
        1,
        None,
    )
    assert {each.standing for each in stage.contributions} == {Standing.OFFERED, Standing.WITHHELD}
    assert stage.phases.offer is None
    assert history.rounds()[0].stages == (stage.summary,)
    assert history.round(2) is None


def test_a_round_that_begins_anew_forgets_what_was_offered(tmp_path: Path) -> None:
    run = started_and_attested(0, 1)
    one, other = keyed(0), keyed(1)
    play_rounds(run)
    run.accept(Tick())
    leave(run, one, other)
    join(run, one, other)
    run.now += 60.0
    run.accept(Tick())
    assert run.state.plans[-1].from_round == run.state.current_round == 2
    summary = history_of(run, tmp_path).rounds()[0]
    assert (summary.round_number, summary.restarts, summary.stages) == (2, 1, ())
    assert summary.began_at == run.state.began_at
    assert summary.epoch == run.state.plans[-1].epoch


def test_an_aborted_round_gives_its_reason_to_all_offers(tmp_path: Path) -> None:
    run = started_and_attested(2, 0, stages=1)
    for peer in (A, B):
        offer(run, peer, peer.payload(run.spec, 0, 1))
    for peer in (A, B):
        run.accept(Report(peer.peer, 0, 1, (peer.payload(run.spec, 0, 1),)))
    decision = run.state.decisions[0, 1]
    assert isinstance(decision, Aborted)
    detail = history_of(run, tmp_path).round(1)
    assert detail is not None
    assert detail.stages[0].summary.reason == decision.reason
    assert [each.cause for each in detail.stages[0].contributions] == [Omission.DECISION] * 2
    assert {each.standing for each in detail.stages[0].contributions} == {Standing.LEFT_OUT}
    assert detail.summary.tokens == 0


def test_rounds_come_in_pages_from_the_newest(tmp_path: Path) -> None:
    run = started_and_attested(2, 0)
    play_rounds(run, 6)
    history = history_of(run, tmp_path)
    assert [each.round_number for each in history.rounds(most=3)] == [7, 6, 5]
    assert [each.round_number for each in history.rounds(before=3, most=3)] == [2, 1]
    assert history.rounds(before=1) == ()
    assert all(len(each.stages) == 2 for each in history.rounds(before=7))


def test_a_peer_has_its_changes_and_estimates(tmp_path: Path) -> None:
    run = started_and_attested(2, 1)
    measure(run, C, 1e9, 1e6, 0.25)
    play_rounds(run)
    leave(run, C)
    run.now += 10.0
    run.accept(C.join(run.spec, Role.STAGE))
    history = history_of(run, tmp_path)
    detail = history.peer(C.peer)
    assert detail is not None
    assert (detail.summary.is_here, detail.summary.role) == (True, Role.STAGE)
    assert [each.kind for each in detail.changes] == [Kind.RESERVED, Kind.JOINED, Kind.LEFT, Kind.JOINED]
    events = stored(run.events)
    assert all(C.peer in repr(events[each.sequence - 1]) for each in detail.changes)
    assert [each.flops for each in detail.estimates] == [1e9]
    assert [each.standing for each in detail.contributions] == [Standing.COUNTED]
    assert history.peer(PeerId("nobody")) is None
    assert history.peer(PeerId("")) is None, "the run has lines in the journal as well"


def test_a_lost_peer_is_a_failure(tmp_path: Path) -> None:
    run = started_and_attested(2, 1)
    beat_for(run, 3 * run.spec.timing.lost_after, A, B, keyed(3))
    found = history_of(run, tmp_path).peer(C.peer)
    assert found is not None
    (lost,) = (each for each in found.changes if each.kind is Kind.LOST)
    assert (found.summary.is_here, found.summary.failures) == (False, 1)
    assert (lost.seconds or 0.0) >= run.spec.timing.lost_after


def test_the_journal_tells_what_concerns_the_run_and_its_peers(tmp_path: Path) -> None:
    run = started_and_attested(1, 2)
    play_rounds(run)
    leave(run, keyed(4))
    play_rounds(run)
    history, events = history_of(run, tmp_path), stored(run.events)
    lines = history.journal(1, len(events))
    assert [each.sequence for each in lines] == sorted(each.sequence for each in lines)
    (left,) = (each for each in lines if each.kind is Kind.LEFT)
    assert (left.peer, left.round_number) == (keyed(4).peer, 2)
    numbers = [each.sequence for each in lines if each.kind is Kind.PLAN]
    for plan, number in zip(run.state.plans, numbers, strict=True):
        begin = plan.epoch, number, events[number - 1].at, plan.from_round
        expected = AdoptedPlan(*begin, len(plan.replicas), plan.size, plan.reason)
        assert history.plan(plan.epoch) == expected
    assert history.plan(99) is None
    assert history.journal(5, 4) == ()


def test_losses_and_traffic_by_replica_member_and_round(tmp_path: Path) -> None:
    run = started_and_attested(1, 1)
    play_rounds(run, 3)
    a, b, c = (keyed(i).peer for i in range(3))
    measured = [
        each
        for n in range(4)
        for each in (
            measurement(a, n, 0, loss=4.0 - n),
            measurement(b, n, 1, 0, sent=100 + n),
            measurement(c, n, 1, 1, loss=5.0 - n, sent=50),
        )
    ]
    history = history_of(run, tmp_path, *measured)
    assert [(each.validation_loss, each.least, each.greatest) for each in history.losses()] == [
        (4.5 - n, 4.0 - n, 5.0 - n) for n in range(4)
    ]
    assert [each.validation_loss for each in history.losses(1)] == [5.0, 4.0, 3.0, 2.0]
    assert [each.train_loss for each in history.losses(1)] == [None, 4.0, 3.0, 2.0]
    assert history.losses(7) == ()
    assert [each.link_bytes for each in history.traffic()] == [150, 151, 152, 153]
    assert [each.link_bytes_dense for each in history.traffic()] == [8 * (150 + n) for n in range(4)]
    assert history.traffic()[-1].payload_bytes == 30
    assert history.replicas() == (0, 1)
    by_peer = {each.peer: each.link_bytes for each in history.credits(CreditOrder.LINK).credits}
    assert list(by_peer.items()) == [(b, 406), (c, 200), (a, 0)]
    detail = history.round(3)
    assert detail is not None
    assert detail.summary.validation_loss == 1.5
    assert [(each.peer, each.is_last) for each in detail.members] == [(a, True), (b, False), (c, True)]


@pytest.mark.parametrize("most", [1, 2, 7, 10, 99, 100, 5000])
def test_a_thinned_list_has_its_ends_and_its_spikes(tmp_path: Path, most: int) -> None:
    run = started_and_attested(1, 0)
    measured = [measurement(A.peer, n, 0, loss=9.0 if n == 41 else 1.0, sent=n) for n in range(100)]
    history = history_of(run, tmp_path, *measured)
    for replica in (None, 0):
        losses = history.losses(replica, most)
        assert len(losses) <= min(most, 100)
        assert losses[-1].round_number == 99
        assert max(each.greatest or 0.0 for each in losses) == 9.0
    traffic = history.traffic(most)
    assert sum(each.rounds for each in traffic) == 100
    total = sum(each.link_bytes * each.rounds for each in traffic)
    assert total == pytest.approx(sum(range(100)), abs=100)


def test_speed_is_that_of_committed_tokens(tmp_path: Path) -> None:
    run = started_and_attested(2, 0)
    for _ in range(4):
        run.now += 8.0
        play_rounds(run)
    history = history_of(run, tmp_path)
    tokens = 2 * run.spec.samples_per_round() * run.spec.model.context
    assert [each.tokens for each in history.speed()] == [tokens] * 4
    assert [each.tokens_per_second for each in history.speed()] == pytest.approx([tokens / 8.0] * 4)
    assert [(each.rounds, each.seconds) for each in history.speed(most=1)] == [(4, 32.0)]


def test_figures_that_no_peer_can_mean_are_kept_out(tmp_path: Path) -> None:
    run = started_and_attested(2, 0)
    worst = measurement(A.peer, 1, 0, loss=math.nan)
    worst = replace(
        worst, link_bytes_sent=2**64 - 1, tokens=2**63, gradient_norm=math.inf, outer_seconds=-1e300
    )
    worst = replace(worst, inner_seconds=1e300, train_loss=-math.inf)
    history = history_of(run, tmp_path, worst, measurement(B.peer, 1, 1, loss=2.0))
    assert [each.validation_loss for each in history.losses()] == [2.0]
    assert [each.validation_loss for each in history.losses(0)] == [None]
    peer = history.peer(A.peer)
    assert peer is not None
    assert [each.outer_seconds for each in peer.figures] == [0.0]
    assert 0 < history.credits(CreditOrder.LINK).link_bytes < 2**63


def test_a_long_text_is_cut_and_no_letter_of_it_is_a_failure(tmp_path: Path) -> None:
    run = started_and_attested(2, 0)
    events = stored(run.events)
    joined = next(event for event in events if getattr(event, "peer", None) == A.peer)
    odd = replace(joined, at=run.now, problem="<b>\x1b[31m\ud800" + "x" * 100_000)
    history = write_history(tmp_path / "history.sqlite", run.spec, [*events, odd])
    detail = history.peer(A.peer)
    assert detail is not None
    assert len(detail.changes[0].text) <= 400


def test_queries_are_bounded(tmp_path: Path) -> None:
    run = started_and_attested(2, 0)
    history = history_of(run, tmp_path, *(measurement(A.peer, n, 0, loss=1.0) for n in range(1500)))
    assert len(history.losses(most=10**9)) <= 1000
    assert len(history.credits(page=Page(most=10**9)).credits) == 2
    detail = history.peer(A.peer, most=10**9)
    assert detail is not None
    assert len(detail.figures) == 1000
    assert history.credits(page=Page(skip=-5, most=-5)).credits[0].peer == A.peer


def test_an_empty_run_has_an_empty_history(tmp_path: Path) -> None:
    run = started_and_attested(2, 0)
    history = write_history(tmp_path / "history.sqlite", run.spec, [])
    assert history.run().tokens == history.credits().peers == 0
    assert history.losses() == history.speed() == history.traffic() == history.losses(0) == ()
    assert history.rounds() == history.replicas() == history.journal(1, 99) == ()
    assert not history.problem


@pytest.mark.parametrize("content", [None, b"", b"no database" * 999, "program"])
def test_without_a_history_a_query_says_so(tmp_path: Path, content: bytes | str | None) -> None:
    path = tmp_path / "a folder?mode=rwc" / "history.sqlite"
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE run (sequence INTEGER)")
    history = SqliteHistory(path)
    with pytest.raises(HetnodeError) as error:
        history.run()
    assert error.value.code is ErrorCode.NO_HISTORY
    assert str(path) in history.problem
    assert path.exists() == (content is not None)


def test_a_reader_sees_one_moment_while_others_write(tmp_path: Path) -> None:
    run = started_and_attested(2, 0)
    play_rounds(run, 2)
    path, events = tmp_path / "history.sqlite", stored(run.events)
    history = write_history(path, run.spec, events[:-1])
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE run SET tokens = -1")
        assert history.run().tokens > 0
        db.execute("ROLLBACK")


def test_a_payload_has_what_another_peer_measured_of_it(tmp_path: Path) -> None:
    run = started_and_attested(2, 0, stages=1)
    play_rounds(run)
    agreements = (
        PayloadAgreement(0, B.peer, cosine=0.25, norm=2.0),
        PayloadAgreement(0, C.peer, cosine=0.5, norm=3.0),  # of a stranger
    )
    figures = replace(measurement(A.peer, 1, 0, loss=5.0), progress_norm=3.0, error_norm=1.0)
    again = replace(figures, peer=B.peer, replica=1, agreements=(PayloadAgreement(0, B.peer, 0.9, 9.0),))
    detail = history_of(run, tmp_path, replace(figures, agreements=agreements), again).round(1)
    assert detail is not None
    by_peer = {each.peer: each for each in detail.stages[0].contributions}
    assert (by_peer[B.peer].cosine, by_peer[B.peer].norm) == (0.25, 2.0), "the first figure stays"
    assert (by_peer[A.peer].cosine, by_peer[A.peer].norm) == (None, None)
    assert (detail.members[0].progress_norm, detail.members[0].error_share) == (3.0, 0.25)


def test_peers_are_found_by_a_part_of_their_name_or_id(tmp_path: Path) -> None:
    run = started_and_attested(2, 0)
    history = history_of(run, tmp_path)
    assert [each.peer for each in history.credits(find=A.peer[-8:].upper()).credits] == [A.peer]
    assert len(history.credits(find=A.peer[:4]).credits) >= 1
    for nothing in ("%", "_", "'; drop table peers", "nobody"):
        assert history.credits(find=nothing).credits == ()
    assert history.credits(find="nobody").peers == 2  # totals are those of all


def test_a_rank_counts_the_peers_with_more_stage_tokens(tmp_path: Path) -> None:
    """A full replica has the tokens of both stages, each member of a pipeline those of one."""
    run = started_and_attested(1, 1)
    play_rounds(run)
    history = history_of(run, tmp_path)
    ranks = [history.rank(each) for each in history.credits().credits]
    assert ranks == [(1, 3), (2, 3), (2, 3)]
