"""What `hetnode status` and the live view of a local swarm show of a run."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from node.views.status import replica_table, status_view
from protocol.status import Measurement
from protocol.types import Capacity, Estimates, LinkEstimate, PeerId
from tests.builders import status_of


def measurement(peer: str, round_number: int, position: int, sent: int) -> Measurement:
    return Measurement(
        PeerId(peer),
        round_number,
        replica=1,
        position=position,
        complete=position == 1,
        validation_loss=2.5,
        link_bytes_sent=sent,
        link_bytes_dense=8 * sent,
        inner_seconds=1.0,
        tokens=100,
    )


def shown(view: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_a_replaced_member_no_longer_counts_in_its_replica() -> None:
    measurements = (
        measurement("new", 9, 0, 1000),
        measurement("former", 5, 0, 500_000),
        measurement("last", 9, 1, 1000),
    )
    text = shown(replica_table(replace(status_of(), measurements=measurements)))
    assert "1 (2 members)" in text
    assert "2.0 kB  8x" in text


def test_a_replica_without_a_measurement_of_its_last_member_has_no_row() -> None:
    status = replace(status_of(), measurements=(measurement("first", 9, 0, 1000),))
    assert status.replicas == ()


def test_the_status_shows_peers_their_speed_and_what_the_run_does() -> None:
    link = LinkEstimate(PeerId("x" * 40 + "friend"), 0.01, 0.0, incoming=1e6)
    capacity = Capacity("cpu", 0, 1, flops=2e9, uplink=5e6, downlink=1e7, round_trip=0.02)
    status = status_of(estimates=Estimates(capacity, 0.25, (link,)))
    text = shown(status_view(status))
    for part in (
        "replica-0, stages 0-1",
        "2.0 GFLOP/s",
        "250 ms/microbatch",
        "40.0 Mb/s up, 80.0 down, 20 ms",
        "8.0 Mb/s from friend",
        status.message,
        "3 stage rounds committed, 1 aborted, anchors agree",
    ):
        assert part in text


def test_steps_done_are_those_of_the_slowest_member() -> None:
    status = status_of(round_number=4, inner_step=1)  # two steps a round
    assert status.steps_done == 7
    last = replace(measurement("last", 9, 1, 0), peer=status.peers[0].peer)
    assert replace(status, measurements=(last,)).steps_done == 18
    assert replace(status, peers=()).steps_done == 0
