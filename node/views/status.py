"""What a coordinator says of its run, as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table

from node.views import run_history
from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec


def status_view(status: pb.StatusReply) -> RenderableType:
    """What the run does, its replicas and its peers."""
    spec = RunSpec.from_json(status.spec_json)
    columns = ("peer", "role", "state", "place", "round", "step", "seen", "computes", "connection")
    peers = Table(*columns, title=f"run {status.run}")
    for peer in status.peers:
        peers.add_row(
            peer.peer[-12:],
            peer.role,
            peer.lifecycle,
            peer.place,
            str(peer.round),
            f"{peer.inner_step}/{spec.inner.steps}",
            f"{peer.seen_seconds_ago:.0f} s ago",
            *_measured(peer.estimates),
        )
    rounds = (
        f"{status.rounds_committed} stage rounds committed, {status.rounds_aborted} aborted, anchors "
        f"{'agree' if status.anchors_agree else 'DIFFER'}"
    )
    return Group(peers, replica_table(status), status.sentence, rounds)


def _measured(estimates: pb.Estimates) -> tuple[str, str]:
    """What a peer has said of its speed and its connection; what it has not measured is left out."""
    capacity = estimates.capacity
    computes = [f"{capacity.flops / 1e9:,.1f} GFLOP/s"] if capacity.flops else []
    if estimates.microbatch_seconds:
        computes.append(f"{estimates.microbatch_seconds * 1000:,.0f} ms/microbatch")
    connection = []
    if capacity.uplink:
        up, down = capacity.uplink * 8e-6, capacity.downlink * 8e-6
        connection.append(f"{up:,.1f} Mb/s up, {down:,.1f} down, {capacity.round_trip * 1000:.0f} ms")
    for link in estimates.links:
        if rate := link.incoming or link.bandwidth:
            way = "from" if link.incoming else "to"
            connection.append(f"{rate * 8e-6:,.1f} Mb/s {way} {link.peer[-6:]}")
    return "\n".join(computes), "\n".join(connection)


def _by_replica(latest: Iterable[pb.Measurement]) -> dict[int, list[pb.Measurement]]:
    """One measurement for each position of a replica: of whoever has it now, not of whom it has replaced."""
    newest: dict[tuple[int, int], pb.Measurement] = {}
    for measurement in sorted(latest, key=lambda each: each.round):
        newest[measurement.replica, measurement.position] = measurement
    found: dict[int, list[pb.Measurement]] = {}
    for measurement in newest.values():
        found.setdefault(measurement.replica, []).append(measurement)
    return found


def replica_table(status: pb.StatusReply) -> Table:
    """One row per replica, from the newest measurements of its members."""
    table = Table("replica", "round", "validation loss", "tokens/s", "link per round", "payload per round")
    for index, members in sorted(_by_replica(status.latest).items()):
        last = next((m for m in members if m.complete), None)
        if last is None:
            continue
        seconds = last.inner_seconds + last.outer_seconds
        link, link_dense, payload, payload_dense = (
            sum(getattr(member, field) for member in members)
            for field in ("link_bytes_sent", "link_bytes_dense", "payload_bytes", "payload_bytes_dense")
        )
        table.add_row(
            f"{index} ({'full' if len(members) == 1 else f'{len(members)} members'})",
            str(last.round),
            f"{last.validation_loss:.4f}",
            f"{last.tokens / seconds:,.0f}" if seconds else "",
            f"{run_history.size(link)}  {run_history.ratio(link_dense, link)}" if link else "no link",
            f"{run_history.size(payload)}  {run_history.ratio(payload_dense, payload)}" if payload else "",
        )
    return table
