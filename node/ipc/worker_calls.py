"""The calls to the worker process: one dataclass for each, which declares its answer.

The worker does the calls strictly in the order in which they are queued, and keeps the model between them.
The methods of :class:`node.core.worker.worker.Worker` and :class:`node.machine.machine.OwnMachine` say what
each call does.

One file because it is the whole interface of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from node.ipc.stored_payload import StoredPayload
from protocol.spec.run import RunSpec
from protocol.types import Part, StageRange, TensorHeader
from protocol.wire.record_codec import AS_PAIRS, Blob, Span
from protocol.wire.typed_calls import Request

AUTO_DEVICE = "auto"
"""In place of a device: the best one that works."""


class Precision(StrEnum):
    """Of matrix products and their results. AUTO is bf16 where the device computes in it, else fp32."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True)
class ComputeOptions:
    """The device of a member, and how it computes there: see :class:`node.core.worker.compute.Compute`."""

    device: str = "cpu"
    compile: bool = False
    activation_checkpointing: bool = False
    memory_limit: int = 0  # bytes that a node may use of its device; 0 is no limit
    precision: Precision = Precision.AUTO
    sharded: bool | None = None  # parameters over the ranks; None: where they do not fit one device
    pieces: int = 1  # of a microbatch, each computed alone, where memory was short


@dataclass(frozen=True)
class DeviceInfo:
    """The device on which a worker computes.

    Attributes:
        device: as torch calls it.
        name: for people.
        precision: not AUTO.
        free_bytes: that it can still take; 0 on a CPU, which takes what is free on the machine.
    """

    device: str
    name: str
    precision: Precision
    free_bytes: int = 0


@dataclass(frozen=True)
class LocalData:
    """How this machine computes, and where it finds what the spec names; None: as the spec says."""

    compute: ComputeOptions = ComputeOptions()
    own_data: tuple[str, ...] = ()  # as --data says it (node/data/own.py)
    tokenizer: str | None = None  # its file
    initial: Path | None = None  # checkpoint, if the run starts from given parameters
    search_paths: tuple[Path, ...] = ()  # folders in which, or above which, tokenizer.json is searched


@dataclass(frozen=True)
class Message:
    """Activations or gradients of one microbatch: named tensors, and the bytes of all of them."""

    tensors: tuple[TensorHeader, ...]
    payload: Blob


@dataclass(frozen=True)
class PartInfo:
    """Size in bytes and header (protocol.math.digest) of a part that this member holds."""

    nbytes: int
    header: str


@dataclass(frozen=True)
class PayloadInfo:
    """Codec and length of the payloads of one stage."""

    codec: str
    nbytes: int


@dataclass(frozen=True)
class StageInfo:
    """What the worker has built, by hosted stage."""

    payloads: Mapping[int, PayloadInfo]  # also of stage 0, which every member applies
    capacities: Mapping[int, int]  # of the same stages, the most bytes of what their members serve by hash
    parameters: Mapping[int, int]  # their number
    parts: Annotated[
        Mapping[tuple[int, Part], PartInfo], AS_PAIRS
    ]  # also the embedding, if it is kept without stage 0
    snapshot: PartInfo  # of the embedding, whether links use it or not

    def info_of(self, stage: int, part: Part) -> PartInfo:
        return self.snapshot if part is Part.SNAPSHOT else self.parts[stage, part]


@dataclass(frozen=True)
class InnerResult:
    """What one inner phase did on this member so far."""

    loss: float  # mean over all microbatches of completed steps; NaN except on the last member
    tokens: int  # of the AdamW steps
    steps: int  # AdamW steps, without those beyond the spec's H. Equal on all members of a replica
    skipped_steps: int  # completed steps whose gradients were not finite; not counted in `steps`
    gradient_norm: float  # of the last completed step, before clipping
    nonfinite_step: int = 0  # as protocol.status.Measurement


@dataclass(frozen=True)
class InnerReport:
    """The result of an inner phase, the seconds of computing since it began, and the memory in use."""

    result: InnerResult
    compute_seconds: float
    memory_bytes: int = 0  # of the device, by this process


@dataclass(frozen=True)
class Comparison:
    """What to measure: the payloads at `positions` of a manifest, or of those that follow it without weight.

    `alike` and `unlike` are the positions of single payloads to compare the first of them with, too, or None.
    """

    positions: tuple[int, ...]
    alike: int | None = None
    unlike: int | None = None


@dataclass(frozen=True)
class MeasuredAgreement:
    """The figures of one payload, see :mod:`node.agreement.meter`; a cosine of None cannot be told.

    `alike` and `unlike` are the cosines with the single payloads of the comparison; for `likeness` see
    :mod:`node.agreement.likeness`.
    """

    cosine: float | None
    norm: float
    mean_norm: float
    alike: float | None = None
    unlike: float | None = None
    likeness: float | None = None


@dataclass(frozen=True)
class CommitResult:
    """Digests after a commit; that of the embedding only of stage 0, where members without it follow it.

    Attributes:
        agreements: of the payloads that the call asks for; None where they cannot be told.
        progress_norm, error_norm: of the own payload, see OuterStage; 0 if it is not included.
    """

    digest: str
    embedding_digest: str | None
    agreements: tuple[MeasuredAgreement | None, ...] = ()
    progress_norm: float = 0.0
    error_norm: float = 0.0


@dataclass(frozen=True)
class RestoredCheckpoint:
    """The checkpoint that was loaded: its round, and whether error feedback and moments were in it."""

    round_number: int
    has_private_state: bool


# The ranks of a peer


