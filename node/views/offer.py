"""What a run would do on this machine, in sentences: shown once, before the node takes part.

Figures follow from the specification, by the cost model and the form of payloads. The share of a day that a
node trains is that of the run's last rounds; before there are any, that of a machine like this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coordinator.ops.forecast.exchange_traffic import traffic_of
from coordinator.placement.cost_model import memory_needed, message_bytes
from node.data.own import location_of
from node.data.sources import names_files
from node.net.joining import RunOffer
from node.views.run_history import size
from node.views.text import count, plain
from protocol.group.payload_bits import bits_per_parameter
from protocol.math.flops import microbatch_flops
from protocol.math.retention import LEVELS
from protocol.memory.needs import members_left
from protocol.roles import POLICIES
from protocol.spec.data import DataSource
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.spec.run import RunSpec
from protocol.types import MemberLine, PeerId, Role, StageRange

_DAY = 86_400.0
_USUAL_UPLINK = 100e6 / 8
_USUAL_FLOPS = {"cuda": 40e12, "mps": 5e12, "cpu": 0.2e12}
"""Of a machine that has measured neither; as `hetnode plan` takes them."""
_TOO_LITTLE = ": too little, so it would only wait. Free some, or ask the operator for a run of more stages"
_MOST_REPLICAS = 64
"""Beyond them the traffic of a round is taken to grow with their number."""
_PRIVATE, _SCALAR = 16, 4
"""Bytes of a parameter: moments, error feedback and progress; its anchor."""


def offer_lines(offer: RunOffer, folder: Path, own_data: Sequence[str]) -> Iterator[str]:
    """The sentences; `own_data` is what this machine's owner has named (node/data/own.py)."""
    spec, able = offer.spec, offer.capacity
    parts = {role: list(_parts(spec, role)) for role in _roles(offer)}
    needed = {
        role: [
            memory_needed(spec, each, members_left(spec, each), able.device, able.main_bytes)
            for each in found
        ]
        for role, found in parts.items()
    }
    memory = {role: max(found) for role, found in needed.items()}
    disk = {role: max(_disk(spec, each) for each in found) for role, found in parts.items()}
    traffic = {role: max(_traffic(offer, each) for each in found) for role, found in parts.items()}
    yield f"what run {plain(offer.run, 128)} would do on this machine, shown once:"
    yield f"- operator: at {plain(offer.address, 261)}, whose authority has the fingerprint {offer.pin.hex()}"
    parameters = spec.parameters
    yield f"- model: {count(parameters)} parameters in {spec.swarm.stages} stages, for {spec.rounds} rounds"
    for source in spec.data.all_sources:
        yield f"- data: {_data(source, *location_of(source, spec.data, own_data, is_own_run=False))}"
    free = f"of the {size(able.memory_bytes)} that it may use on {able.device}"
    lacks = able.memory_bytes * (1 - MEMORY_RESERVE) < min(map(min, needed.values()))
    yield f"- memory: {_each(memory)}, {free}{_TOO_LITTLE if lacks else ''}"
    yield f"- disk: {_each(disk)}, in {plain(str(folder), 200)}"
    yield f"- traffic: {_each(traffic)} a day in each direction, about"
    yield "- others in the run see its address, its peer id and its payloads (more in SECURITY.md)"


def _roles(offer: RunOffer) -> list[Role]:
    """Those that this node may get."""
    wanted = [offer.role] if offer.role is not None else [Role.REPLICA, Role.STAGE]
    return [role for role in wanted if role is Role.REPLICA or offer.spec.swarm.stages > 1] or [Role.REPLICA]


def _parts(spec: RunSpec, role: Role) -> Iterator[StageRange]:
    """The stages that a node with this role hosts at least: any one, or all."""
    stages = spec.swarm.stages
    if not POLICIES[role].joins_pipelines:
        yield StageRange(0, stages)
        return
    yield from (StageRange(stage, stage + 1) for stage in {0, min(1, stages - 1), stages - 1})


def _each(figures: Mapping[Role, float]) -> str:
    names = {Role.REPLICA: "the whole model", Role.STAGE: "one stage"}
    return ", or ".join(f"{size(figure)} for {names[role]}" for role, figure in figures.items())


def _data(source: DataSource, place: str, is_named: bool) -> str:
    shown, name = plain(place, 200), plain(source.name, 40)
    if is_named:
        what = "downloaded from what you have named" if "//" in place else "what you have named"
        return f"{what}, {shown}; the members that train with it see its tokens"
    if names_files(place):
        option = f"--data{f' {name}=' * bool(name)}"
        return (
            f"{shown}, a path or server of others. You have named none with {option}, so nothing here is read"
        )
    if place == "builtin":
        return "the Python files of this machine's interpreter"
    return f"{shown}, which is downloaded from the Hugging Face Hub"


def _replicas(spec: RunSpec) -> int:
    return max(1, spec.swarm.replicas + spec.swarm.pipelines)


def _payload(spec: RunSpec, stages: StageRange) -> float:
    """About the bytes of the payloads of `stages` in a round, mean over the rounds."""
    parameters = sum(spec.parameters_of(stage) for stage in stages)
    return parameters * bits_per_parameter(spec.outer) / 8 / spec.outer.turns


def _disk(spec: RunSpec, stages: StageRange) -> float:
    parameters = sum(spec.parameters_of(stage) for stage in stages)
    anchors = (LEVELS + 2) * _SCALAR * (1 + len(spec.outer.slots))
    payloads = spec.recovery.keep_rounds * _replicas(spec) * _payload(spec, stages)
    layers = sum(len(spec.layers_of(stage)) for stage in stages)
    private = _PRIVATE * parameters - _SCALAR * spec.lacks_second_moment(layers)
    return 2 * private + parameters * anchors + payloads


def _traffic(offer: RunOffer, stages: StageRange) -> float:
    """Bytes that a node with these stages sends or receives in a day, whichever is more."""
    spec = offer.spec
    steps = spec.inner.steps * spec.inner.microbatches
    ends = (stages.first > 0) + (stages.stop < spec.swarm.stages)
    links = steps * ends * max(message_bytes(spec, spec.link.k))
    replicas = _replicas(spec)
    tried = min(replicas, _MOST_REPLICAS)
    lines = {PeerId(str(at)): MemberLine(0, 0, True) for at in range(tried)}
    sent = [most for most, _ in traffic_of(spec).payloads(spec.outer, 0, lines).values()]
    payloads = max(sent) * (replicas / tried) * _payload(spec, stages)
    if stages.first > 0:  # it follows the embedding of stage 0
        payloads += replicas * _payload(spec, StageRange(0, 1))
    whole = links + payloads
    return whole * _DAY / (offer.round_seconds or _round_seconds(offer, stages, whole))


def _round_seconds(offer: RunOffer, stages: StageRange, nbytes: float) -> float:
    """A round of a replica of machines like this one."""
    spec, able = offer.spec, offer.capacity
    flops = able.flops or _USUAL_FLOPS.get(able.device.partition(":")[0], _USUAL_FLOPS["cpu"])
    computing = spec.inner.steps * spec.inner.microbatches * microbatch_flops(spec, stages) / flops
    return max(1e-3, computing + nbytes / (able.uplink or _USUAL_UPLINK))
