"""The arbiter's verdicts on contested payloads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.checkpoint.download import TransferError, WrongBytes
from node.core.model.shapes import parameter_shapes
from node.exchange.arbiter import KEEP_ROUNDS, PayloadArbiter, StagePayloads
from node.exchange.payload_store import PayloadStore
from node.exchange.transfer import NotHeld
from protocol.codec.payload import encode
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import sparsify
from protocol.types import Finding, PayloadDescriptor, PeerId
from tests.builders import keyed, spec_of

SPEC = spec_of()
LAYOUT = PayloadLayout(parameter_shapes(SPEC, 0), SPEC.outer)
PAYLOAD = encode(LAYOUT, {name: sparsify(torch.ones(t.shape), t) for name, t in LAYOUT.tensors.items()})
OWNER, HOLDER, OTHER = (keyed(i).peer for i in range(3))
SECONDS = 60.0


class Donors:
    """Other peers: each answers with a payload or an exception; peers that are not named do not answer."""

    def __init__(self, answers: Mapping[PeerId, bytes | Exception]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def fetch(
        self, holder: str, descriptor: PayloadDescriptor, when_asked: Callable[[], None]
    ) -> bytes:
        self.asked.append(holder)
        answer = self._answers.get(PeerId(holder), TransferError("no route"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def push(self, listener: str, own: PayloadDescriptor, payload: bytes) -> None:
        raise AssertionError("the arbiter owns no payload")


def described(payload: bytes, **changes: object) -> PayloadDescriptor:
    sha256 = hashlib.sha256(payload).hexdigest()
    made = keyed(0).payload(SPEC, 0, 1)
    return replace(made, nbytes=len(payload), sha256=sha256, codec=LAYOUT.codec, **changes)


def arbiter_of(donors: Donors, folder: Path) -> tuple[PayloadArbiter, PayloadStore]:
    store = PayloadStore(folder, KEEP_ROUNDS)
    return PayloadArbiter({0: StagePayloads(LAYOUT, store, donors)}), store


async def test_a_valid_payload_is_held_and_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    arbiter, store = arbiter_of(Donors({OWNER: PAYLOAD}), tmp_path)
    descriptor = described(PAYLOAD)
    verdict = await arbiter.arbitrate(descriptor, [OWNER], SECONDS)
    assert (verdict.finding, verdict.refuted) == (Finding.HELD, ())
    assert store.get(1, descriptor.sha256) == PAYLOAD
    again, _ = arbiter_of(Donors({}), tmp_path)
    assert (await again.arbitrate(descriptor, [], 0.0)).finding is Finding.HELD, "after a restart"
    arbiter.forget(2)
    assert store.get(1, descriptor.sha256) is None


async def test_each_source_is_asked_and_those_that_refute_themselves_are_named(tmp_path: Path) -> None:
    donors = Donors({OWNER: NotHeld("refused"), OTHER: WrongBytes("another hash"), HOLDER: PAYLOAD})
    arbiter, _ = arbiter_of(donors, tmp_path)
    verdict = await arbiter.arbitrate(described(PAYLOAD), [OWNER, OTHER, HOLDER], SECONDS)
    assert verdict.finding is Finding.HELD
    assert set(verdict.refuted) == {OWNER, OTHER}
    assert donors.asked == [OWNER, OTHER, HOLDER]


async def test_no_source_left_means_not_found_at_once(tmp_path: Path) -> None:
    arbiter, _ = arbiter_of(Donors({OWNER: NotHeld("refused")}), tmp_path)
    verdict = await arbiter.arbitrate(described(PAYLOAD), [OWNER], 1e9)
    assert (verdict.finding, verdict.refuted) == (Finding.NOT_FOUND, (OWNER,))


async def test_silent_donors_are_not_refuted(tmp_path: Path) -> None:
    donors = Donors({})
    arbiter, _ = arbiter_of(donors, tmp_path)
    verdict = await arbiter.arbitrate(described(PAYLOAD), [OWNER, HOLDER], 0.05)
    assert (verdict.finding, verdict.refuted) == (Finding.NOT_FOUND, ())
    assert set(donors.asked) == {OWNER, HOLDER}


async def test_bytes_that_cannot_be_decoded_are_invalid_and_not_kept(tmp_path: Path) -> None:
    broken = bytes(len(PAYLOAD))
    arbiter, store = arbiter_of(Donors({OWNER: broken}), tmp_path)
    descriptor = described(broken)
    verdict = await arbiter.arbitrate(descriptor, [OWNER], SECONDS)
    assert verdict.finding is Finding.INVALID
    assert "header" in verdict.reason
    assert not store.has(1, descriptor.sha256)


@pytest.mark.parametrize("changes", [{"nbytes": len(PAYLOAD) + 1}, {"codec": "other"}])
async def test_a_descriptor_that_fits_no_payload_is_invalid_unread(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    donors = Donors({OWNER: PAYLOAD})
    arbiter, _ = arbiter_of(donors, tmp_path)
    verdict = await arbiter.arbitrate(replace(described(PAYLOAD), **changes), [OWNER], SECONDS)  # type: ignore[arg-type]
    assert verdict.finding is Finding.INVALID
    assert not donors.asked
