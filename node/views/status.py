"""The status of a run as tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from node.views.run_history import ratio, size
from protocol.status import RunStatus
from protocol.types import Estimates


def status_view(status: RunStatus) -> RenderableType:
    """The peers, the replicas, and the state of the run."""
    columns = (
        "peer",
        "role",
        "state",
        "assignment",
        "round",
        "step",
        "seen",
        "computes",
        "reached",
        "connection",
    )
    peers = Table(*columns, title=f"run {status.run}")
    for peer in status.peers:
        peers.add_row(
            peer.peer[-12:],
            f"{peer.role.value}{' (auto)' if peer.role_reason else ''}",
            "paused" if peer.rests else peer.lifecycle.value,
            peer.assignment,
            str(peer.round_number),
            f"{peer.inner_step}/{status.spec.inner.steps}",
            f"{peer.seconds_since_seen:.0f} s ago",
            _speed(peer.estimates),
            peer.reachability.value,
            _connection(peer.estimates),
        )
    roles = [
        f"{peer.peer[-12:]}: {peer.role}, {peer.role_reason}" for peer in status.peers if peer.role_reason
    ]
    problems = [f"{peer.peer[-12:]}: {peer.problem}" for peer in status.peers if peer.problem]
    return Group(peers, replica_table(status), *roles, *problems, status.message, status.rounds_message)


def replica_table(status: RunStatus) -> Table:
    """One row per replica, from the newest measurements of its members."""
    table = Table("replica", "round", "validation loss", "tokens/s", "link per round", "payload per round")
    for replica in status.replicas:
        members = "full" if replica.members == 1 else f"{replica.members} members"
        table.add_row(
            f"{replica.index} ({members})",
            str(replica.round_number),
            f"{replica.validation_loss:.4f}",
            f"{replica.tokens_per_second:,.0f}" if replica.tokens_per_second else "",
            _traffic(replica.link_bytes_sent, replica.link_bytes_dense) or "no link",
            _traffic(replica.payload_bytes, replica.payload_bytes_dense),
        )
    return table


def _traffic(sent: int, dense: int) -> str:
    return f"{size(sent)}  {ratio(dense, sent)}" if sent else ""


def _speed(estimates: Estimates) -> str:
    """The measured speed of the peer; "" before it has measured."""
    lines = []
    if estimates.capacity.flops:
        lines.append(f"{estimates.capacity.flops / 1e9:,.1f} GFLOP/s")
    if estimates.microbatch_seconds:
        lines.append(f"{estimates.microbatch_seconds * 1000:,.0f} ms/microbatch")
    return "\n".join(lines)


def _connection(estimates: Estimates) -> str:
    """The measured speed of the peer's connection and links; "" before it has measured."""
    lines = []
    capacity = estimates.capacity
    if capacity.uplink:
        up, down = capacity.uplink * 8e-6, capacity.downlink * 8e-6
        lines.append(f"{up:,.1f} Mb/s up, {down:,.1f} down, {capacity.round_trip * 1000:.0f} ms")
    for link in estimates.links:
        if rate := link.incoming or link.bandwidth:
            direction = "from" if link.incoming else "to"
            lines.append(f"{rate * 8e-6:,.1f} Mb/s {direction} {link.peer[-6:]}")
    return "\n".join(lines)
