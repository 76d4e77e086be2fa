"""The stored form of a plan: what comes back, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.history.plan_body import decode, encode
from protocol.types import Dialer, Link, Member, PeerId, Replica, StageRange

A, B = PeerId("a"), PeerId("b")
PIPELINE = Replica(
    3,
    (Member(A, StageRange(0, 2), "h:1", relayed=True), Member(B, StageRange(2, 3), "")),
    (Link(16, Dialer.DOWNSTREAM),),
    weight=0.75,
    microbatches=3,
)


def test_the_replicas_come_back_without_endpoints() -> None:
    (found,) = decode(encode([PIPELINE], {A: 1, B: 2}), {1: A, 2: B})
    assert found == replace(PIPELINE, members=tuple(replace(each, endpoint="") for each in PIPELINE.members))


def test_a_thousand_replicas_take_few_bytes() -> None:
    replicas = [replace(PIPELINE, index=index) for index in range(1000)]
    assert len(encode(replicas, {A: 1, B: 2})) < 10_000


def test_a_member_without_a_number_is_refused() -> None:
    with pytest.raises(KeyError):
        encode([PIPELINE], {A: 1})


@pytest.mark.parametrize("body", [b"", b"no plan", encode([PIPELINE], {A: 1, B: 2})[:-5]])
def test_other_bytes_are_no_plan(body: bytes) -> None:
    with pytest.raises(ValueError, match="unreadable"):
        decode(body, {1: A, 2: B})
