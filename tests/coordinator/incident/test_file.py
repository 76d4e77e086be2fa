"""The file of an incident: what is written is read, and anything else is refused with its reason."""

from __future__ import annotations

import json
import lzma
from contextlib import suppress
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.incident import file
from coordinator.incident.file import Incident, from_bytes, to_bytes, up_to_round
from coordinator.incident.redaction import redacted_log, redacted_spec
from coordinator.incident.replay import replay_incident
from coordinator.state.event_codec import decode
from coordinator.state.events import CoordinatorStarted, RoundAborted, RoundCommitted
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import former_log, spec_of


@cache
def incident() -> Incident:
    log = redacted_log([decode(*row) for row in former_log()])
    return Incident(redacted_spec(spec_of(2, 2, 1, 4)), log, "1.2.3", "a test")


@cache
def lines() -> list[bytes]:
    return lzma.decompress(to_bytes(incident())).splitlines(keepends=True)


def packed(*content: bytes) -> bytes:
    return lzma.compress(b"".join(content))


def refusal_of(data: bytes) -> str:
    with pytest.raises(HetnodeError) as error:
        from_bytes(data)
    assert error.value.code is ErrorCode.INCIDENT_UNREADABLE
    return error.value.cause


def header(**changes: object) -> bytes:
    return json.dumps(json.loads(lines()[0]) | changes).encode() + b"\n"


def test_what_is_written_is_read() -> None:
    assert from_bytes(to_bytes(incident())) == incident()


def test_the_lines_are_json_that_people_can_read() -> None:
    first, second, *_ = map(json.loads, lines())
    assert first["why"] == "a test"
    assert first["events"] == len(incident().events) == len(lines()) - 1
    assert second["kind"] == type(incident().events[0]).__name__


def test_a_log_is_cut_after_the_last_decision_of_a_round() -> None:
    log = incident().events
    cut = up_to_round(log, 2)
    assert cut == log[: len(cut)]
    assert isinstance(cut[-1], RoundCommitted | RoundAborted)
    left = log[len(cut) :]
    assert all(e.decision.round_number > 2 for e in left if isinstance(e, RoundCommitted | RoundAborted))
    assert up_to_round(log, 0) == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda: b"", "its end is missing"),
        (lambda: b"no file of this kind" * 9, "not compressed with xz"),
        (lambda: to_bytes(incident())[:-40], "its end is missing"),
        (packed, "line 1 is not the header"),
        (lambda: packed(b"{}\n"), "line 1 is not the header"),
        (lambda: packed(b"[" * 100_000 + b"\n"), "line 1 is not the header"),
        (lambda: packed(header(hetnode_incident=2), *lines()[1:]), "and this version reads format 1"),
        (lambda: packed(header(spec={"rounds": 0}), *lines()[1:]), "rounds"),
        (lambda: packed(header(events=10**9), *lines()[1:]), "line 1 is not the header"),
        (lambda: packed(header(extra=1), *lines()[1:]), "line 1 is not the header"),
        (lambda: packed(header(peers=99), *lines()[1:]), "do not name the 99 peers"),
        (lambda: packed(*lines()[:-1]), "it ends after"),
        (lambda: packed(*lines(), lines()[-1]), "more than the"),
        (lambda: packed(*lines())[:0] + packed(lines()[0], b'{"kind":"Nothing","event":{}}\n'), "line 2"),
        (lambda: packed(lines()[0], b'{"kind":3,"event":{}}\n'), "line 2 is not an event"),
        (lambda: packed(lines()[0], b'{"kind":"RunFinished","event":{"at":"1"}}\n'), "line 2 is unreadable"),
        (lambda: packed(*lines()[:-1], lines()[-1][:-1]), "last line has no end"),
        (lambda: packed(lines()[0], *(each.replace(b'"stage":1', b'"stage":9') for each in lines()[1:])),
         "a round or a stage that the run does not have"),
    ],
)  # fmt: skip
def test_another_file_is_refused_with_its_reason(content: object, reason: str) -> None:
    assert callable(content)
    assert reason in refusal_of(content())


def test_a_file_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bomb = packed(lines()[0], b" " * (64 << 20))
    assert len(bomb) < 20_000
    assert "a line more than 16 MiB" in refusal_of(bomb)
    monkeypatch.setattr(file, "MOST_TEXT_BYTES", 1000)
    assert "its text has more than" in refusal_of(packed(lines()[0], b"\n" * (4 << 20)))
    monkeypatch.setattr(file, "MOST_FILE_BYTES", 10)
    assert "more than 0 MiB" in refusal_of(bomb)


@given(st.binary(max_size=300))
def test_no_bytes_raise_another_error(data: bytes) -> None:
    for content in (data, packed(data), packed(lines()[0], data, b"\n")):
        refusal_of(content)


@given(st.data())
def test_events_that_do_not_fit_each_other_are_refused_or_differ(data: st.DataObject) -> None:
    """Whatever somebody makes of a file: the replay ends with a result or with one message."""
    chosen = data.draw(st.lists(st.sampled_from(incident().events), max_size=12))
    content = to_bytes(Incident(incident().spec, (CoordinatorStarted(1.0), *chosen)))
    with suppress(HetnodeError):
        replay_incident(from_bytes(content))
