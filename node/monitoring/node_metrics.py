"""The metrics of a node for Prometheus, read from its figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from node.monitoring.figures import Activity, NodeFigures
from protocol.server.metrics import Figure, Metric, disk_free
from protocol.server.version import program_version
from protocol.status import Wait

NODE = Metric(
    "hetnode_node_info",
    "The run and the peer id of this node, its device and the version of hetnode; always 1.",
    ("run", "peer", "device", "version"),
)
ACTIVITY = Metric(
    "hetnode_node_activity",
    "1 for what this node does: starting, following, training or resting, as when it is paused.",
    ("activity",),
)
CONNECTED = Metric(
    "hetnode_node_coordinator_connected",
    "1 while the coordinator answers, else 0; none while this node rests.",
)
ROUND = Metric("hetnode_node_round", "The round in which this node is.")
INNER_STEP = Metric("hetnode_node_inner_step", "Inner steps of that round that this node has done.")
INNER_STEPS = Metric("hetnode_node_inner_steps_total", "Inner steps that this node has trained.")
ROUNDS = Metric("hetnode_node_rounds_total", "Rounds in which this node has trained to the end.")
TOKENS = Metric(
    "hetnode_node_tokens_total", "Tokens that the replica of this node has trained in these rounds."
)
PHASE_SECONDS = Metric(
    "hetnode_node_phase_seconds_total",
    "Seconds of these rounds: inner is the inner phases, outer what they waited for exchanges, compute the "
    "part of the inner phases in which this node computed.",
    ("phase",),
)
WAITING = Metric(
    "hetnode_node_waiting",
    "1 for each thing that this node waits for now, else 0. It may wait for several, and compute meanwhile.",
    ("cause",),
)
WAITED = Metric(
    "hetnode_node_waiting_seconds_total", "Seconds for which this node has waited for each thing.", ("cause",)
)
SENT = Metric("hetnode_node_link_sent_bytes_total", "Bytes that this node has sent over links and in probes.")
RECEIVED = Metric(
    "hetnode_node_link_received_bytes_total", "Bytes that this node has received over links and in probes."
)
PAYLOADS = Metric("hetnode_node_payload_bytes_total", "Bytes of the payloads that this node has made.")
MEMORY = Metric(
    "hetnode_node_device_memory_bytes",
    "Memory that the worker held on its device at the end of the last inner phase; main memory on a CPU.",
)
VALIDATION_LOSS = Metric(
    "hetnode_node_validation_loss",
    "Validation loss after the last round, in nats per token; only at the last member of a replica.",
)
TRAIN_LOSS = Metric(
    "hetnode_node_train_loss",
    "Mean training loss of the last round, in nats per token; only at the last member of a replica.",
)

METRICS = (
    *(NODE, ACTIVITY, CONNECTED, ROUND, INNER_STEP, INNER_STEPS, ROUNDS, TOKENS, PHASE_SECONDS, WAITING),
    *(WAITED, SENT, RECEIVED, PAYLOADS, MEMORY, VALIDATION_LOSS, TRAIN_LOSS),
)


class NodeMetrics:
    """Shows `figures`. The disk of `folder` is looked at."""

    def __init__(self, figures: NodeFigures, folder: Path) -> None:
        self._figures, self._folder = figures, folder
        self._version = program_version()

    def read(self) -> Iterator[Figure]:
        """The figures as they are now."""
        figures = self._figures
        yield NODE, {(figures.run, figures.peer, figures.device, self._version): 1.0}
        yield ACTIVITY.one_of(Activity, figures.activity)
        if figures.activity is not Activity.RESTING:
            yield CONNECTED.of(figures.membership is not None and not figures.membership.away)
        if figures.membership is not None:
            round_number, inner_step = figures.membership.progress
            yield ROUND.of(round_number)
            yield INNER_STEP.of(inner_step)
        yield INNER_STEPS.of(figures.inner_steps)
        yield ROUNDS.of(figures.rounds)
        yield TOKENS.of(figures.tokens)
        yield PHASE_SECONDS, {(name,): figures.phase_seconds[name] for name in ("inner", "outer", "compute")}
        yield WAITING, {(cause,): figures.waits.is_waiting(cause) for cause in Wait}
        yield WAITED, {(cause,): figures.waits.seconds(cause) for cause in Wait}
        yield SENT.of(figures.sent_bytes)
        yield RECEIVED.of(figures.received_bytes)
        yield PAYLOADS.of(figures.payload_bytes)
        yield MEMORY.of(figures.memory_bytes)
        newest = figures.newest
        if newest is not None and newest.complete:
            yield VALIDATION_LOSS.of(newest.validation_loss)
            if newest.round_number:
                yield TRAIN_LOSS.of(newest.train_loss)
        yield from disk_free(self._folder)
