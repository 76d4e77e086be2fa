"""Runs whose inner steps overlap with exchanges, and a record of what each node trained and applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from node.core.optimizer.outer_stage import CommitProbe
from node.core.optimizer.outer_state import OuterState
from node.core.worker.hosted_stages import Message
from node.core.worker.trainer import Trainer
from node.ipc.stored_payload import Payload, name_of
from protocol.math.clipping import clipping_scales, payload_norm
from protocol.spec.run import RunSpec
from protocol.types import Role
from tests.virtual.network import current_machine
from tests.virtual.scenario import SPARSE, swarm_spec
from tests.virtual.swarm import VirtualSwarm

AHEAD = 2


def spec_of(members: Mapping[str, Role], rounds: int = 5, **overrides: Any) -> RunSpec:
    overlapping = {**SPARSE, "inner.steps": 4, "inner.microbatches": 1, "outer.overlap": AHEAD}
    return swarm_spec(members, rounds, **{**overlapping, **overrides})


@dataclass
class NodeRecord:
    """What the trainer of one node has learned, sent and trained.

    Attributes:
        balance: by (stage, name): the sum of all changes by inner steps, minus what its payloads have sent.
        trained: how often it has trained each step of each round, by (round, step).
        samples: the ordinals that it has read, by (round, step).
        applied: steps between its proposal and the update of a round, by (round, stage); -1 without proposal.
    """

    balance: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    samples: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    applied: dict[tuple[int, int], int] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    forgotten: int = 0


class Records(dict[str, NodeRecord]):
    """The records of all nodes, by name."""

    def __missing__(self, name: str) -> NodeRecord:
        return self.setdefault(name, NodeRecord())


def record_trainers(monkeypatch: pytest.MonkeyPatch) -> Records:
    """Record, from now on, what the trainers of all nodes do."""
    records = Records()
    apply, forward, commit = Trainer.apply, Trainer.forward, Trainer.commit
    propose, abort, forget = OuterState.propose, OuterState.abort, OuterState.forget_error

    def parameters(trainer: Trainer) -> dict[tuple[int, str], Tensor]:
        found = {stage: trainer.parameters(stage) for stage in trainer.stages}
        return {(stage, name): value for stage, named in found.items() for name, value in named.items()}

    def note_apply(self: Trainer, step: int, norm: float) -> None:
        record = records[current_machine()]
        before = {key: value.detach().clone() for key, value in parameters(self).items()}
        apply(self, step, norm)
        for key, value in parameters(self).items():
            learned = (before[key] - value.detach()).double()
            record.balance[key] = record.balance.get(key, torch.zeros_like(learned)) + learned
        record.trained[self.phase.round_number, step] += 1
        for stage in record.since:
            record.since[stage] += 1

    def note_propose(self: OuterState, stage: int, share: float = 1.0) -> bytes | None:
        records[current_machine()].since[stage] = 0
        return propose(self, stage, share)

    def note_commit(
        self: Trainer,
        stage: int,
        round_number: int,
        payloads: list[tuple[Payload, float]],
        mine: bool,
        probe: CommitProbe | None = None,
    ) -> str:
        record, outer = records[current_machine()], self.outer[stage]
        if mine:
            assert outer.pending is not None
            decoded = [outer.received.decoded(data) for data, _ in payloads]
            position = [name_of(data) for data, _ in payloads].index(name_of(outer.pending["payload"]))
            scale = clipping_scales([payload_norm(each) for each in decoded], self.spec.outer.clip)[position]
            for name, sparse in decoded[position].items():
                sent = torch.zeros_like(outer.anchor[name])
                sparse.add_to(sent.view(-1), scale * outer.pending["share"])
                record.balance[stage, name] = record.balance[stage, name] - sent.double()
        record.applied[round_number, stage] = record.since.pop(stage, -1)
        return commit(self, stage, round_number, payloads, mine, probe)

    def note_abort(self: OuterState, stage: int, round_number: int) -> None:
        record = records[current_machine()]
        record.applied[round_number, stage] = record.since.pop(stage, -1)
        abort(self, stage, round_number)

    def note_forward(
        self: Trainer, step: int, microbatch: int, received: Message | None, round_number: int = 0
    ) -> Message | None:
        if received is None and step < self.spec.inner.steps:
            read = records[current_machine()].samples.setdefault((self.phase.round_number, step), [])
            read += self.samples.ordinals(step, microbatch)
        return forward(self, step, microbatch, received, round_number)

    def note_forget(self: OuterState, stage: int) -> None:
        records[current_machine()].forgotten += 1
        forget(self, stage)

    for owner, name, noting in (
        (Trainer, "apply", note_apply),
        (Trainer, "forward", note_forward),
        (Trainer, "commit", note_commit),
        (OuterState, "propose", note_propose),
        (OuterState, "abort", note_abort),
        (OuterState, "forget_error", note_forget),
    ):
        monkeypatch.setattr(owner, name, noting)
    return records


def assert_balanced(swarm: VirtualSwarm, records: Records, *names: str) -> None:
    """All that was learned was sent, is in the error feedback, or is the difference to the anchor."""
    for name in names:
        trainer = swarm.trainer(name)
        for (stage, tensor), expected in records[name].balance.items():
            outer, local = trainer.outer[stage], trainer.parameters(stage)[tensor].detach()
            kept = outer.error[tensor].double() + (outer.anchor[tensor].double() - local.double())
            torch.testing.assert_close(kept, expected, rtol=0, atol=2e-6, msg=f"{name} {stage} {tensor}")
            assert float(expected.abs().max()) > 1e-4, "nothing was learned, so nothing is shown"


def steps_before_the_update(spec: RunSpec) -> dict[tuple[int, int], int]:
    """After how many steps of the next round each (round, stage) is to be applied."""
    stages, last = range(spec.swarm.stages), spec.rounds
    return {(r, s): AHEAD if r < last else 0 for r in range(1, last + 1) for s in stages}


def applied_by(records: Records, *names: str) -> dict[tuple[int, int], set[int]]:
    found: dict[tuple[int, int], set[int]] = {}
    for name in names:
        for key, steps in records[name].applied.items():
            found.setdefault(key, set()).add(steps)
    return found


LOSSLESS = {"outer.error_decay": 1.0}
"""Without decay of the error feedback, learned and sent values can be balanced."""
