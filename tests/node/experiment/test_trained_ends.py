"""Links whose encoder and decoder are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from node.data.stream import open_stream
from node.experiment.in_process_replica import LocalReplica
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.variation import Variation
from node.experiment.variation_check import check
from protocol.algorithm.subspace import orthonormal_basis, perpendicular_table
from protocol.spec.run import RunSpec
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


def couple(**overrides: Any) -> RunSpec:
    """A full replica and a pipeline of four members, k 8 of d 32."""
    shape = {"swarm.replicas": 1, "swarm.pipelines": 1, "link.k": 8, "rounds": 4, "inner.steps": 1}
    return spec_of(**{**shape, "inner.microbatches": 1, "outer.top_k": 0, **overrides})


def trained(rate: float, **overrides: Any) -> LocalSwarm:
    return LocalSwarm(couple(**overrides), variation=Variation(trained_ends=True, end_rate=rate))


def ends(replica: LocalReplica) -> list[dict[str, Tensor]]:
    return [{name: value.detach().clone() for name, value in each.named.items()}
            for each in replica.link_parameters]  # fmt: skip


def test_trained_ends_begin_as_the_usual_ones() -> None:
    usual, varied = LocalSwarm(couple()), trained(0.1)
    assert varied.validate() == pytest.approx(usual.validate(), rel=1e-6)
    u_dk = orthonormal_basis(32, usual.spec.seed)[:, :8]
    for each in ends(varied.replicas[1]):
        assert torch.equal(each["encoder"], u_dk)
        assert torch.equal(each["decoder"], u_dk.T)


def test_their_gradients_are_those_of_the_whole_replica() -> None:
    """Without rounding the links of a replica are a part of one differentiable function."""
    swarm = trained(1.0, **{"inner.microbatches": 2})
    swarm.train_round()  # E and D have left U
    replica, spec = swarm.replicas[1], swarm.spec
    replica.begin_round(3, range(spec.samples_per_round()))
    replica.accumulate(0)
    found = [{name: value.grad for name, value in each.named.items()} for each in replica.link_parameters]

    copies = [{name: value.requires_grad_() for name, value in each.items()} for each in ends(replica)]
    table_vd = perpendicular_table(
        replica.members[0].outer.embedding, orthonormal_basis(32, spec.seed)[:, :8]
    )
    tokens = torch.from_numpy(open_stream(spec).read(range(spec.samples_per_round()))).long()
    ids = tokens[:, :-1]
    x = replica.host_of(0).modules[0](ids, ids_bl=ids)
    for stage, link in enumerate(copies, start=1):
        x = (x - table_vd[ids]) @ link["encoder"] @ link["decoder"] + table_vd[ids]
        targets = tokens[:, 1:] if stage == 3 else None
        x = replica.host_of(stage).modules[stage](x, targets, ids_bl=ids)
    x.backward()  # of the last stage: the loss
    for link, expected in zip(found, copies, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(link[name], value.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_they_learn_at_their_rate_and_replicas_do_not_share_them() -> None:
    moved = []
    for rate in (0.1, 0.3):
        swarm = trained(rate, **{"swarm.pipelines": 2})
        before = ends(swarm.replicas[1])
        swarm.train_round()
        one, other = ends(swarm.replicas[1]), ends(swarm.replicas[2])
        assert not torch.equal(one[0]["encoder"], other[0]["encoder"])
        moved.append(float((one[2]["decoder"] - before[2]["decoder"]).norm()))
    # A first step of AdamW is the learning rate in every entry.
    assert moved[1] == pytest.approx(3 * moved[0], rel=0.01)


def test_they_stay_private_where_tables_are_shared() -> None:
    variation = Variation(trained_ends=True, share_tables=True)
    swarm = LocalSwarm(couple(**{"swarm.pipelines": 2, "link.table": True}), variation=variation)
    swarm.train_round()
    one, other = (
        {name: value for link in ends(replica) for name, value in link.items()}
        for replica in swarm.replicas[1:]
    )
    equal = {name: torch.equal(value, other[name]) for name, value in one.items()}
    assert equal == {"encoder": False, "decoder": False}
    rows = [replica.members[1].hosted.table_values for replica in swarm.replicas[1:]]
    assert rows[0] is not None
    assert rows[1] is not None
    assert torch.equal(rows[0]["rows"], rows[1]["rows"])


def test_they_go_together_with_tables_and_coarse_rounding() -> None:
    variation = Variation(trained_ends=True, stochastic_rounding=True, link_feedback=True)
    spec = couple(**{"link.dtype": "int4", "inner.microbatches": 2, "link.table": True})
    swarm, again = (LocalSwarm(spec, variation=variation) for _ in range(2))
    assert len(swarm.replicas[1].link_parameters) == 3
    assert [swarm.train_round() for _ in range(2)] == [again.train_round() for _ in range(2)]
    assert swarm.validate() == again.validate()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"end_rate": 0.3}, "end_rate is for trained_ends"),
        ({"trained_ends": True, "basis_every": 1}, "trained_ends does not go together"),
        ({"trained_ends": True, "projected_share": 0.5}, "trained_ends does not go together"),
        ({"trained_ends": True, "uncompressed_pipelines": 1}, "treat all links alike"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        Variation(**changes)


def test_uncompressed_links_have_no_ends_to_train() -> None:
    with pytest.raises(ValueError, match="links that compress"):
        check(couple(**{"link.k": 0}), Variation(trained_ends=True))
