"""Inner steps that overlap with an exchange: the update comes after exactly D of them."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coordinator.run.rounds.deadlines import closes_at
from node.core.model.stage import Stage
from node.core.optimizer.outer_state import OuterState
from node.core.optimizer.schedule import learning_rate
from node.data.stream import open_stream
from node.generate import next_token_loss
from protocol.codec.payload import decode
from protocol.spec.run import RunSpec
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.overlap import (
    LOSSLESS,
    Records,
    applied_by,
    assert_balanced,
    spec_of,
    steps_before_the_update,
)
from tests.support.running_replica import plain_optimizer
from tests.virtual.scenario import FULL, MIXED, PIPE, TWO, Play, contributions
from tests.virtual.swarm import VirtualSwarm


@settings(max_examples=20, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["counts", "left out", "aborted", "cut off"])),
        max_size=8,
    ),
)
def test_all_that_a_replica_learns_is_sent_or_kept_exactly_once(rounds: list[tuple[int, str]]) -> None:
    """A round: the steps before its decision, and its end; "cut off" means that no decision arrives."""
    spec = spec_of(TWO, **LOSSLESS)
    local = {name: p.detach().clone() for name, p in Stage(spec, 1).canonical_parameters().items()}
    state, chance = OuterState(spec, {1: local}, None), torch.Generator().manual_seed(1)
    outer = state[1]
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
        state.begin_round()
        train(2)
        payload, number = state.propose(1), state.rounds[1] + 1
        assert payload is not None
        if ahead:
            state.keep_training()
            train(ahead)
        if end == "aborted":
            state.abort(1, number)
        elif end != "cut off":
            anchor = {name: value.double() for name, value in outer.anchor.items()}
            state.commit(1, number, [(payload, 1.0)], end == "counts")
            for name, sparse in decode(outer.layout, payload).items():
                values = torch.zeros_like(outer.anchor[name])
                sparse.add_to(values.view(-1), 1.0)
                if end == "counts":
                    sent[name] += values.double()
                else:  # counts as the payload of another peer with the same bytes
                    brought[name] += anchor[name] - outer.anchor[name].double()
    state.drop_proposals()
    for name, value in local.items():
        kept = outer.error[name].double() + outer.anchor[name].double() - value.double()
        torch.testing.assert_close(sent[name] + kept, learned[name], rtol=0, atol=1e-5)
        moved = initial[name] - outer.anchor[name].double() - brought[name]
        torch.testing.assert_close(moved, sent[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("late", [False, True], ids=["early decisions", "late decisions"])
def test_the_update_comes_after_exactly_d_steps_on_full_and_on_pipeline_replicas(
    play: Play, plan: FaultPlan, records: Records, late: bool
) -> None:
    spec = spec_of(MIXED, **LOSSLESS)
    for number in range(1, spec.rounds + 1) if late else ():
        plan.fail_at("a", 0, number, Moment.GATHERED, Action.DELAY, seconds=7)
    swarm = play.to_the_end(None, MIXED, spec=spec)
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds
    assert all(contributions(swarm, name) == swarm.rounds for name in MIXED)
    expected = {key: {steps} for key, steps in steps_before_the_update(spec).items()}
    assert applied_by(records, *MIXED) == expected
    read = [sample for record in records.values() for each in record.samples.values() for sample in each]
    assert Counter(read) == Counter(range(3 * spec.rounds * spec.samples_per_round()))
    assert all(set(records[name].trained.values()) == {1} for name in MIXED)
    found = swarm.measured()
    assert {(each["steps"], each["extra_steps"]) for each in found.values()} == {(4, 0)}
    # Seven seconds more for the exchange, of which the steps that overlap take two.
    waited = [each["outer_seconds"] for (_, number), each in found.items() if number < spec.rounds]
    assert all(4.5 < seconds < 7 if late else seconds < 1 for seconds in waited)
    assert all(4 <= each["inner_seconds"] < 6 for each in found.values())
    assert_balanced(swarm, records, *MIXED)


def reference(spec: RunSpec, replicas: int, ahead: int) -> dict[int, dict[str, Tensor]]:
    """The anchors after the last round, by stage: full replicas with dense exchange, in one plain loop."""
    stream, stages = open_stream(spec), range(spec.swarm.stages)
    chains = [[Stage(spec, stage) for stage in stages] for _ in range(replicas)]
    locals_ = [
        {(s, n): p for s in stages for n, p in chain[s].canonical_parameters().items()} for chain in chains
    ]
    anchor = {key: value.detach().clone() for key, value in locals_[0].items()}
    inner = spec.inner
    optimizers = [plain_optimizer(spec, {name: p for (_, name), p in named.items()}) for named in locals_]

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
        starts = [{key: value.detach().clone() for key, value in named.items()} for named in locals_]
        for named, start, mine in zip(locals_, starts, sent, strict=True) if done else ():
            for key, value in named.items():
                start[key] = anchor[key] - spec.outer.learning_rate * mine[key]
                value.data = start[key].clone()
        for replica in range(replicas):
            for number in range(done):
                step(replica, round_number + 1, number)
        for key, value in anchor.items():
            value.sub_(spec.outer.learning_rate * sum(each[key] for each in sent) / replicas)
            for replica in range(replicas):
                local = locals_[replica][key]
                local.data = value + (local.data - starts[replica][key])
    return {stage: {n: value for (s, n), value in anchor.items() if s == stage} for stage in stages}


@pytest.mark.parametrize("ahead", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_anchors_are_those_of_a_plain_loop(play: Play, ahead: int) -> None:
    dense = {"outer.top_k": 0, "outer.quantizer": "none", "outer.overlap": ahead, "outer.learning_rate": 0.7}
    spec = spec_of(TWO, rounds=4, **dense)
    swarm = play.to_the_end(None, TWO, spec=spec)
    found = {stage: outer.anchor for stage, outer in swarm.trainer("a").outer.items()}
    expected, other = (reference(spec, 2, each) for each in (ahead, ahead + 1 if ahead < 3 else 2))
    for stage, named in expected.items():
        for name, value in named.items():
            torch.testing.assert_close(found[stage][name], value, rtol=1e-3, atol=1e-5, msg=name)
    assert not torch.allclose(expected[0]["emb"], other[0]["emb"], rtol=1e-3, atol=1e-5)


def test_shares_of_the_microbatches_may_change_while_replicas_train_ahead(
    play: Play, records: Records
) -> None:
    async def slowed(swarm: VirtualSwarm) -> None:
        swarm.nodes["c"].speed = 0.5

    spec = spec_of(FULL, rounds=6, **{"inner.microbatches": 4, "grouping.balance": True, **LOSSLESS})
    swarm = play.to_the_end(slowed, FULL, spec=spec)
    assert swarm.committed(0) == swarm.rounds
    found = swarm.measured()
    assert found["c", 1]["microbatches"] == 4
    assert found["c", 6]["microbatches"] < 4
    assert all(contributions(swarm, name) == swarm.rounds for name in FULL)
    assert_balanced(swarm, records, *FULL)


def test_a_checkpoint_written_in_the_overlap_holds_the_local_values_and_the_anchor(play: Play) -> None:
    async def looked_at(swarm: VirtualSwarm) -> None:
        await swarm.until_round(5)
        await swarm.until(lambda state: (0, 5) in state.rounds)
        assert all(private_of(swarm, name, 4) for name in PIPE)

    play.to_the_end(looked_at, PIPE, spec=spec_of(PIPE, rounds=7, **LOSSLESS))


def private_of(swarm: VirtualSwarm, name: str, round_number: int) -> tuple[str, ...]:
    """The tensors of which the node's checkpoint after `round_number` has local values beside the anchor."""
    record = (
        swarm.nodes[name].folder / "checkpoint" / f"round-{round_number:06d}" / "private" / "private.json"
    )
    stages = json.loads(record.read_text())["stages"]
    return tuple(name for each in stages.values() for name in each["local"])


def test_the_match_window_counts_the_steps_that_were_trained_ahead(play: Play) -> None:
    """Steps trained ahead are done when a round begins, so H - D seconds of training stand for H steps."""
    spec = spec_of(
        TWO,
        **{"inner.steps": 20, "outer.overlap": 15, "timing.match_window": 100.0},
    )

    async def slowed(swarm: VirtualSwarm) -> None:
        swarm.nodes["b"].speed = 0.9
        await swarm.until(lambda state: state.current_round == 3 and state.opened_at is not None)
        closes, opened = closes_at(swarm.state), swarm.state.opened_at
        assert closes is not None
        assert opened is not None
        # The window begins with the first offer, but not before the usual time of an offer.
        phase, usual = opened - swarm.state.began_at, (closes - swarm.state.began_at) / (1 + 4)
        assert phase <= usual < 1.5 * phase

    swarm = play.to_the_end(slowed, TWO, spec=spec)
    assert {each["steps"] for each in swarm.measured().values()} == {20}
