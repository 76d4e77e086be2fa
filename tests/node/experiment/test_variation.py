"""Every variation of the algorithm does what its name says, and nothing else."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from node.core.optimizer.adamw import AdamW
from node.experiment.in_process_replica import LocalReplica
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.row_wise import RowWiseAdamW
from node.experiment.variation import UNVARIED, Variation
from node.experiment.variation_runner import grassmann_step
from protocol.math.embedding_snapshot import active_snapshot
from protocol.math.subspace import orthonormal_basis, perpendicular_table
from protocol.spec.run import RunSpec
from tests.support.local_swarms import parameters
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


def mixed(**overrides: Any) -> RunSpec:
    """Two full replicas and two pipelines of four members, k 8 of d 32 or so.

    Short rounds, and dense payloads, which are decoded faster: variations change neither.
    """
    shape = {"swarm.replicas": 2, "swarm.pipelines": 2, "link.k": 8, "rounds": 4}
    return spec_of(**{**shape, "inner.microbatches": 1, "outer.top_k": 0, **overrides})


def pair(**overrides: Any) -> RunSpec:
    """One full replica and one pipeline."""
    return mixed(**{"swarm.replicas": 1, "swarm.pipelines": 1, "inner.steps": 1, **overrides})


def links(replica: LocalReplica) -> list[Any]:
    return [member.hosted.downstream for member in replica.members[:-1]]


def receiving_ends(replica: LocalReplica) -> list[Any]:
    return [member.hosted.upstream for member in replica.members[1:]]


def follows_the_embedding(swarm: LocalSwarm) -> bool:
    end = receiving_ends(swarm.replicas[-1])[0]
    table = swarm.replicas[-1].members[0].outer.embedding
    return torch.allclose(end.perpendicular_vd, perpendicular_table(table, end.basis_dk), atol=1e-7)


def test_the_default_changes_nothing_and_only_changes_are_written_down() -> None:
    assert UNVARIED.changes == {}
    assert Variation(full_weight=2).changes == {"full_weight": 2.0}
    usual, same = LocalSwarm(pair()), LocalSwarm(pair(), variation=Variation())
    assert usual.train_round() == same.train_round()


@pytest.mark.parametrize("other", [{"adaptation": False}, {"weight_projection": True}])
def test_a_basis_that_changes_excludes_what_keeps_it(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="grassmann_every"):
        Variation(grassmann_every=1, **other)


@pytest.mark.parametrize("steps", [((3, 8), (1, 2)), ((1, 2), (1, 4)), ((0, 4),), ((1, 0),), ((2, 5),)])
def test_replicas_are_given_for_ascending_rounds(steps: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValidationError, match="round"):
        Variation(replicas_by_round=steps)


def test_no_replica_weighs_more_where_gradients_are_averaged() -> None:
    with pytest.raises(ValidationError, match="full_weight"):
        Variation(average_gradients=True, full_weight=2)


@pytest.mark.parametrize("adaptation", [True, False])
def test_without_adaptation_the_links_keep_the_table_that_they_began_with(adaptation: bool) -> None:
    swarm = LocalSwarm(pair(), variation=Variation(adaptation=adaptation))
    before = receiving_ends(swarm.replicas[-1])[0].perpendicular_vd.clone()
    swarm.train_round()
    assert follows_the_embedding(swarm) == adaptation
    ends = receiving_ends(swarm.replicas[-1])
    assert all(torch.equal(end.perpendicular_vd, before) != adaptation for end in ends)


@pytest.mark.parametrize("every", [1, 2])
def test_links_follow_the_snapshot_that_is_active(every: int) -> None:
    swarm = LocalSwarm(pair(**{"link.embedding_every": every}))
    after = [swarm.replicas[0].members[0].outer.embedding.clone()]
    for finished in range(1, 5):
        swarm.train_round()
        after.append(swarm.replicas[0].members[0].outer.embedding.clone())
        expected = after[active_snapshot(finished + 1, every)].to(torch.bfloat16).float()
        for end in receiving_ends(swarm.replicas[-1]):
            assert torch.equal(end.perpendicular_vd, perpendicular_table(expected, end.basis_dk))
    assert not torch.equal(after[4], after[0])


def test_the_active_snapshot_is_restored(tmp_path: Path) -> None:
    swarm, resumed = (LocalSwarm(pair(**{"link.embedding_every": 2})) for _ in range(2))
    for _ in range(3):
        swarm.train_round()
    swarm.save(tmp_path)
    assert resumed.restore(tmp_path)
    assert active_snapshot(4, 2) == 2
    for ends in zip(receiving_ends(swarm.replicas[-1]), receiving_ends(resumed.replicas[-1]), strict=True):
        assert torch.equal(ends[0].perpendicular_vd, ends[1].perpendicular_vd)
    assert swarm.train_round() == resumed.train_round()


@pytest.mark.parametrize("other", [{"adaptation": False}, {"grassmann_every": 1}])
def test_links_that_change_otherwise_use_no_snapshots(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="embedding_every"):
        Variation(**other).check(pair(**{"link.embedding_every": 2}))


def test_stages_in_turn_each_exchange_in_their_rounds_and_all_in_the_last() -> None:
    spec = pair(**{"outer.overlap": 1, "inner.steps": 2, "rounds": 6, "outer.turns": 2})
    swarm = LocalSwarm(spec)
    anchors = [swarm.replicas[0].members[0].outer[stage].digest() for stage in range(4)]
    for round_number in range(1, 7):
        in_turn = {stage for stage in range(4) if stage % 2 == round_number % 2}
        due = {0, 1, 2, 3} if round_number == 6 else in_turn
        report = swarm.train_round()
        assert report.contributions == tuple(2 * (stage in due) for stage in range(4))
        for replica in swarm.replicas:
            now = [replica.host_of(stage).outer[stage].digest() for stage in range(4)]
            assert {stage for stage in range(4) if now[stage] != anchors[stage]} == due
        anchors = now
    # In the last round all progress is exchanged, so all replicas are at the anchor.
    for name, value in parameters(swarm.replicas[0]).items():
        assert torch.equal(value, parameters(swarm.replicas[1])[name]), name


def test_a_stage_that_is_not_due_keeps_its_progress_for_its_round() -> None:
    """Of one replica with a dense exchange the anchors are what it has learned, whenever it exchanges."""
    alone = {"swarm.replicas": 1, "swarm.pipelines": 0, "outer.quantizer": "none", "outer.overlap": 1}
    usual, in_turn = (LocalSwarm(mixed(**alone, **{"outer.turns": each})) for each in (1, 2))
    for _ in range(4):
        usual.train_round()
        in_turn.train_round()
    for name, value in parameters(in_turn.replicas[0]).items():
        torch.testing.assert_close(value, parameters(usual.replicas[0])[name], rtol=1e-3, atol=1e-5)


def test_averaged_gradients_are_the_mean_and_keep_replicas_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = {"outer.top_k": 0, "outer.quantizer": "none", "inner.steps": 1}
    swarm = LocalSwarm(mixed(**dense, **{"link.k": 0}), variation=Variation(average_gradients=True))
    alone = LocalSwarm(mixed(**dense, **{"link.k": 0}))
    for replica in alone.replicas:
        replica.accumulate(0)
    gradients = [
        {name: value.grad.clone() for name, value in _live(replica).items()} for replica in alone.replicas
    ]
    seen: list[dict[str, Tensor]] = []
    _note_gradients(monkeypatch, seen)
    swarm.train()
    first, *others = map(parameters, swarm.replicas)
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)
    merged = {name: value for noted in seen[:4] for name, value in noted.items()}
    means = {name: torch.stack([each[name] for each in gradients]).mean(0) for name in merged}
    norm = math.sqrt(sum(float(mean.square().sum()) for mean in means.values()))
    for name, value in merged.items():
        torch.testing.assert_close(value, means[name] * min(1.0, 1.0 / norm), rtol=1e-3, atol=1e-6, msg=name)
    swarm.exchange()
    swarm.train_round()


def _live(replica: LocalReplica) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for member in replica.members
        for module in member.modules.values()
        for name, parameter in module.canonical_parameters().items()
    }


def _note_gradients(monkeypatch: pytest.MonkeyPatch, seen: list[dict[str, Tensor]]) -> None:
    """Note the gradients of each stage that takes an AdamW step, after clipping."""
    step = AdamW.step

    def noting(self: AdamW) -> None:
        found = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                assert parameter.grad is not None
                found[name] = parameter.grad.clone()
        seen.append(found)
        step(self)

    monkeypatch.setattr(AdamW, "step", noting)


def test_projected_weights_write_only_what_links_carry_and_full_replicas_are_left_alone() -> None:
    spec = mixed()
    swarm = LocalSwarm(spec, variation=Variation(weight_projection=True))
    swarm.train()
    u_dk = orthonormal_basis(spec.model.width, spec.seed)[:, : spec.link.k]
    last = spec.swarm.stages - 1
    for number, replica in enumerate(swarm.replicas):
        for name, weight in parameters(replica).items():
            if name.endswith((".wo", ".w_down")):
                outside = (weight - u_dk @ (u_dk.T @ weight)).norm() / weight.norm()
                is_projected = number >= 2 and int(name.split(".")[0]) not in spec.layers_of(last)
                assert (outside < 1e-5) == is_projected, name


def test_row_wise_moments_are_adamws_where_nothing_is_shared() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    mine = RowWiseAdamW([{"params": [("w", ours)], "weight_decay": 0.1}], shared=lambda _: False, **options)
    usual = AdamW([{"params": [("w", theirs)], "weight_decay": 0.1}], **options)
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(3, 4)
        mine.step()
        usual.step()
    torch.testing.assert_close(ours, theirs)


def test_row_wise_moments_share_one_rate_among_all_that_one_input_adds() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(6, 4))
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 0.0}
    optimizer = RowWiseAdamW([{"params": [("0.wo", weight)], "weight_decay": 0.0}],
                             shared=lambda name: name.endswith(".wo"), **options)  # fmt: skip
    weight.grad = torch.randn(6, 4)
    optimizer.step()
    expected = -0.01 * weight.grad / weight.grad.square().mean(0).sqrt()
    torch.testing.assert_close(weight.detach(), expected)
    swarm = LocalSwarm(pair(), variation=Variation(row_wise_moments=True))
    swarm.train_round()
    moments = swarm.replicas[0].members[0].inner.state_dict()[0]
    assert moments is not None
    assert torch.equal(moments["exp_avg_sq"]["0.wo"][0], moments["exp_avg_sq"]["0.wo"][1])
    assert not torch.equal(moments["exp_avg_sq"]["0.wq"][0], moments["exp_avg_sq"]["0.wq"][1])


def test_a_grassmann_step_loses_less_of_the_gradients_and_stays_orthonormal() -> None:
    torch.manual_seed(0)
    basis = orthonormal_basis(16, 3)
    gradients = torch.randn(100, 16) * torch.linspace(3, 0.1, 16)
    covariance = gradients.T @ gradients

    def lost(basis_dd: Tensor) -> float:
        u_dk = basis_dd[:, :4]
        return float((gradients - gradients @ u_dk @ u_dk.T).square().sum())

    for _ in range(50):
        turned = grassmann_step(basis, 4, covariance, 0.5)
        assert lost(turned) < lost(basis) + 1e-3
        torch.testing.assert_close(turned.T @ turned, torch.eye(16), rtol=0, atol=1e-5)
        basis = turned
    best = torch.linalg.eigh(covariance.double()).eigenvectors.flip(-1).float()
    assert lost(basis) == pytest.approx(lost(best), rel=0.02)
    torch.testing.assert_close(grassmann_step(best, 4, covariance, 0.5)[:, :4].abs(), best[:, :4].abs())


def test_links_turn_at_their_rounds_alike_in_all_pipelines_and_on_both_ends() -> None:
    spec = mixed(**{"swarm.replicas": 1, "inner.steps": 1})
    swarm = LocalSwarm(spec, variation=Variation(grassmann_every=2))
    bases = [links(swarm.replicas[1])[0].basis_dk]
    for _ in range(4):
        swarm.train_round()
        bases.append(links(swarm.replicas[1])[0].basis_dk)
        for one, other in zip(links(swarm.replicas[1]), links(swarm.replicas[2]), strict=True):
            assert torch.equal(one.basis_dk, other.basis_dk)
        for upper, lower in zip(links(swarm.replicas[1]), swarm.replicas[1].members[1:], strict=True):
            assert torch.equal(upper.basis_dk, lower.hosted.upstream.basis_dk)
    turned = [not torch.equal(a, b) for a, b in pairwise(bases)]
    assert turned == [False, True, False, True]


def test_validation_is_not_observed() -> None:
    swarm = LocalSwarm(pair(), variation=Variation(grassmann_every=3))
    swarm.validate()
    assert swarm.steering.gradients is None
    swarm.train()
    assert swarm.steering.gradients is not None


def test_full_replicas_may_weigh_more() -> None:
    swarm = LocalSwarm(pair(), variation=Variation(full_weight=3))
    assert [replica.weight for replica in swarm.plan.replicas] == [3, 1]
    usual = LocalSwarm(pair())
    swarm.train_round()
    usual.train_round()
    assert not torch.equal(parameters(swarm.replicas[0])["0.wq"], parameters(usual.replicas[0])["0.wq"])
