"""What a member needs of its memory, and the cheapest way to do with what it has."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from protocol.memory.needs import (
    BY_PRICE,
    MemoryPolicy,
    MemoryRoom,
    choose,
    described,
    members_left,
    memory_need,
)
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import StageRange

GB = 10**9


def spec_of(**more: Any) -> RunSpec:
    return resolve("1b", overrides={"swarm.stages": 4, **more})


SPEC, MIDDLE = spec_of(), StageRange(1, 2)


def policy_of(room: MemoryRoom, spec: RunSpec = SPEC, **more: Any) -> MemoryPolicy:
    return choose(spec, MIDDLE, 2, room, **more)[0]


def test_the_cheapest_policy_that_fits_is_chosen_and_else_the_one_that_needs_least() -> None:
    needs = [memory_need(SPEC, MIDDLE, 2, "cuda", policy).device for policy in BY_PRICE]
    assert needs[0] > max(needs[1:])
    assert min(needs) == needs[-1]
    for need in needs:
        cheaper = [other for other, its in zip(BY_PRICE, needs, strict=True) if its <= need]
        assert policy_of(MemoryRoom("cuda", need, 100 * GB)) == cheaper[0]
    assert policy_of(MemoryRoom("cuda", 1, 100 * GB)) == BY_PRICE[-1]
    assert policy_of(MemoryRoom("cuda", inf, 100 * GB)) == MemoryPolicy()


def test_without_main_memory_moments_stay_and_where_it_is_not_known_all_does() -> None:
    little = memory_need(SPEC, MIDDLE, 2, "cuda").main + 1
    assert policy_of(MemoryRoom("cuda", 1, little)) == MemoryPolicy(checkpointing=True)
    assert policy_of(MemoryRoom("cuda", 1)) == MemoryPolicy()
    assert policy_of(MemoryRoom("cuda", 1, 1)) == MemoryPolicy()  # too little for the anchors alone


@pytest.mark.parametrize(
    "room", [MemoryRoom("cpu", 1, 1), MemoryRoom("mps:0", 1, 1), MemoryRoom("cuda", 1, inf, 2)]
)
def test_moments_stay_where_main_memory_is_that_of_the_device_or_of_several(room: MemoryRoom) -> None:
    assert policy_of(room) == MemoryPolicy(checkpointing=True)


def test_checkpointing_that_was_asked_for_stays() -> None:
    asked = MemoryPolicy(checkpointing=True)
    assert policy_of(MemoryRoom("cuda", inf, inf), least=asked) == asked
    assert policy_of(MemoryRoom("cuda"), least=asked) == asked
    assert policy_of(MemoryRoom("cuda", 1, inf), least=asked) == BY_PRICE[-1]


def test_moments_move_from_the_device_to_main_memory() -> None:
    usual, moved = (memory_need(SPEC, MIDDLE, 2, "", each) for each in BY_PRICE[:2])
    moments = 8 * SPEC.parameters_of(1)
    assert usual.device - moved.device == moments
    assert moments <= moved.main - usual.main < 2 * moments  # torch pins powers of two
    assert (usual.copied, moved.copied) == (0, 2 * moments)
    # 16 bytes of a parameter for training, 16 for the exchange.
    assert memory_need(SPEC, MIDDLE, 0).device >= 2 * moments
    assert usual.main >= 2 * moments
    muon = spec_of(**{"inner.optimizer": "muon"})
    assert memory_need(muon, MIDDLE, 2, "", BY_PRICE[1]).copied == pytest.approx(moments, rel=1e-3)


def test_the_text_tells_what_a_policy_costs() -> None:
    need = replace(memory_need(SPEC, MIDDLE, 2, "cuda"), device=9 * GB, main=18 * GB, copied=7 * GB)
    assert described(BY_PRICE[-1], need, "cuda:0") == (
        "9 GB on cuda:0 and 18 GB of main memory; moments in main memory and layers computed again, "
        "which takes a third more computing, 7 GB are copied in an inner step"
    )
    assert described(BY_PRICE[0], replace(need, main=0, copied=0), "cpu") == "9 GB on cpu; all on the device"


def test_a_stage_of_an_8b_model_fits_a_card_of_16_gb_beside_main_memory_of_32() -> None:
    model = {
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "key_value_heads": 8,
        "feed_forward": 14336,
        "vocabulary": 128256,
    }
    settings: dict[str, Any] = {f"model.{name}": value for name, value in model.items()}
    settings |= {"model.context": 2048, "inner.microbatch_size": 1, "swarm.stages": 10, "swarm.pipelines": 1}
    spec = resolve("1b", overrides=settings)
    assert 0.87e9 < spec.parameters_of(1) < 0.9e9
    room = MemoryRoom("cuda", 0.9 * 16 * GB, 0.9 * 32 * GB)
    policy, need = choose(spec, MIDDLE, members_left(spec, MIDDLE), room)
    assert policy == BY_PRICE[-1]
    assert need.device < room.device
    assert need.main < room.main


def test_a_chain_of_fewer_members_has_fewer_microbatches_in_flight() -> None:
    spec = spec_of(**{"swarm.pipelines": 1})
    assert [members_left(spec, StageRange(at, at + 1)) for at in range(4)] == [4, 3, 2, 1]
    fewer = spec_of(**{"swarm.pipelines": 1, "swarm.members": 2})
    assert [members_left(fewer, StageRange(at, at + 1)) for at in range(4)] == [2, 1, 1, 1]
    assert members_left(fewer, StageRange(0, 4)) == 1


def test_documents_apart_take_a_mask_for_each_stage_and_microbatch_in_flight() -> None:
    apart = spec_of(**{"data.tokenizer": "tokenizer.json", "data.pack": "documents"})
    more = memory_need(apart, MIDDLE, 2, "cuda").device - memory_need(SPEC, MIDDLE, 2, "cuda").device
    assert more == 3 * 4 * SPEC.inner.microbatch_size * SPEC.model.context**2
