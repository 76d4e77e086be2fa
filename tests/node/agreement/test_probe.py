"""A commit measures payloads, and its result does not depend on that."""

from __future__ import annotations

from random import Random

import pytest

from node.agreement.likeness import LikenessMemory
from node.agreement.probe import AgreementProbe
from node.ipc.stored_payload import Payload, StoredPayload
from node.ipc.worker_calls import Comparison
from node.ranks.group import RankGroup
from protocol.codec.payload import decode
from protocol.math.clipping import payload_norm
from tests.support.outer_replica import Replica
from tests.support.reference import small_spec

SPEC = small_spec()


def probe_of(comparison: Comparison, *uncounted: Payload) -> AgreementProbe:
    return AgreementProbe(
        LikenessMemory(Random(1).randint), 0, comparison, uncounted, SPEC.outer.clip, RankGroup()
    )


def test_a_commit_measures_the_payload_that_it_is_asked_for_and_changes_no_bit() -> None:
    replicas = [Replica(SPEC, seed) for seed in range(3)]
    payloads = []
    for replica in replicas:
        replica.train()
        payloads.append((replica.propose(), 1.0))
    probe = probe_of(Comparison((1,), alike=2))
    for replica in replicas:
        replica.outer.commit(payloads, True, replica.local, probe if replica is replicas[0] else None)
    assert len({replica.outer.digest() for replica in replicas}) == 1
    found = probe.results()[0]
    assert found is not None
    assert found.norm == pytest.approx(payload_norm(decode(replicas[0].outer.layout, payloads[1][0])))
    assert found.alike is not None
    assert found.likeness is not None
    assert found.likeness >= found.alike - 1e-6
    assert found.unlike is None


def test_a_commit_measures_payloads_without_weight_and_does_not_depend_on_them() -> None:
    replicas = [Replica(SPEC, seed) for seed in range(3)]
    for replica in replicas:
        replica.train()
    *counted, other = [replica.propose() for replica in replicas]
    outcome = [(payload, 1.0) for payload in counted]
    first, second, _ = (replica.outer for replica in replicas)
    first.screen([*counted, other])
    measured, lost = (
        probe_of(Comparison((1, 2)), uncounted) for uncounted in (other, StoredPayload("0" * 64))
    )
    first.commit(outcome, True, replicas[0].local, measured)
    second.commit(outcome, True, replicas[1].local, lost)
    assert first.digest() == second.digest()
    assert all(found is not None and found.cosine is not None for found in measured.results())
    assert lost.results() == [None, None]
