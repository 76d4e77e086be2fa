"""The forecast for a swarm as tables and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table

from coordinator.ops.forecast.advice import Advice, advice
from coordinator.ops.forecast.forecast import Forecast, ProposedPlan, ReplicaForecast
from coordinator.placement.cost_model import Survey, memory_budget
from coordinator.placement.tuning import batch_notes
from node.core.model.shapes import payload_layout
from node.views import run_history
from protocol.group.batch import batch_of
from protocol.memory.needs import MemoryNeed, MemoryPolicy, MemoryRoom, choose
from protocol.run_files.link_text import k_text
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.spec.run import RunSpec
from protocol.types import PeerId, Replica

_MOST_ROWS = 24


def payload_bytes(spec: RunSpec) -> list[int]:
    """Bytes of one payload, by stage."""
    return [payload_layout(spec, stage).nbytes for stage in range(spec.swarm.stages)]


_GATHER_MARGIN = 1.5
"""Real lines take a fifth more than their rates say (docs/operate.md), and peers differ."""


def plan_view(spec: RunSpec, proposal: ProposedPlan, found: Forecast) -> RenderableType:
    """Replicas, peers and totals, for people."""
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(spec, proposal, found).items():
        facts.add_row(name, value)
    return Group(
        _replicas(spec, found),
        _peers(spec, proposal.survey, found),
        Panel(facts, title=f"plan for {spec.preset}"),
    )


def plan_json(spec: RunSpec, proposal: ProposedPlan, found: Forecast) -> dict[str, Any]:
    """The same for programs. Units: seconds, bytes, shares of 1."""
    per_day = found.per_day
    return {
        "preset": spec.preset,
        "reason": proposal.reason,
        "spares": list(proposal.spares),
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_round": found.tokens_per_round,
        "batch": batch_of(spec, proposal.replicas),
        "round_seconds": found.round_seconds,
        "inner_seconds": found.inner_seconds,
        "outer_seconds": found.outer_seconds,
        "hidden_seconds": found.hidden_seconds,
        "utilization": found.utilization,
        "bottleneck": found.bottleneck,
        "warnings": warnings_of(spec, found),
        "advice": [asdict(each) for each in _advice(spec, proposal, found)],
        "replicas": [
            {
                "index": each.replica.index,
                "microbatches": spec.microbatches_of(each.replica),
                "step_seconds": each.step.seconds,
                "bottleneck": each.bottleneck,
                "k": [link.k for link in each.replica.links],
                "members": [
                    {
                        "peer": member.peer,
                        "stages": [member.stages.first, member.stages.stop],
                        "utilization_in_step": in_step,
                        "utilization_in_round": in_round,
                        "bytes_sent_per_day": per_day[member.peer].sent,
                        "bytes_received_per_day": per_day[member.peer].received,
                        "memory": {
                            "policy": str(policy),
                            "device_bytes": need.device,
                            "main_bytes": need.main,
                        },
                    }
                    for member, in_step, in_round, (policy, need) in zip(
                        each.replica.members,
                        each.step.utilization,
                        each.utilization,
                        memory_of(spec, proposal.survey, each.replica),
                        strict=True,
                    )
                ],
            }
            for each in found.replicas
        ],
    }


def _facts(spec: RunSpec, proposal: ProposedPlan, found: Forecast) -> dict[str, str]:
    spares = len(proposal.spares)
    hidden = f", of which {found.hidden_seconds:,.1f} s overlap" if found.hidden_seconds else ""
    return {
        "grouping": proposal.reason,
        "spares": f"{spares}: {_named(proposal.spares)}" if spares else "none",
        "tokens/s": f"{found.tokens_per_second:,.0f}",
        "round": f"{found.round_seconds:,.1f} s: {spec.inner.steps} inner steps "
        f"{found.inner_seconds:,.1f} s, outer exchange {found.outer_seconds:,.1f} s{hidden}, "
        f"{found.tokens_per_round:,} tokens",
        "batch": "; ".join(
            [
                f"{batch_of(spec, proposal.replicas):,} samples of all replicas in an inner step",
                *batch_notes(spec, proposal.replicas),
            ]
        ),
        "memory": "; ".join(_memory(spec, proposal, found)),
        "computing": f"{found.utilization:.1%} of a round, mean over members",
        "bottleneck": found.bottleneck,
        **({"warning": "; ".join(warnings)} if (warnings := warnings_of(spec, found)) else {}),
        **(
            {"shorter with": "; ".join(map(_advised, named))}
            if (named := _advice(spec, proposal, found))
            else {}
        ),
    }


def _memory(spec: RunSpec, proposal: ProposedPlan, found: Forecast) -> Iterator[str]:
    """How many peers take each policy."""
    policies = [
        policy for each in found.replicas for policy, _ in memory_of(spec, proposal.survey, each.replica)
    ]
    for policy, count in Counter(policies).items():
        yield f"{policy}: {count} of {len(policies)} peers"


def _advice(spec: RunSpec, proposal: ProposedPlan, found: Forecast) -> list[Advice]:
    return list(advice(spec, proposal.survey, proposal.replicas, payload_bytes(spec), found))


def _advised(each: Advice) -> str:
    return f"{each.setting}: a round of {each.round_seconds:,.1f} s, {each.gain:.0%} shorter"


def warnings_of(spec: RunSpec, found: Forecast) -> list[str]:
    """What would keep such a run from committing rounds, and what to do; empty where nothing would."""
    allowed, longest = spec.timing.fetch, found.all_stages_seconds
    if longest <= allowed:
        return []
    least = math.ceil(_GATHER_MARGIN * longest)
    where = " of all stages in the last round" if spec.outer.turns > 1 else ""
    return [
        f"gathering payloads{where} takes {longest:,.1f} s and timing.fetch allows {allowed:g} s: "
        "rounds would lack payloads or be aborted. "
        f"Set timing.fetch to {least} or more, and timing.decide above it"
    ]


def _replicas(spec: RunSpec, found: Forecast) -> Table:
    table = Table(
        Column("replica", no_wrap=True),
        "peers: stages",
        "k",
        Column("batches", no_wrap=True),
        Column("step", no_wrap=True),
        "busy in it",
        "in a round",
        "waits for",
        box=None,  # 80 columns have no room for lines
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for each in _first(found.replicas):
        members = each.replica.members
        table.add_row(
            str(each.replica.index),
            ", ".join(f"{_short(member.peer)}: {member.stages}" for member in members),
            ", ".join(k_text(link.k) for link in each.replica.links) or "-",
            str(spec.microbatches_of(each.replica)),
            f"{each.step.seconds:.3g} s",
            _percent(each.step.utilization),
            _percent(each.utilization),
            each.bottleneck,
        )
    _note_omitted_rows(table, len(found.replicas))
    return table


def memory_of(spec: RunSpec, survey: Survey, replica: Replica) -> Iterator[tuple[MemoryPolicy, MemoryNeed]]:
    """How each member saves memory of its device, and what it then needs of both."""
    left = range(len(replica.members), 0, -1)
    for member, n in zip(replica.members, left, strict=True):
        able = survey.capacity(member.peer)
        main = (1 - MEMORY_RESERVE) * able.main_bytes
        room = MemoryRoom(able.device, memory_budget(spec, able), main)
        yield choose(spec, member.stages, n, room)


def _peers(spec: RunSpec, survey: Survey, found: Forecast) -> Table:
    table = Table("peer", "stages", "device", "main memory", "sends a day", "receives a day", "up", "down")
    per_day = found.per_day
    assignments = [
        (member, need, per_day[member.peer])
        for each in found.replicas
        for member, (_, need) in zip(each.replica.members, memory_of(spec, survey, each.replica), strict=True)
    ]
    for member, need, traffic in assignments[:_MOST_ROWS]:
        up, down = (8e-6 * bytes_ / 86_400 for bytes_ in (traffic.sent, traffic.received))
        table.add_row(
            _short(member.peer),
            str(member.stages),
            run_history.size(need.device),
            run_history.size(need.main),
            run_history.size(traffic.sent),
            run_history.size(traffic.received),
            f"{up:.1f} Mb/s",
            f"{down:.1f} Mb/s",
        )
    _note_omitted_rows(table, len(assignments))
    return table


def _first(replicas: Sequence[ReplicaForecast]) -> list[ReplicaForecast]:
    """All replicas, or the slowest if there are too many to show."""
    if len(replicas) <= _MOST_ROWS:
        return list(replicas)
    return sorted(replicas, key=lambda each: -each.step.seconds)[:_MOST_ROWS]


def _note_omitted_rows(table: Table, rows: int) -> None:
    if rows > _MOST_ROWS:
        table.caption = f"{rows - _MOST_ROWS} more are not shown; --json has all"


def _named(peers: Sequence[PeerId]) -> str:
    shown = ", ".join(map(_short, peers[:5]))
    return shown if len(peers) <= 5 else f"{shown} and {len(peers) - 5} more"


def _short(peer: PeerId) -> str:
    return peer if len(peer) <= 16 else f"..{peer[-8:]}"


def _percent(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares) + " %"
