"""What preset 8b asks of homes and gives them: ``docs/reference/8b.md``, by the formulas that plan a run."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ops.forecast.forecast import Forecast, forecast, shared_out
from coordinator.placement.cost_model import Survey, message_bytes
from node.core.model.shapes import payload_layout
from protocol.math.embedding_snapshot import BYTES_PER_VALUE
from protocol.memory.needs import MemoryNeed, MemoryPolicy, MemoryRoom, choose, members_left
from protocol.run_files.resolve import resolve
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Dialer, Link, Member, PeerId, Replica, StageRange

_GB = 10**9
_HOMES = (16, 32), (16, 48), (24, 48)
"""GiB of card and of main memory."""
_UP, _DOWN, _DELAY = 20e6 / 8, 100e6 / 8, 0.03
_HOME_FLOPS, _REPLICA_FLOPS, _REPLICA_LINE = 30e12, 400e12, 1e9 / 8
_USED = 0.77
"""Of its line, by a measured join."""
_AGAIN = 3 / 4
"""Of the speed is left where layers are computed again."""


def page() -> str:
    """The page. A test compares it with the file."""
    spec = resolve("8b")
    return "\n".join([*_introduction(spec), "", *_memory(spec), "", *_figures(spec)]) + "\n"


def _introduction(spec: RunSpec) -> Iterator[str]:
    total = spec.parameters
    swarm = spec.swarm
    yield "# 8B from homes"
    yield ""
    yield "Made by `python -m benchmarks.reference`. **No such run was made; nothing here ran on a GPU.**"
    yield f"Preset 8b: {total / 1e9:.2f}B parameters, Muon, dithered links, snapshots;"
    yield f"{swarm.pipelines} pipelines of {swarm.stages} homes (100/20 Mb/s, 30 ms, 30 TFLOP/s, 22 where"
    yield f"layers are computed again) and {swarm.replicas} full replicas (1 Gb/s, 400 TFLOP/s)."
    yield "GB, of homes GiB; a: moments in RAM,"
    yield "b: layers computed again. Memory was [measured](../gpu.md) on a CPU at 0.3B; the loss is unknown."


def _memory(spec: RunSpec) -> Iterator[str]:
    yield "| stages | parameters | home: card, RAM | all on the card | chosen | card | RAM |"
    yield "|---|---|---|---|---|---|---|"
    rows: dict[tuple[str, ...], list[StageRange]] = {}
    for stage in range(spec.swarm.stages):
        stages = StageRange(stage, stage + 1)
        home, policy, _ = _home(spec, stages)
        parameters = f"{spec.parameters_of(stage) / 1e9:.2f}B"
        rows.setdefault((parameters, f"{home[0]}, {home[1]}", _short(policy)), []).append(stages)
    for (parameters, machine, policy), found in rows.items():
        usual = max(_usual(spec, each) for each in found)
        needs = [_home(spec, each)[2] for each in found]
        card, main = max(each.device for each in needs), max(each.main for each in needs)
        cells = (
            f"{parameters} | {machine} | {usual / _GB:.0f} | {policy} | {card / _GB:.1f} | {main / _GB:.1f}"
        )
        yield f"| {StageRange(found[0].first, found[-1].stop)} | {cells} |"


def _short(policy: MemoryPolicy) -> str:
    return "a" * policy.host_moments + "b" * policy.checkpointing or "-"


def _usual(spec: RunSpec, stages: StageRange) -> int:
    """Bytes on the card if all is there."""
    return choose(spec, stages, members_left(spec, stages), MemoryRoom("cuda"))[1].device


def _home(spec: RunSpec, stages: StageRange) -> tuple[tuple[int, int], MemoryPolicy, MemoryNeed]:
    """The first of the homes that can have these stages, in GiB of card and main memory, and how it does."""
    for card, main in _HOMES:
        room = MemoryRoom("cuda", *((1 - MEMORY_RESERVE) * size * 2**30 for size in (card, main)))
        policy, need = choose(spec, stages, members_left(spec, stages), room)
        if need.device <= room.device and need.main <= room.main:
            return (card, main), policy, need
    raise ValueError(f"no home can have {stages.text}")


def _swarm(spec: RunSpec) -> tuple[Survey, list[Replica]]:
    capacities: dict[PeerId, Capacity] = {}
    replicas = []
    for index in range(spec.swarm.replicas):
        peer = PeerId(f"full-{index}")
        line = {"uplink": _REPLICA_LINE, "downlink": _REPLICA_LINE, "round_trip": _DELAY}
        capacities[peer] = Capacity("cuda", 0, 0, _REPLICA_FLOPS, **line)
        replicas.append(Replica(index, (Member(peer, StageRange(0, spec.swarm.stages), ""),), ()))
    for index in range(spec.swarm.replicas, spec.swarm.replicas + spec.swarm.pipelines):
        members = []
        for stage in range(spec.swarm.stages):
            stages, peer = StageRange(stage, stage + 1), PeerId(f"home-{index}-{stage}")
            speed = _HOME_FLOPS * (_AGAIN if _home(spec, stages)[1].checkpointing else 1)
            capacities[peer] = Capacity("cuda", 0, 0, speed, _UP, _DOWN, _DELAY)
            members.append(Member(peer, stages, ""))
        links = tuple(Link(spec.link.k, Dialer.UPSTREAM) for _ in members[1:])
        replicas.append(Replica(index, tuple(members), links))
    survey = Survey(capacities)
    return survey, list(shared_out(spec, survey, replicas))


def _figures(spec: RunSpec) -> Iterator[str]:
    survey, replicas = _swarm(spec)
    payloads = [payload_layout(spec, stage).nbytes for stage in range(spec.swarm.stages)]
    found = forecast(spec, survey, replicas, payloads)
    middle = found.per_day[PeerId(f"home-{spec.swarm.replicas}-4")]
    forward, backward = message_bytes(spec, spec.link.k)
    step = found.replicas[-1].step
    days = spec.rounds * found.round_seconds / 86_400
    yield "| calculated | |"
    yield "|---|---|"
    rows = (
        ("inner step", f"{step.seconds:.0f} s, homes compute {_share(found)} of it"),
        ("round", f"{found.round_seconds / 60:.0f} min, the exchange {found.outer_seconds:.0f} s"),
        ("tokens/s", f"{found.tokens_per_second:,.0f}; 160B tokens in {days:,.0f} days"),
        ("traffic of a home", f"{middle.sent / 1e9:.0f} GB a day up, {middle.received / 1e9:.0f} down"),
        ("join of stage 1", _join(spec)),
        ("microbatch on a link (exact)", f"{forward / 1e6:.2f} MB down, {backward / 1e6:.2f} up"),
        ("payload of a stage (exact)", f"{payloads[1] / 1e6:.1f} MB"),
    )
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _share(found: Forecast) -> str:
    shares = found.replicas[-1].step.utilization
    return f"{min(shares):.0%} to {max(shares):.0%}"


def _join(spec: RunSpec) -> str:
    of_table = BYTES_PER_VALUE if spec.link.embedding_every else 4
    nbytes = 4 * spec.parameters_of(1) + of_table * spec.model.vocabulary * spec.model.width
    minutes, as_measured = nbytes / _DOWN / 60, f"{nbytes / _DOWN / 60 / _USED:.1f} at the {_USED:.0%} used"
    sources = f"{_DOWN / _UP:.0f} homes or a full replica"
    return f"{nbytes / _GB:.1f} GB, {minutes:.1f} min from {sources}; {as_measured} at 0.1B"
