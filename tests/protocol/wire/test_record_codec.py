"""The record codec: values come back as they were; other fields, types and sizes are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.types import Part, PeerId, Role, StageRange
from protocol.wire.record_codec import (
    AS_PAIRS,
    UNBOUNDED,
    Blob,
    Bounds,
    Buffer,
    BufferBlob,
    RecordCodec,
    Span,
)
from tests.builders import spec_of


@dataclass(frozen=True)
class Inner:
    round_number: int
    stages: StageRange
    share: float = 0.5


@dataclass(frozen=True)
class Everything:
    peer: PeerId
    text: Annotated[str, Field(max_length=20)]
    inner: tuple[Inner, ...]
    roles: frozenset[Role]
    by_part: Annotated[Mapping[tuple[int, Part], tuple[int, str]], AS_PAIRS]
    by_stage: Mapping[int, str]
    file: Path
    samples: Span
    spec: RunSpec
    signature: bytes
    yes: bool = True
    maybe: Part | None = None


def everything() -> Everything:
    return Everything(
        peer=PeerId("12D3"),
        text="für 1",
        inner=(Inner(3, StageRange(0, 2)), Inner(4, StageRange(2, 3), 0.25)),
        roles=frozenset((Role.STAGE, Role.RELAY)),
        by_part={(0, Part.STAGE): (7, "ab"), (0, Part.EMBEDDING): (8, "cd")},
        by_stage={0: "a", 12: "b"},
        file=Path("/tmp/x"),
        samples=range(3, 9),
        spec=spec_of(2, 2),
        signature=bytes(range(256)),
    )


CODEC = RecordCodec[Everything](Everything, names={"round_number": "round"})


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(CODEC.encode(everything())) | fields)


def test_a_record_comes_back_as_it_was() -> None:
    found = CODEC.decode(CODEC.encode(everything()))
    assert found == everything()
    assert found.spec.hash == everything().spec.hash
    assert isinstance(found.inner[0], Inner)


def test_fields_have_their_names_in_the_json_also_in_nested_records() -> None:
    assert json.loads(CODEC.encode(everything()))["inner"][0] == {
        "round": 3,
        "stages": {"first": 0, "stop": 2},
        "share": 0.5,
    }


@pytest.mark.parametrize(
    "field",
    [
        {"unknown": 1},
        {"yes": 1},
        {"yes": "true"},
        {"peer": 7},
        {"text": "x" * 21},
        {"maybe": "nowhere"},
        {"roles": ["stage", "king"]},
        {"inner": [{"round": "3", "stages": {"first": 0, "stop": 2}}]},
        {"inner": [{"round": True, "stages": {"first": 0, "stop": 2}}]},
        {"inner": [{"round": 3, "stages": {"first": 2, "stop": 2}}]},
        {"inner": [{"round_number": 3, "stages": {"first": 0, "stop": 2}}]},
        {"inner": None},
        {"by_part": {"0": "stage"}},
        {"samples": [1]},
        {"signature": "?"},
        {"spec": {"rounds": -1}},
    ],
)
def test_other_fields_types_and_values_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(HetnodeError) as refusal:
        CODEC.decode(changed(**field))
    assert refusal.value.code is ErrorCode.BAD_REQUEST
    assert len(refusal.value.cause) < 300


def test_an_absent_field_without_a_default_is_refused() -> None:
    tree = json.loads(CODEC.encode(everything()))
    assert CODEC.read(json.dumps({name: tree[name] for name in tree if name != "maybe"})) == everything()
    with pytest.raises(ValueError, match="peer"):
        CODEC.read(json.dumps({name: tree[name] for name in tree if name != "peer"}))


@given(st.binary(max_size=50) | st.recursive(st.none(), st.lists).map(lambda tree: json.dumps(tree).encode()))
def test_other_bytes_raise_only_the_stable_error(data: bytes) -> None:
    with pytest.raises(HetnodeError) as refusal:
        RecordCodec[Inner](Inner, code=ErrorCode.FRAME_CORRUPT).decode(data)
    assert refusal.value.code is ErrorCode.FRAME_CORRUPT


@pytest.mark.parametrize(
    ("bounds", "data"),
    [
        (Bounds(nbytes=20), b'{"round_number":1000}'),
        (Bounds(values=4), b"[1,2,3,4,5]"),
        (UNBOUNDED, b"[" * 1000),
    ],
)
def test_what_is_too_long_or_too_deep_is_refused(bounds: Bounds, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes, more than 20|more than 4 values|recursion"):
        RecordCodec[tuple[int, ...]](tuple[int, ...], bounds).read(data)


def test_what_is_within_the_bounds_is_read() -> None:
    assert RecordCodec[tuple[int, ...]](tuple[int, ...], Bounds(9, 5)).read(b"[1,2,3,4]") == (1, 2, 3, 4)


def test_a_value_of_another_type_is_not_written() -> None:
    with pytest.raises(ValueError, match="serialized"):
        CODEC.encode(replace(everything(), text=7))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="surrogates"):
        CODEC.encode(replace(everything(), text="\ud800"))


def test_fields_of_other_versions_are_left_out_where_a_codec_says_so() -> None:
    codec = RecordCodec[Inner](Inner, ignores_unknown=True)
    assert codec.read(b'{"round_number":1,"stages":{"first":0,"stop":1},"later":[{}]}') == Inner(
        1, StageRange(0, 1)
    )


def test_numbers_that_are_not_finite() -> None:
    odd = Inner(1, StageRange(0, 1), math.nan)
    codec = RecordCodec[Inner](Inner)
    assert math.isnan(codec.read(codec.encode(odd)).share)
    assert json.loads(RecordCodec[Inner](Inner, nan_is_null=True).encode(odd))["share"] is None


@dataclass(frozen=True)
class Carrier:
    payloads: tuple[Blob, ...]
    buffer: BufferBlob | None = None


CARRIER = RecordCodec[Carrier](Carrier)


def test_blobs_travel_beside_the_json_without_a_copy() -> None:
    value = Carrier((b"a" * 10, b"b"), bytearray(b"c"))
    blobs: list[Buffer] = []
    data = CARRIER.encode(value, blobs)
    assert json.loads(data) == {"payloads": [0, 1], "buffer": 2}
    found = CARRIER.read(data, blobs)
    assert found.payloads[0] is value.payloads[0]
    assert found.buffer is value.buffer


def test_bytes_are_bytes_whatever_they_were_received_in() -> None:
    found = CARRIER.read('{"payloads":[0],"buffer":0}', [bytearray(b"a")])
    assert (found, type(found.payloads[0])) == (Carrier((b"a",), bytearray(b"a")), bytes)


@pytest.mark.parametrize("index", ["2", "-1", "true", '"0"', "null"])
def test_a_blob_that_did_not_come_is_refused(index: str) -> None:
    with pytest.raises(ValueError, match="payloads"):
        CARRIER.read(f'{{"payloads":[{index}]}}', [b"a", b"b"])


def test_a_blob_needs_a_place_beside_the_json() -> None:
    with pytest.raises(ValueError, match="no list"):
        CARRIER.encode(Carrier((b"a",)))
