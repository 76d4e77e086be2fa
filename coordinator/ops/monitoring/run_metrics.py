"""The coordinator's metrics for Prometheus, read from its state, its metrics file and its servers.

Peers are shown as numbers of peers: their ids would be labels without a bound. What one peer does, its node
shows at an endpoint of its own (node.monitoring).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from coordinator.api.public_server import PublicServer
from coordinator.api.run_records import RunRecords
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state.state import State
from coordinator.status.run_status import run_status
from coordinator.store.metrics import PEER_CHANGES
from protocol.errors import ErrorCode
from protocol.group.batch import work_of
from protocol.server.metrics import Figure, Metric, disk_free
from protocol.server.version import program_version
from protocol.status import STALLS, Measurement, RunPhase, RunStatus
from protocol.types import Lifecycle, Role

RUN = Metric(
    "hetnode_run_info",
    "The run of this coordinator, the hash of its specification and the version of hetnode; always 1.",
    ("run", "spec", "version"),
)
PHASE = Metric(
    "hetnode_run_phase", "1 for the phase of the run: gathering, training or finished.", ("phase",)
)
PLANNED = Metric("hetnode_run_rounds", "Rounds that the whole run has.")
DECIDED = Metric("hetnode_rounds_decided_total", "Rounds that are decided at every stage.")
COMMITTED = Metric("hetnode_stage_rounds_committed_total", "Decisions of one stage that committed payloads.")
ABORTED = Metric("hetnode_stage_rounds_aborted_total", "Decisions of one stage that aborted its round.")
ROLLBACKS = Metric("hetnode_rollbacks_total", "Rounds in which the run went back to a former round.")
TOKENS = Metric("hetnode_tokens_committed_total", "Tokens whose training is committed at stage 0.")
LAST_COMMIT = Metric(
    "hetnode_last_commit_timestamp_seconds",
    "Unix time of the newest decision that committed payloads; none before the first.",
)
ROUND_BEGAN = Metric(
    "hetnode_round_start_timestamp_seconds", "Unix time at which the open round began; none before round 1."
)
ROUND_SECONDS = Metric(
    "hetnode_round_seconds",
    "Seconds from the start of a round to the payload of the slowest replica of the newest plan.",
)
STALLED = Metric("hetnode_run_stalled", "1 while the run cannot go on before a peer joins or returns.")
PAUSED = Metric("hetnode_run_paused", "1 while the run is paused by its operator or by an alarm.")
AGREE = Metric("hetnode_anchors_agree", "1 while all live peers have equal anchors, else 0.")

PEERS = Metric(
    "hetnode_peers",
    "Peers by role and lifecycle; gone are those that left or are lost.",
    ("role", "lifecycle"),
)
QUARANTINED = Metric("hetnode_peers_quarantined", "Peers in quarantine.")
BANNED = Metric("hetnode_peers_banned", "Peers that the operator has banned.")
CHANGES = Metric(
    "hetnode_peer_changes_total",
    "Changes of peers since this process began: joined, role, left, lost, retreated, banned, strike, "
    "quarantined.",
    ("change",),
)
REFUSALS = Metric(
    "hetnode_refusals_total", "Refused calls since this process began, by error code.", ("code",)
)

EPOCH = Metric("hetnode_plan_epoch", "The number of the newest plan.")
REPLICAS = Metric("hetnode_replicas", "Replicas in the newest plan.")
COMPLETE = Metric("hetnode_replicas_complete", "Replicas of the open round in which every member takes part.")
MEMBERS = Metric("hetnode_replica_members", "Members of each replica of the newest plan.", ("replica",))
MEASURED_ROUND = Metric(
    "hetnode_replica_round", "The newest round that each replica has measured.", ("replica",)
)
VALIDATION_LOSS = Metric(
    "hetnode_replica_validation_loss",
    "Validation loss after the newest measured round, in nats per token.",
    ("replica",),
)
TRAIN_LOSS = Metric(
    "hetnode_replica_train_loss",
    "Mean training loss of the newest measured round, in nats per token.",
    ("replica",),
)
SPEED = Metric(
    "hetnode_replica_tokens_per_second", "Tokens per second in the newest measured round.", ("replica",)
)
PHASE_SECONDS = Metric(
    "hetnode_replica_phase_seconds",
    "Seconds of the newest measured round at the last member: inner is its inner phase, outer what it waited "
    "for the exchange, compute the part of the inner phase in which it computed.",
    ("replica", "phase"),
)
LINK_BYTES = Metric(
    "hetnode_replica_link_bytes",
    "Bytes on the links of each replica in the newest measured round.",
    ("replica",),
)
PAYLOAD_BYTES = Metric(
    "hetnode_replica_payload_bytes",
    "Bytes of the payloads of each replica in the newest measured round.",
    ("replica",),
)
HEALTH_ROUND = Metric("hetnode_health_round", "The newest round whose training was judged.")
COSINE = Metric(
    "hetnode_payload_cosine",
    "Cosine of a payload with the mean of the others of its round, by stage: the median and the least.",
    ("stage", "statistic"),
)
PAIR_COSINE = Metric(
    "hetnode_payload_pair_cosine",
    "Mean cosine of two payloads of a round, of the same kind of replica or of different kinds.",
    ("stage", "kinds"),
)
NORM = Metric("hetnode_payload_norm", "Median L2 norm of the payloads of a round.", ("stage",))
MEAN_NORM = Metric("hetnode_committed_norm", "L2 norm of the committed mean of a round.", ("stage",))
ERROR_SHARE = Metric(
    "hetnode_error_feedback_ratio", "Median part of error feedback in what members propose, from 0 to 1."
)
FINDINGS = Metric("hetnode_health_findings", "What is unusual in the newest round that was judged.")
ALARM = Metric("hetnode_training_alarm", "1 while an alarm about the training is open, else 0.")
LOG_BYTES = Metric("hetnode_event_log_bytes", "Size of the event log on disk.")

METRICS = tuple(each for each in globals().values() if isinstance(each, Metric))
"""All of the above, in their order."""


class RunMetrics:
    """Reads the figures of one run.

    Args:
        log_files: those of the event log; one that is not there has 0 bytes.
        servers: their refused calls are shown.
    """

    def __init__(
        self,
        log_files: Sequence[Path],
        command_loop: CommandLoop,
        servers: Sequence[PublicServer],
        records: RunRecords,
    ) -> None:
        self._log_files, self._command_loop, self._servers = log_files, command_loop, servers
        self._records, self._version = records, program_version()

    def read(self) -> Iterator[Figure]:
        """The figures as they are now."""
        state, now, unix = self._command_loop.state, self._command_loop.now(), time.time()
        health = self._records.health.latest
        hindrance = self._command_loop.hindrance
        status = run_status(state, self._records.metrics.newest.values(), now, unix, (), health, hindrance)
        yield RUN, {(status.run, status.spec.hash, self._version): 1.0}
        yield from _run(status, state)
        yield TOKENS.of(state.tokens)
        # The clock of events may differ from that of the machine, with which Prometheus compares.
        if state.committed:
            yield LAST_COMMIT.of(unix - now + state.committed_at)
        if state.phase is RunPhase.TRAINING:
            yield ROUND_BEGAN.of(unix - now + state.began_at)
        yield from _peers(status, state)
        yield CHANGES, {(change,): self._records.metrics.peer_changes[change] for change in PEER_CHANGES}
        refused = sum((server.refused for server in self._servers), Counter[ErrorCode]())
        yield REFUSALS, {(code.label,): count for code, count in sorted(refused.items(), key=_by_label)}
        yield from _replicas(status, state)
        yield from _health(status)
        yield LOG_BYTES.of(sum(file.stat().st_size for file in self._log_files if file.exists()))
        yield from disk_free(self._log_files[0].parent)


def _by_label(item: tuple[ErrorCode, int]) -> str:
    return item[0].label


def _run(status: RunStatus, state: State) -> Iterator[Figure]:
    yield PHASE.one_of(RunPhase, status.phase)
    yield PLANNED.of(status.spec.rounds)
    yield DECIDED.of(status.rounds_decided)
    yield COMMITTED.of(status.stage_rounds_committed)
    yield ABORTED.of(status.stage_rounds_aborted)
    yield ROLLBACKS.of(len(state.restored))
    yield STALLED.of(status.cause.code in STALLS)
    yield PAUSED.of(status.pause is not None)
    yield AGREE.of(status.anchors_agree)


def _peers(status: RunStatus, state: State) -> Iterator[Figure]:
    found = Counter((peer.role.value, peer.lifecycle.value) for peer in status.peers)
    yield PEERS, {(role, cycle): found[role, cycle] for role in Role for cycle in Lifecycle}
    yield QUARANTINED.of(len(state.quarantined))
    yield BANNED.of(len(state.banned))


def _replicas(status: RunStatus, state: State) -> Iterator[Figure]:
    """Of the replicas in the newest plan: their number is bounded, also over the life of the run."""
    if status.plan is None:
        return
    planned = {replica.index: replica for replica in status.plan.replicas}
    yield EPOCH.of(status.plan.epoch)
    yield REPLICAS.of(len(planned))
    yield COMPLETE.of(len(state.complete_replicas(state.current_round)))
    yield MEMBERS, {(str(index),): len(replica.members) for index, replica in planned.items()}
    phases = {index: state.phase_seconds.get(index, ()) for index in planned}
    if seconds := [work_of(state.spec, planned[each]) * known[-1] for each, known in phases.items() if known]:
        yield ROUND_SECONDS.of(max(seconds))
    measured = {str(each.index): each.figures for each in status.replicas if each.is_planned and each.figures}
    yield MEASURED_ROUND, {(index,): each.round_number for index, each in measured.items()}
    yield VALIDATION_LOSS, {(index,): each.validation_loss for index, each in measured.items()}
    yield SPEED, {(index,): each.tokens_per_second for index, each in measured.items()}
    yield LINK_BYTES, {(index,): each.link_bytes_sent for index, each in measured.items()}
    yield PAYLOAD_BYTES, {(index,): each.payload_bytes for index, each in measured.items()}
    last = {
        str(each.replica): each
        for each in sorted(status.measurements, key=_round_of)
        if each.complete and each.replica in planned and each.round_number
    }
    yield TRAIN_LOSS, {(index,): each.train_loss for index, each in last.items()}
    yield (
        PHASE_SECONDS,
        {
            (index, phase): seconds
            for index, each in last.items()
            for phase, seconds in (
                ("inner", each.inner_seconds),
                ("outer", each.outer_seconds),
                ("compute", each.compute_seconds),
            )
        },
    )


def _health(status: RunStatus) -> Iterator[Figure]:
    """Of the newest round that was judged: labels are bounded by the stages of the run."""
    yield ALARM.of(status.alarm is not None)
    health = status.health
    if health is None:
        return
    yield HEALTH_ROUND.of(health.round_number)
    yield FINDINGS.of(len(health.findings))
    if health.error_share is not None:
        yield ERROR_SHARE.of(health.error_share)
    stages = [(str(each.stage), each) for each in health.stages]
    cosines = {
        (stage, statistic): value
        for stage, each in stages
        for statistic, value in (("median", each.cosine), ("min", each.least_cosine))
    }
    pairs = {
        (stage, kinds): value
        for stage, each in stages
        for kinds, value in (("same", each.alike), ("different", each.unlike))
    }
    yield COSINE, {labels: value for labels, value in cosines.items() if value is not None}
    yield PAIR_COSINE, {labels: value for labels, value in pairs.items() if value is not None}
    yield NORM, {(stage,): each.norm for stage, each in stages}
    yield MEAN_NORM, {(stage,): each.mean_norm for stage, each in stages}


def _round_of(measurement: Measurement) -> int:
    return measurement.round_number