@dataclass(frozen=True)
class ListDevices(Request[tuple[str, ...]]):
    """Answers all GPUs of this machine, as torch calls them."""


@dataclass(frozen=True)
class FormGroup(Request[None]):
    """Become one of several ranks. The only call that differs from rank to rank; each gets all others.

    Attributes:
        device: of this rank, in place of every device that a later call names.
        host, port: of the store at which the ranks meet.
        listener: on rank 0, the descriptor of a socket that listens there; None if a store runs there.
        prefix: of the keys in the store, another one for each group that meets at the same store.
    """

    rank: int
    size: int
    device: str
    host: str
    port: int
    listener: int | None = None
    prefix: str = "hetnode"


# Before training


@dataclass(frozen=True)
class CheckDevice(Request[DeviceInfo]):
    """Answers what the node computes on, with a device in place of AUTO_DEVICE."""

    compute: ComputeOptions


@dataclass(frozen=True)
class MeasureSpeed(Request[float]):
    """Answers operations per second, measured for `seconds`."""

    spec: RunSpec
    device: str
    seconds: float
    precision: Precision = Precision.AUTO


@dataclass(frozen=True)
class RequireInitial(Request[None]):
    spec: RunSpec
    initial: Path | None


@dataclass(frozen=True)
class Build(Request[StageInfo]):
    spec: RunSpec
    stages: StageRange
    local: LocalData = LocalData()


@dataclass(frozen=True)
class Connect(Request[None]):
    """The width of each link; None where this end of the chain has no link. And the replica's index."""

    k_upstream: int | None
    k_downstream: int | None
    replica: int = 0


# The inner phase


@dataclass(frozen=True)
class BeginRound(Request[None]):
    round_number: int
    samples: Span


@dataclass(frozen=True)
class AssignSamples(Request[None]):
    samples: Span


@dataclass(frozen=True)
class Forward(Request[Message | None]):
    """`round_number` is that of its frames; 0: that of the phase."""

    step: int
    microbatch: int
    received: Message | None
    round_number: int = 0


@dataclass(frozen=True)
class Backward(Request[Message | None]):
    microbatch: int
    received: Message | None


@dataclass(frozen=True)
class SquaredNorm(Request[float]):
    pass


@dataclass(frozen=True)
class Apply(Request[None]):
    step: int
    norm: float


@dataclass(frozen=True)
class Abandon(Request[None]):
    pass


@dataclass(frozen=True)
class EndInnerPhase(Request[InnerReport]):
    pass


@dataclass(frozen=True)
class Evaluate(Request[Message | None]):
    microbatch: int
    received: Message | None


@dataclass(frozen=True)
class EndValidation(Request[float]):
    """Answers the mean loss; NaN except on the last member."""


# The outer round


@dataclass(frozen=True)
class Propose(Request[Blob | None]):
    """Answers the payload after a `share` of the inner phase; None where the parameters are not finite."""

    stage: int
    share: float = 1.0


@dataclass(frozen=True)
class Screen(Request[tuple[str, ...]]):
    """Answers for each payload why it must not count; "" where it may.

    Also of the proposal of the worker, which only its hash names. The worker keeps what it has decoded.
    """

    stage: int
    payloads: tuple[StoredPayload, ...]


@dataclass(frozen=True)
class KeepTraining(Request[None]):
    pass


@dataclass(frozen=True)
class Commit(Request[CommitResult]):
    """Commit payloads with their weights; or without weights the one result on which the group has agreed.

    `position` is that of this member's payload among the payloads, or in the group of the result; None where
    its payload cannot be in it. `uncounted` are payloads of the round without a weight, which are compared,
    too.
    """

    stage: int
    round_number: int
    payloads: tuple[StoredPayload, ...]
    weights: tuple[float, ...]
    position: int | None
    comparison: Comparison | None = None
    uncounted: tuple[StoredPayload, ...] = ()


@dataclass(frozen=True)
class CommitEmbedding(Request[str]):
    """Answers the digest of the embedding. Payloads and weights of stage 0 are as in :class:`Commit`.

    There are none where its round was aborted.
    """

    round_number: int
    payloads: tuple[StoredPayload, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Abort(Request[None]):
    stage: int
    round_number: int


# Anchors and checkpoints


@dataclass(frozen=True)
class Digests(Request[Annotated[Mapping[tuple[int, Part], tuple[int, str]], AS_PAIRS]]):
    """Answers the round that each part is after, and its digest.

    The embedding is among the parts, except where links use snapshots of it.
    """


@dataclass(frozen=True)
class LoadInitial(Request[None]):
    pass


@dataclass(frozen=True)
class LoadInitialPart(Request[str]):
    """The initial parameters as the anchor after `round_number`. Answers the digest."""

    stage: int
    part: Part
    round_number: int


@dataclass(frozen=True)
class LoadPart(Request[str]):
    """Answers the digest."""

    stage: int
    part: Part
    round_number: int
    file: Path


@dataclass(frozen=True)
class WriteSnapshot(Request[str]):
    """Answers the digest of the snapshot of TE after `round_number`: the last round of stage 0, or 0."""

    folder: Path
    round_number: int


@dataclass(frozen=True)
class UseSnapshot(Request[None]):
    """The file has the snapshot with this digest."""

    file: Path
    digest: str


@dataclass(frozen=True)
class Restore(Request[RestoredCheckpoint | None]):
    """Answers None where no checkpoint below `folder` can be used."""

    folder: Path


@dataclass(frozen=True)
class ResetError(Request[None]):
    stage: int


@dataclass(frozen=True)
class WriteCheckpoint(Request[None]):
    folder: Path
    round_number: int
