"""What the stages of a member need of its memory, and how little of the device they can do with.

A member has a device and main memory; on a CPU, and on an MPS device, both are one. Per parameter, in bytes:

    device   weight 4, gradient 4, two moments 8 (Muon keeps one for the matrices of layers)
    main     anchor 4, error feedback 4; while a round is exchanged also the proposal's error 4, and of one
             stage after another the next anchor 4. nesterov keeps 4 more of each anchor; an outer.overlap
             the parameters at the proposal, 4

and beside them on the device: what autograd keeps of each microbatch in flight, the loss, the basis of links
and T_perp of the link upstream. Training and exchange follow each other, so the larger one counts.

A member that lacks memory on its device has two ways (:class:`MemoryPolicy`), and takes what costs least:
moments in main memory cost copies, which run beside the arithmetic; activations that are computed again cost
a third of the computing. The coordinator, nodes, and the tables for people all ask :func:`memory_need`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from protocol.math.loss_chunk import chunk_rows
from protocol.math.microbatch_order import most_in_flight
from protocol.spec.run import RunSpec
from protocol.types import StageRange

PIECE, SLOTS = 2**24, 3
"""Elements of a moment that go through the device at once, and how many pieces are there at most."""
_SCALAR, _HALF = 4, 2


@dataclass(frozen=True)
class MemoryPolicy:
    """How a member saves memory of its device.

    Attributes:
        host_moments: the optimizer's moments are in main memory.
        checkpointing: of each layer only the input is kept, and the layer is computed again.
    """

    host_moments: bool = False
    checkpointing: bool = False

    def __str__(self) -> str:
        parts = ["moments in main memory"] * self.host_moments + [
            "layers computed again"
        ] * self.checkpointing
        return " and ".join(parts) or "all on the device"


BY_PRICE = (
    MemoryPolicy(),
    MemoryPolicy(host_moments=True),
    MemoryPolicy(checkpointing=True),
    MemoryPolicy(host_moments=True, checkpointing=True),
)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a member needs on its device and beside it in main memory, and copies in an inner step.

    On a device that shares main memory, `device` is all.
    """

    device: int
    main: int
    copied: int = 0


@dataclass(frozen=True)
class MemoryRoom:
    """Bytes that a member may use: of its device, and of main memory. A `main` of 0 is not known.

    What does not tell its main memory, such as an older program, keeps all on its device. `ranks` is how many
    devices share the main memory: several keep their moments, and shard them where they lack memory.
    """

    kind: str  # of the device, as torch calls it; "" is one with memory of its own
    device: float = inf
    main: float = 0
    ranks: int = 1


def shares_main(device: str) -> bool:
    """Whether a torch device has no memory but the machine's."""
    return device.partition(":")[0] in ("cpu", "mps")


def members_left(spec: RunSpec, stages: StageRange) -> int:
    """The most members from one with `stages` to the end of its chain, itself included."""
    return min(spec.swarm.stages - stages.stop + 1, spec.swarm.chain_length - (stages.first > 0)) or 1


def choose(
    spec: RunSpec,
    stages: StageRange,
    left: int,
    room: MemoryRoom,
    least: MemoryPolicy = BY_PRICE[0],
    parts: int = 1,
) -> tuple[MemoryPolicy, MemoryNeed]:
    """The cheapest policy whose need is in `room`, else the one that needs least of the device; and its need.

    Policies keep what `least` has. `left` and `parts` are those of :func:`memory_need`.
    """
    found = [
        (policy, memory_need(spec, stages, left, room.kind, policy, parts))
        for policy in BY_PRICE
        if _is_possible(policy, room, least)
    ]
    able = [each for each in found if each[1].main <= (room.main or inf)] or found[:1]
    fits = (each for each in able if each[1].device <= room.device)
    return next(fits, min(able, key=lambda each: each[1].device))


def _is_possible(policy: MemoryPolicy, room: MemoryRoom, least: MemoryPolicy) -> bool:
    if policy == least or policy.checkpointing < least.checkpointing:
        return policy == least
    return room.main > 0 and not (policy.host_moments and (room.ranks > 1 or shares_main(room.kind)))


