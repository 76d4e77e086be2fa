"""Inner steps that overlap with an exchange: its update comes after exactly D of them; nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coordinator.rounds.deadlines import closes_at
from coordinator.state.events import PeerLost, PeerRetreated, PlanAdopted
from node.data.stream import open_stream
from node.model.stage import Stage, next_token_loss
from node.optimizer.outer_stage import OuterStage
from node.optimizer.schedule import learning_rate
from node.transport.transport import ExchangeResult
from node.worker.hosted_stages import Message
from node.worker.trainer import Trainer
from protocol.algorithm.clipping import clipping_scales, payload_norm
from protocol.algorithm.sampling import sample_range
from protocol.spec.run import RunSpec
from protocol.types import PayloadDescriptor, Role
from protocol.wire.payload_codec import decode
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.hive import VirtualTransport
from tests.virtual.network import here
from tests.virtual.scenario import (
    FULL,
    MIXED,
    PIPE,
    TWO,
    Play,
    contributions,
    departures,
    return_after,
    swarm_spec,
)
from tests.virtual.swarm import VirtualSwarm

AHEAD = 2


def spec_of(members: Mapping[str, Role], rounds: int = 5, **overrides: Any) -> RunSpec:
    overlapping = {"inner.steps": 4, "inner.microbatches": 1, "outer.overlap": AHEAD}
    return swarm_spec(members, rounds, **{**overlapping, **overrides})


@dataclass
class Book:
    """What one node has learned, sent and trained, by what its trainer was seen to do.

    Attributes:
        balance: by (stage, name): all that inner steps have changed, and less what its payloads have brought.
        trained: how often it has trained each step of each round, by (round, step).
        samples: the ordinals that it has read, by (round, step).
        applied: steps that it had trained since it proposed, whenever it applied a round, by (round, stage).
    """

    balance: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    samples: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    applied: dict[tuple[int, int], int] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    forgotten: int = 0


class Books(dict[str, Book]):
    """The book of every node, by its name."""

    def __missing__(self, name: str) -> Book:
        return self.setdefault(name, Book())


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    books = Books()
    apply, propose, commit, abort = Trainer.apply, Trainer.propose, Trainer.commit, Trainer.abort
    forward, forget = Trainer.forward, Trainer.forget_error

    def parameters(trainer: Trainer) -> dict[tuple[int, str], Tensor]:
        found = {stage: trainer.parameters(stage) for stage in trainer.stages}
        return {(stage, name): value for stage, named in found.items() for name, value in named.items()}

    def note_apply(self: Trainer, step: int, norm: float) -> None:
        book = books[here()]
        before = {key: value.detach().clone() for key, value in parameters(self).items()}
        apply(self, step, norm)
        for key, value in parameters(self).items():
            learned = (before[key] - value.detach()).double()
            book.balance[key] = book.balance.get(key, torch.zeros_like(learned)) + learned
        book.trained[self.phase.round_number, step] += 1
        for stage in book.since:
            book.since[stage] += 1

    def note_propose(self: Trainer, stage: int) -> bytes | None:
        books[here()].since[stage] = 0
        return propose(self, stage)

    def note_commit(
        self: Trainer, stage: int, round_number: int, payloads: list[tuple[bytes, float]], mine: bool
    ) -> str:
        book, outer = books[here()], self.outer[stage]
        if mine:
            assert outer.pending_payload is not None
            decoded = [decode(outer.layout, data) for data, _ in payloads]
            position = [data for data, _ in payloads].index(outer.pending_payload)
            scale = clipping_scales([payload_norm(each) for each in decoded])[position]
            for name, sparse in decoded[position].items():
                sent = torch.zeros_like(outer.anchor[name])
                sparse.add_to(sent.view(-1), scale)
                book.balance[stage, name] = book.balance[stage, name] - sent.double()
        book.applied[round_number, stage] = book.since.pop(stage, -1)
        return commit(self, stage, round_number, payloads, mine)

    def note_abort(self: Trainer, stage: int, round_number: int) -> None:
        book = books[here()]
        book.applied[round_number, stage] = book.since.pop(stage, -1)
        abort(self, stage, round_number)

    def note_forward(self: Trainer, step: int, microbatch: int, received: Message | None) -> Message | None:
        if received is None and step < self.spec.inner.steps:
            read = books[here()].samples.setdefault((self.phase.round_number, step), [])
            read += self.samples.ordinals(step, microbatch)
        return forward(self, step, microbatch, received)

    def note_forget(self: Trainer, stage: int) -> None:
        books[here()].forgotten += 1
        forget(self, stage)

    for name, noting in (
        ("apply", note_apply),
        ("propose", note_propose),
        ("commit", note_commit),
        ("abort", note_abort),
        ("forward", note_forward),
        ("forget_error", note_forget),
    ):
        monkeypatch.setattr(Trainer, name, noting)
    return books


def assert_balanced(swarm: VirtualSwarm, books: Books, *names: str) -> None:
    """What was learned is what was sent, the error feedback, and what lies between anchor and local."""
    for name in names:
        trainer = swarm.trainer(name)
        for (stage, tensor), expected in books[name].balance.items():
            outer, local = trainer.outer[stage], trainer.parameters(stage)[tensor].detach()
            kept = outer.error[tensor].double() + (outer.anchor[tensor].double() - local.double())
            torch.testing.assert_close(kept, expected, rtol=0, atol=2e-6, msg=f"{name} {stage} {tensor}")
            assert float(expected.abs().max()) > 1e-4, "nothing was learned, so nothing is shown"


@settings(max_examples=20, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["counts", "left out", "aborted", "cut off"])),
        max_size=8,
    )
)
def test_whatever_becomes_of_rounds_all_that_was_learned_is_sent_or_kept_and_nothing_twice(
    rounds: list[tuple[int, str]],
) -> None:
    """Each round has so many steps ahead of its decision, and an end; "cut off" proposes and never hears."""
    spec = spec_of(TWO, **LOSSLESS)
    local = {name: p.detach().clone() for name, p in Stage(spec, 1).canonical_parameters().items()}
    outer, chance = OuterStage(spec, 1, local), torch.Generator().manual_seed(1)
    initial = {name: value.double() for name, value in local.items()}
    brought = {name: torch.zeros_like(value) for name, value in initial.items()}  # by others, to the anchor
    learned = {name: torch.zeros_like(value) for name, value in initial.items()}
    sent = {name: torch.zeros_like(value) for name, value in initial.items()}

    def train(steps: int) -> None:
        for _, (name, value) in product(range(steps), local.items()):
            change = torch.randn(value.shape, generator=chance) * 1e-2
            before = value.double()
            value.sub_(change)
            learned[name] += before - value.double()

    for ahead, end in rounds:
        train(2)
        payload = outer.propose(local)
        assert payload is not None
        if ahead:
            outer.remember(local)
            train(ahead)
        if end == "aborted":
            outer.abort()
        elif end != "cut off":
            anchor = {name: value.double() for name, value in outer.anchor.items()}
            outer.commit([(payload, 1.0)], end == "counts", local)
            for name, sparse in decode(outer.layout, payload).items():
                values = torch.zeros_like(outer.anchor[name])
                sparse.add_to(values.view(-1), 1.0)
                if end == "counts":
                    sent[name] += values.double()
                else:  # as if it were another's, with the same bytes
                    brought[name] += anchor[name] - outer.anchor[name].double()
    for name, value in local.items():
        kept = outer.error[name].double() + outer.anchor[name].double() - value.double()
        torch.testing.assert_close(sent[name] + kept, learned[name], rtol=0, atol=1e-5)
        moved = initial[name] - outer.anchor[name].double() - brought[name]
        torch.testing.assert_close(moved, sent[name], rtol=0, atol=1e-5)


def steps_before_the_update(spec: RunSpec) -> dict[tuple[int, int], int]:
    """After how many steps of the next round each (round, stage) is to be applied."""
    stages, last = range(spec.swarm.stages), spec.rounds
    return {(r, s): AHEAD if r < last else 0 for r in range(1, last + 1) for s in stages}


def applied_by(books: Books, *names: str) -> dict[tuple[int, int], set[int]]:
    found: dict[tuple[int, int], set[int]] = {}
    for name in names:
        for key, steps in books[name].applied.items():
            found.setdefault(key, set()).add(steps)
    return found


def measured_of(swarm: VirtualSwarm) -> dict[tuple[str, int], dict[str, Any]]:
    """The measurements of the rounds, by node and round."""
    names = {swarm.peer(name): name for name in swarm.nodes}
    lines = (swarm.folder / "coordinator" / "metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if line["event"] == "measurement" and line["round"]]
    return {(names[line["peer"]], line["round"]): line for line in found}


LOSSLESS = {"outer.error_decay": 1.0}
"""Nothing of the error feedback fades, so that the books can be balanced."""


@pytest.mark.parametrize("late", [False, True], ids=["early decisions", "late decisions"])
def test_the_update_comes_after_exactly_d_steps_on_full_and_on_pipeline_replicas(
    play: Play, plan: FaultPlan, books: Books, late: bool
) -> None:
    spec = spec_of(MIXED, **LOSSLESS)
    if late:
        for round_number in range(1, spec.rounds + 1):
            plan.fail_at("a", 0, round_number, Moment.GATHERED, Action.DELAY, seconds=7)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3, 4, 5]
        assert all(contributions(swarm, name) == [1, 2, 3, 4, 5] for name in MIXED)
        expected = {key: {steps} for key, steps in steps_before_the_update(spec).items()}
        assert applied_by(books, *MIXED) == expected
        assert all(set(books[name].trained.values()) == {1} for name in MIXED)
        found = measured_of(swarm)
        assert {(each["steps"], each["extra_steps"]) for each in found.values()} == {(4, 0)}
        # Seven seconds more for the exchange, of which the steps that overlap take two.
        waited = [
            each["outer_seconds"] for (_, round_number), each in found.items() if round_number < spec.rounds
        ]
        assert all(4.5 < seconds < 7 if late else seconds < 1 for seconds in waited)
        assert all(4 <= each["inner_seconds"] < 6 for each in found.values())
        assert_balanced(swarm, books, *MIXED)

    play(scenario, MIXED, spec)


def test_every_sample_is_trained_once(play: Play, books: Books) -> None:
    spec = spec_of(MIXED)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()

    play(scenario, MIXED, spec)
    read = Counter(sample for book in books.values() for each in book.samples.values() for sample in each)
    assert read == Counter(range(3 * spec.rounds * spec.samples_per_round()))


def reference(spec: RunSpec, replicas: int, ahead: int) -> dict[int, dict[str, Tensor]]:
    """The anchors after the last round, by stage: full replicas with dense exchange, in one plain loop."""
    stream, stages = open_stream(spec), range(spec.swarm.stages)
    chains = [[Stage(spec, stage) for stage in stages] for _ in range(replicas)]
    locals_ = [
        {(s, n): p for s in stages for n, p in chain[s].canonical_parameters().items()} for chain in chains
    ]
    anchor = {key: value.detach().clone() for key, value in locals_[0].items()}
    inner, optimizers = spec.inner, []
    for named in locals_:
        decayed = [p for (_, name), p in named.items() if p.dim() == 2 and name != "emb"]
        plain = [p for (_, name), p in named.items() if p.dim() != 2 or name == "emb"]
        groups = [
            {"params": decayed, "weight_decay": inner.weight_decay},
            {"params": plain, "weight_decay": 0},
        ]
        optimizers.append(torch.optim.AdamW(groups, betas=(inner.beta1, inner.beta2), eps=inner.epsilon))

    def step(replica: int, round_number: int, number: int) -> None:
        size, per_round = inner.microbatch_size, spec.samples_per_round()
        first = ((round_number - 1) * replicas + replica) * per_round + number * size
        tokens = torch.from_numpy(stream.read(range(first, first + size))).long()
        x = tokens[:, :-1]
        for stage in chains[replica]:
            x = stage(x)
        next_token_loss(x, tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(list(locals_[replica].values()), inner.clip_norm)
        for group in optimizers[replica].param_groups:
            group["lr"] = learning_rate(inner, (round_number - 1) * inner.steps + number, spec.total_steps)
        optimizers[replica].step()
        optimizers[replica].zero_grad()

    done = 0
    for round_number in range(1, spec.rounds + 1):
        for replica in range(replicas):
            for number in range(done, inner.steps):
                step(replica, round_number, number)
        sent = [{key: anchor[key] - value.detach() for key, value in named.items()} for named in locals_]
        done = ahead if round_number < spec.rounds else 0
        covered = [{key: value.detach().clone() for key, value in named.items()} for named in locals_]
        for replica in range(replicas):
            for number in range(done):
                step(replica, round_number + 1, number)
        for key, value in anchor.items():
            value.sub_(spec.outer.learning_rate * sum(each[key] for each in sent) / replicas)
            for replica in range(replicas):
                local = locals_[replica][key]
                local.data = value + (local.data - covered[replica][key])
    return {stage: {n: value for (s, n), value in anchor.items() if s == stage} for stage in stages}


@pytest.mark.parametrize("ahead", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_anchors_are_those_of_a_plain_loop(play: Play, ahead: int) -> None:
    dense = {"outer.top_k": 0, "outer.quantizer": "none", "outer.overlap": ahead, "outer.learning_rate": 0.7}
    spec = spec_of(TWO, rounds=4, **dense)

    async def scenario(swarm: VirtualSwarm) -> dict[int, dict[str, Tensor]]:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        return {stage: outer.anchor for stage, outer in swarm.trainer("a").outer.items()}

    found, expected = play(scenario, TWO, spec), reference(spec, 2, ahead)
    other = reference(spec, 2, ahead + 1 if ahead < 3 else 2)
    for stage, named in expected.items():
        for name, value in named.items():
            torch.testing.assert_close(found[stage][name], value, rtol=1e-3, atol=1e-5, msg=name)
    assert not torch.allclose(expected[0]["emb"], other[0]["emb"], rtol=1e-3, atol=1e-5)


def holding_only_its_own(rounds: set[int], stage: int) -> Any:
    """VirtualTransport.exchange, by which nobody gets any payload of these rounds but its own."""
    exchange = VirtualTransport.exchange

    async def alone(
        self: VirtualTransport,
        payload: bytes,
        descriptor: PayloadDescriptor,
        *args: Any,
        **more: Any,
    ) -> ExchangeResult:
        if descriptor.stage == stage and descriptor.round_number in rounds:
            await self._stages[stage].payloads.hold(descriptor, bytes(payload))
            return ExchangeResult((descriptor,), ())
        return await exchange(self, payload, descriptor, *args, **more)

    return alone


def test_what_was_learned_around_an_aborted_round_counts_in_the_next(
    play: Play, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VirtualTransport, "exchange", holding_only_its_own({2, 3}, stage=1))
    spec = spec_of(MIXED, rounds=5, **LOSSLESS)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert (swarm.committed(0), swarm.committed(1)) == ([1, 2, 3, 4, 5], [1, 4, 5])
        expected = {key: {steps} for key, steps in steps_before_the_update(spec).items()}
        assert applied_by(books, *MIXED) == expected
        assert_balanced(swarm, books, *MIXED)

    play(scenario, MIXED, spec)


def test_a_replica_whose_payload_is_left_out_loses_nothing(
    play: Play, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = VirtualTransport.exchange

    async def deaf(
        self: VirtualTransport, payload: bytes, own: PayloadDescriptor, *args: Any, **more: Any
    ) -> ExchangeResult:
        found = await exchange(self, payload, own, *args, **more)
        if (here(), own.stage, own.round_number) in {("a", 0, 3), ("b", 0, 3)}:
            kept = tuple(each for each in found.held if each.owner != here_too.peer("c"))
            return ExchangeResult(kept, found.rejected)
        return found

    here_too: VirtualSwarm
    monkeypatch.setattr(VirtualTransport, "exchange", deaf)

    async def scenario(swarm: VirtualSwarm) -> None:
        nonlocal here_too
        here_too = swarm
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        owners = [{e.descriptor.owner for e in each.entries} for each in swarm.decisions if each.stage == 0]
        assert [swarm.peer("c") in each for each in owners] == [True, True, False, True, True]
        assert_balanced(swarm, books, *FULL)

    play(scenario, FULL, spec_of(FULL, **LOSSLESS))


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("b", Moment.PHASE),
        ("p", Moment.NORM),
        pytest.param("q", Moment.COOL_DOWN, marks=pytest.mark.slow),
        pytest.param("q", Moment.APPLY, marks=pytest.mark.slow),
    ],
)
def test_who_is_killed_in_the_steps_that_overlap_comes_back_and_nothing_forks(
    play: Play, plan: FaultPlan, books: Books, name: str, moment: Moment
) -> None:
    # The second step of round 4 overlaps with the exchange of round 3.
    plan.fail_at(name, None, 4, moment, Action.KILL, step=1)
    spec = spec_of(MIXED, rounds=8, **{"inner.microbatches": 3, **LOSSLESS})

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_fired(name)
        assert (3, 0) not in books[name].applied
        await return_after(swarm, name, 5)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == list(range(1, 9))
        assert contributions(swarm, "a") == list(range(1, 9))
        assert contributions(swarm, name)[-1] == 8
        # Whoever was not killed has lost nothing, its neighbour included.
        assert_balanced(swarm, books, *sorted(MIXED.keys() - {name}))

    play(scenario, MIXED, spec)


@pytest.mark.parametrize("seconds", [10, pytest.param(600, marks=pytest.mark.slow)])
def test_while_the_coordinator_is_away_replicas_train_the_overlap_and_then_up_to_a_bound(
    play: Play, plan: FaultPlan, books: Books, seconds: int
) -> None:
    plan.fail_at("a", 0, 3, Moment.GATHERED, Action.DELAY, seconds=0.0)
    spec = spec_of(MIXED, **{"recovery.extra_steps": 6, **LOSSLESS})

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_fired("a")
        swarm.coordinator.kill()
        await asyncio.sleep(seconds)
        await swarm.coordinator.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert not any(isinstance(event, PeerLost | PeerRetreated) for event in swarm.events)
        found = measured_of(swarm)
        assert {each["steps"] for each in found.values()} == {spec.inner.steps}
        extra = {each["extra_steps"] for (_, round_number), each in found.items() if round_number == 3}
        assert extra == {6} if seconds == 600 else max(extra) <= 6
        assert {each["extra_steps"] for (_, round_number), each in found.items() if round_number != 3} == {0}
        expected = {key: {steps} for key, steps in steps_before_the_update(spec).items()}
        for stage in (0, 1):
            expected[3, stage] = {AHEAD + steps for steps in extra}
        assert applied_by(books, *MIXED) == expected
        tokens = spec.inner.microbatch_size * spec.model.context * spec.inner.steps
        assert {each["tokens"] for each in found.values()} == {tokens}
        assert_balanced(swarm, books, *MIXED)

    play(scenario, MIXED, spec)


def test_a_plan_that_changes_in_between_is_followed_from_the_next_step_on(play: Play, books: Books) -> None:
    """A replica is lost while the others train ahead; they take other samples, and the same steps."""
    spec = spec_of(MIXED, rounds=7, **LOSSLESS)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.5)
        swarm.kill("a")
        await swarm.until_over("b", "p", "q")
        swarm.assert_all_agree("b", "p", "q")
        plans = [event.plan for event in swarm.events if isinstance(event, PlanAdopted)]
        assert len(plans) == 2
        changed, rest = plans[1].from_round, ("b", "p", "q")
        assert all(contributions(swarm, name) == list(range(1, 8)) for name in rest)
        assert all(set(books[name].trained.values()) == {1} for name in rest)
        assert applied_by(books, *rest)[changed - 1, 0] == {AHEAD}
        readers = [name for name in rest if books[name].samples]
        assert len(readers) == 2
        for name, step in product(readers, range(spec.inner.steps)):
            plan = plans[0] if step < AHEAD else plans[1]
            replica = plan.replica_of(swarm.peer(name))
            assert replica is not None
            samples, size = sample_range(plan, spec, changed, replica.index), spec.inner.microbatch_size
            assert books[name].samples[changed, step] == [*samples[step * size : (step + 1) * size]]
        assert_balanced(swarm, books, *rest)

    play(scenario, MIXED, spec)


def test_shares_of_the_microbatches_may_change_while_replicas_train_ahead(play: Play, books: Books) -> None:
    spec = spec_of(FULL, rounds=6, **{"inner.microbatches": 4, "grouping.balance": True, **LOSSLESS})

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["c"].speed = 0.5
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == list(range(1, 7))
        found = measured_of(swarm)
        shares = {round_number: found["c", round_number]["microbatches"] for round_number in range(1, 7)}
        assert shares[1] == 4
        assert shares[6] < 4
        assert all(contributions(swarm, name) == list(range(1, 7)) for name in FULL)
        assert_balanced(swarm, books, *FULL)

    play(scenario, FULL, spec)


def test_a_slow_replica_that_has_no_time_for_the_overlap_still_counts(play: Play, books: Books) -> None:
    spec = spec_of(FULL, rounds=5, **{"inner.steps": 10, "outer.overlap": 5, **LOSSLESS})

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["c"].speed = 0.1
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        weights = [
            entry.descriptor.weight
            for each in swarm.decisions
            for entry in each.entries
            if entry.descriptor.owner == swarm.peer("c")
        ]
        assert len(weights) > 2
        assert all(0 < weight < 0.6 for weight in weights)
        assert {steps for name in "ab" for steps in books[name].applied.values()} == {5, 0}
        assert all(steps <= 5 for steps in books["c"].applied.values())
        assert max(books["c"].trained.values()) == 1
        assert_balanced(swarm, books, *FULL)

    play(scenario, FULL, spec)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("a", 0.1),
        ("p", 3.9),
        pytest.param("p", 0.1, marks=pytest.mark.slow),
        pytest.param("q", 2.5, marks=pytest.mark.slow),
    ],
)
def test_who_drains_finishes_its_round_and_keeps_what_it_has_not_sent(
    play: Play, books: Books, name: str, after: float
) -> None:
    """Asked in the steps that overlap, when the next plan seats it already, or in those after them."""
    spec = spec_of(MIXED, rounds=7)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(after)
        swarm.drain(name)
        await swarm.until_over(name, seconds=20)
        assert departures(swarm, name) == ["drained"]
        assert not any(isinstance(event, PeerLost | PeerRetreated) for event in swarm.events)
        assert contributions(swarm, name) == [1, 2, 3]
        kept = swarm.nodes[name].folder / "checkpoint" / "round-000003"
        assert kept.exists(), sorted(kept.parent.iterdir())
        swarm.start(name)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, name)[-1] == 7
        assert books[name].forgotten == 0
        assert swarm.committed(0) == list(range(1, 8))

    play(scenario, MIXED, spec)


def test_who_comes_to_its_seat_has_nothing_to_overlap_with_and_is_in_step_from_then_on(
    play: Play, books: Books
) -> None:
    members = {**TWO, "late": Role.REPLICA}
    spec = spec_of(TWO, rounds=8, **LOSSLESS)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*TWO)
        await swarm.until_round(3)
        swarm.start("late")
        await swarm.until_over()
        swarm.assert_all_agree()
        counted = contributions(swarm, "late")
        assert counted[-1] == 8
        followed = {round_number for (round_number, _), steps in books["late"].applied.items() if steps < 0}
        assert followed == set(range(min(r for r, _ in books["late"].applied), counted[0]))
        assert {books["late"].applied[round_number, 0] for round_number in counted[:-1]} == {AHEAD}
        assert {steps for name in TWO for steps in books[name].applied.values()} == {AHEAD, 0}
        assert_balanced(swarm, books, *members)

    play(scenario, members, spec)


def test_a_checkpoint_written_in_the_overlap_holds_what_is_learned_beside_the_anchor(
    play: Play, books: Books
) -> None:
    spec = spec_of(PIPE, rounds=7, **LOSSLESS)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(5)
        await swarm.until(lambda state: (0, 5) in state.rounds)
        learned = {name: private_of(swarm, name, 4) for name in PIPE}
        assert all(learned.values())
        await swarm.until_over()
        swarm.assert_all_agree()

    play(scenario, PIPE, spec)


def private_of(swarm: VirtualSwarm, name: str, round_number: int) -> tuple[str, ...]:
    """The tensors of which the node's checkpoint after `round_` has local values beside the anchor."""
    record = (
        swarm.nodes[name].folder / "checkpoint" / f"round-{round_number:06d}" / "private" / "private.json"
    )
    stages = json.loads(record.read_text())["stages"]
    return tuple(name for each in stages.values() for name in each["local"])


def test_a_round_waits_for_the_slow_as_if_all_steps_had_been_trained_in_it(play: Play) -> None:
    """Steps trained ahead are over when a late round begins, so H - D seconds stand for H."""
    spec = spec_of(
        TWO,
        **{"inner.steps": 20, "outer.overlap": 15, "timing.match_window": 100.0, "timing.least_window": 1.0},
    )

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["b"].speed = 0.9
        swarm.start()
        await swarm.until(lambda state: state.current_round == 3 and state.opened_at is not None)
        closes, opened = closes_at(swarm.state, spec), swarm.state.opened_at
        assert closes is not None
        assert opened is not None
        assert closes - opened == pytest.approx(4 * (opened - swarm.state.began_at))
        await swarm.until_over()
        found = measured_of(swarm)
        assert {each["steps"] for each in found.values()} == {20}

    play(scenario, TWO, spec)
