"""What `hetnode status` shows of a run."""

from __future__ import annotations

from rich.console import Console

from node.views.status import replica_table
from protocol.pb import hetnode_pb2 as pb


def measured(peer: str, round_number: int, position: int, sent: int) -> pb.Measurement:
    return pb.Measurement(
        peer=peer,
        round=round_number,
        replica=1,
        position=position,
        complete=position == 1,
        link_bytes_sent=sent,
        link_bytes_dense=8 * sent,
        inner_seconds=1.0,
        tokens=100,
    )


def test_a_member_that_was_replaced_counts_no_more() -> None:
    latest = [measured("new", 9, 0, 1000), measured("former", 5, 0, 500_000), measured("last", 9, 1, 1000)]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(replica_table(pb.StatusReply(latest=latest)))
    assert "1 (2 members)" in shown.get()
    assert "2.0 kB  8x" in shown.get()