@lru_cache(maxsize=4096)  # plans ask for the same stages of many peers
def memory_need(
    spec: RunSpec,
    stages: StageRange,
    left: int,
    device: str = "",
    policy: MemoryPolicy = BY_PRICE[0],
    parts: int = 1,
) -> MemoryNeed:
    """What a member with `stages` needs.

    Args:
        left: members from this one to the end of its chain. The nearer to the start, the more microbatches
            are in flight.
        device: as torch calls it; "" is one with memory of its own.
        parts: into how many devices like this one the parameters are sharded.
    """
    sizes = [spec.parameters_of(stage) // parts for stage in stages]
    trained = sum(sizes) + (stages.first > 0) * spec.link_table_parameters // parts
    layers = sum(len(spec.layers_of(stage)) for stage in stages)
    lacking = spec.lacks_second_moment(layers) // parts
    weights, moments = _SCALAR * trained, _SCALAR * (2 * trained - lacking)
    links, refreshed = _links(spec, stages)
    kept, worked = _activations(spec, layers, left, policy.checkpointing)
    passes = kept + _masks(spec, stages, left) + max(worked, _loss(spec, stages, device))
    training, exchange = _outer(spec, stages, sizes)
    if shares_main(device):
        trains = 2 * weights + moments + links + passes + training
        return MemoryNeed(max(trains, weights + moments + links + max(refreshed, exchange)), 0)
    held = 0 if policy.host_moments else moments
    step = policy.host_moments * _pieces(spec, lacking > 0) + (lacking > 0) * _turned(spec)
    trains = 2 * weights + held + links + max(passes, step)
    on_device = max(trains, weights + held + links + refreshed)
    main = max(training, exchange) + policy.host_moments * _pinned(spec, layers, stages, moments)
    return MemoryNeed(on_device, main, policy.host_moments * 2 * moments)


def described(policy: MemoryPolicy, need: MemoryNeed, device: str) -> str:
    """What a policy takes and costs, for people."""
    main = f" and {need.main / 1e9:.3g} GB of main memory" if need.main else ""
    copied = f", {need.copied / 1e9:.3g} GB are copied in an inner step" if need.copied else ""
    again = ", which takes a third more computing" * policy.checkpointing
    return f"{need.device / 1e9:.3g} GB on {device or 'its device'}{main}; {policy}{again}{copied}"


def layer_activations(spec: RunSpec) -> int:
    """Bytes that autograd keeps of a microbatch in one layer: about 11.5 d + 4 f values of a token."""
    model = spec.model
    attention = (5 if model.query_key_norms else 3) * (model.query_width + model.key_width)
    values = 11 * model.width // 2 + attention + 4 * model.feed_forward
    return _SCALAR * spec.inner.microbatch_size * model.context * values


def _activations(spec: RunSpec, layers: int, left: int, checkpointing: bool) -> tuple[int, int]:
    """What autograd keeps of the microbatches in flight, and what a backward pass adds to it."""
    in_flight, layer = max(0, most_in_flight(left)), layer_activations(spec)
    gradients = layer * 2 // 5  # measured: 0.2 to 0.4 of what the layer keeps
    if not checkpointing:
        return in_flight * layers * layer, gradients
    inputs = _SCALAR * spec.inner.microbatch_size * spec.model.context * spec.model.width
    return in_flight * layers * inputs, layer + gradients


def _masks(spec: RunSpec, stages: StageRange, left: int) -> int:
    """What keeps documents apart: of each stage and microbatch in flight a mask, which its layers share."""
    mask = _SCALAR * spec.inner.microbatch_size * spec.model.context**2
    return (spec.data.pack == "documents") * len(stages) * max(0, most_in_flight(left)) * mask


def _loss(spec: RunSpec, stages: StageRange, device: str) -> int:
    """The logits of a chunk twice, and the gradient of the head once more."""
    model = spec.model
    if stages.stop < spec.swarm.stages:
        return 0
    on_cpu = device.partition(":")[0] == "cpu"
    rows = min(spec.inner.microbatch_size * model.context, chunk_rows(model.vocabulary, model.width, on_cpu))
    return 2 * _SCALAR * rows * model.vocabulary + _table(spec)


def _links(spec: RunSpec, stages: StageRange) -> tuple[int, int]:
    """What links hold on the device, and what making T_perp anew takes beside it."""
    has_link = stages.first > 0 or stages.stop < spec.swarm.stages
    if not (has_link and spec.link.may_compress):
        return 0, 0
    # Every member of a chain holds the basis; T_perp is needed only where activations arrive.
    of_table = (stages.first > 0) * _table(spec)
    return of_table + _SCALAR * spec.model.width**2, 3 * of_table


def _outer(spec: RunSpec, stages: StageRange, sizes: list[int]) -> tuple[int, int]:
    """What the outer state of stages of these `sizes` takes while they train, and in an exchange."""
    copies = 1 + len(spec.outer.slots)  # the optimizer's state has the shape of the anchor
    own, overlaps, followed, moved = sum(sizes), spec.outer.overlap > 0, 0, copies * max(sizes)
    follows = stages.first > 0 and not spec.link.embedding_every
    *of_layer, table = _matrices(spec)
    if follows:  # a copy of the committed embedding
        followed, moved = copies * table, max(moved, copies * table)
    elif stages.first > 0:
        followed = table * _HALF // _SCALAR
    has_table = follows or stages.first == 0 or stages.stop == spec.swarm.stages
    summed = 2 * (table if has_table else max(of_layer))  # of one tensor at a time
    at_rest = (copies + 1 + overlaps) * own + followed
    return _SCALAR * (at_rest + overlaps * own), _SCALAR * (at_rest + own + moved + summed)


def _pieces(spec: RunSpec, is_muon: bool) -> int:
    """What goes through the device in a step, of moments in main memory."""
    *of_layer, table = _matrices(spec)
    cut = min(PIECE, max(table, *of_layer))
    return _SCALAR * SLOTS * (cut + (max(cut, *of_layer) if is_muon else cut))  # what Muon turns is not cut


def _turned(spec: RunSpec) -> int:
    """What Muon takes beside the moment of a matrix: its update, and the steps of Newton-Schulz."""
    return 5 * _SCALAR * max(_matrices(spec)[:-1])


def _pinned(spec: RunSpec, layers: int, stages: StageRange, moments: int) -> int:
    """What `moments` bytes take where each tensor of them is pinned: torch takes powers of two."""
    *of_layer, table = _matrices(spec)
    tables = (0 in stages) + (stages.stop == spec.swarm.stages)
    exact = layers * sum(of_layer) + tables * table
    taken = layers * sum(map(_power, of_layer)) + tables * _power(table)
    return moments * taken // max(1, exact)


def _matrices(spec: RunSpec) -> list[int]:
    """Elements of each matrix of a layer, and of embedding or head."""
    model = spec.model
    sides = [model.query_width] * 2 + [model.key_width] * 2 + [model.feed_forward] * 3 + [model.vocabulary]
    return [model.width * side for side in sides]


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _table(spec: RunSpec) -> int:
    return _SCALAR * spec.model.vocabulary * spec.model.width
